"""Whose download starts next, among the workers of one loader.

Batches are delivered in turn, and all workers share one network: if each fetched what it likes, the
first batch would wait for the first files of every worker, and with large files for gigabytes that
nobody needs yet. So a download starts when there is a free slot, and where several wait, the one
whose batch is needed first.

Each worker writes its own row of shared memory, and reads all: what it waits for, what is on its
way, what has arrived. There is no lock that a killed worker could keep; two workers that look at
the same moment may start one download too many, which does no harm.

The slots begin as few, a batch's worth, and grow with each file that arrives: the first batch comes
soon, and a store that answers slowly, but many at a time, is asked for many. So do the bytes that
may be on their way. A few downloads may always be, however large: a store may limit each of them,
and one that hangs must not hold up the others.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

_WAITS_FOR, _FILES, _BYTES, _ARRIVED, _ARRIVED_BYTES = range(5)
_NOTHING = 1 << 62

FIRST_SLOTS = 32
MAX_SLOTS = 512
FIRST_BYTES = 128 << 20  # on their way to one loader: a tenth of a second of a fast network
MAX_BYTES = 1 << 30
ALWAYS = 8  # downloads, or one for each worker where that is more
_GROWTH = 16  # bytes that have to arrive for one more to be on its way: later batches take the
# bandwidth of the first one otherwise
_POLL_S = (0.001, 0.02)
_PATIENCE_S = 20.0  # after which a download starts anyhow, whatever the rows say
_HOLD_S = 0.3  # where the first batch takes longer, or many forks do, others lose more by waiting


class Turns:
    """The shared memory of one loader's workers; made before they are forked.

    Args:
        workers: How many workers.
        batch_size: Files of a batch.
    """

    def __init__(self, workers: int, batch_size: int) -> None:
        self._workers = workers
        self._batch_size = batch_size
        cells = np.frombuffer(mmap.mmap(-1, (workers * 5 + 1) * 8), dtype=np.int64)
        self._rows = cells[:-1].reshape(workers, 5)
        self._rows[:, _WAITS_FOR] = _NOTHING
        self._begun = cells[-1:]

    def turn(self, worker: int, first: int) -> "Turn":
        """The view of one worker, in its own process; the first batch is that of ``first``."""
        return Turn(self._rows, worker, (worker - first) % self._workers, self._batch_size)

    def begin(self) -> None:
        """Say that all workers have been forked, and asked for their first batches."""
        self._begun[0] = 1

    def hold(self, *, patience_s: float = _HOLD_S) -> None:
        """Wait until all workers have been forked, or the files of the first batch are here.

        Args:
            patience_s: Seconds after which the wait is over anyhow.
        """
        deadline = time.monotonic() + patience_s
        enough = min(self._batch_size, FIRST_SLOTS)
        while not self._begun[0] and self._rows[:, _ARRIVED].sum() < enough:
            if time.monotonic() > deadline:
                break
            time.sleep(_poll_s(self._workers))


class Turn:
    """What one worker knows and says of downloads.

    Args:
        rows: The shared memory.
        worker: Whose view it is.
        place: In the round of deliveries.
        batch_size: Files of a batch.
    """

    def __init__(self, rows: "np.ndarray", worker: int, place: int, batch_size: int) -> None:
        self._rows = rows
        self._mine = rows[worker]
        self._place = place
        self.batch_size = batch_size
        self._lock = threading.Lock()
        self._poll_s = _poll_s(len(rows))

    def batch(self, number: int) -> int:
        """Which of the pass's batches the worker's file of this number belongs to."""
        return number // self.batch_size * len(self._rows) + self._place

    def announce(self, batch: int) -> None:
        """Say that a download for a batch is wanted: ``wait`` for it comes, but not at once.

        Otherwise later batches of others would take the slots while this worker learns how large
        its first files are.
        """
        self._mine[_WAITS_FOR] = batch

    def wait(
        self,
        batch: int,
        size: int,
        cancelled: Callable[[], bool],
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Wait until a download for a batch may start, or is not wanted any more."""
        deadline = time.monotonic() + patience_s
        while not self._may_start(batch, size):
            self._mine[_WAITS_FOR] = batch
            if cancelled() or time.monotonic() > deadline:
                break
            time.sleep(self._poll_s)
        self._mine[_WAITS_FOR] = _NOTHING

    def _may_start(self, batch: int, size: int) -> bool:
        _, files, under_way, arrived, arrived_bytes = self._rows.sum(axis=0).tolist()
        before = int((self._rows[:, _WAITS_FOR] < batch).sum())
        slots = min(FIRST_SLOTS + arrived, MAX_SLOTS)
        if files + before >= slots:
            return False
        if files + before < max(ALWAYS, len(self._rows)):
            return True
        limit = min(FIRST_BYTES + arrived_bytes // _GROWTH, MAX_BYTES)
        if not before:
            return bool(under_way < limit)
        # Room is left for those that come before, taken to be as large.
        return bool(under_way + size * (before + 1) <= limit)

    @contextmanager
    def under_way(self, size: int) -> Iterator[Callable[[int], None]]:
        """Count a download while it lasts; gives what corrects its size."""
        taken = size

        def correct(size: int) -> None:
            nonlocal taken
            self._add(0, size - taken, 0, 0)
            taken = size

        self._add(1, size, 0, 0)
        try:
            yield correct
        finally:
            self._add(-1, -taken, 1, taken)

    def _add(self, files: int, size: int, arrived: int, arrived_bytes: int) -> None:
        with self._lock:
            self._mine[_FILES] += files
            self._mine[_BYTES] += size
            self._mine[_ARRIVED] += arrived
            self._mine[_ARRIVED_BYTES] += arrived_bytes


def _poll_s(workers: int) -> float:
    return min(max(_POLL_S[0], workers * 0.0005), _POLL_S[1])


class _Here(NamedTuple):
    pid: int
    turn: Turn


_here: _Here | None = None


def take_part(turn: Turn) -> None:
    """Let the downloads of this process take turns with those of the loader's other workers."""
    global _here  # noqa: PLW0603 - which worker a process is, is a fact about the process
    _here = _Here(os.getpid(), turn)


def current_turn() -> Turn | None:
    """The calling process's turn; None where it is no loader's worker."""
    return _here.turn if _here is not None and _here.pid == os.getpid() else None
