"""What the data path did, counted where it happens and read in the training process.

The promise: counting sends no message, costs less than a microsecond, and a killed worker's counts
stay::

    the loader        Counters(rows)      anonymous memory that forked workers share: one row each
    a worker          starting(...)       its row is where the process counts from now on
    cache, dataset    count(CACHE_HITS)   adds to that row, under a lock of the process alone
    training process  Counters.totals()   sums the rows

A process that no loader started, as one that iterates over a dataset itself, counts into memory of
its own; so does a thread that stands for nobody.
"""

import contextlib
import functools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_Row = memoryview  # of int64, one cell per name

NAMES = (
    "files_downloaded",
    "bytes_downloaded",
    "download_s",
    "cache_hits",
    "evictions",
    "retries",
    "files_skipped",
    "reads_through",
)
"""Of the totals. Seconds are those of all threads together; a cell holds nanoseconds."""

(
    FILES_DOWNLOADED,
    BYTES_DOWNLOADED,
    _DOWNLOAD_NS,
    CACHE_HITS,
    EVICTIONS,
    RETRIES,
    FILES_SKIPPED,
    READS_THROUGH,
) = range(len(NAMES))

_ROW_BYTES = 8 * len(NAMES)


class _Thread(threading.local):
    """For whom a thread counts; None: for its process."""

    row: _Row | None = None


class Counters:
    """The rows of one loader's workers.

    Args:
        rows: How many: the loader's workers, or 1 where it has none.
    """

    def __init__(self, rows: int) -> None:
        # A page of its own per loader. Nobody closes it: the last process that maps it does.
        self._rows = memoryview(mmap.mmap(-1, rows * _ROW_BYTES)).cast("q")
        _live.add(self)
        weakref.finalize(self, _retire, self._rows).atexit = False

    def row(self, worker: int) -> _Row:
        """The row of one worker."""
        return self._rows[worker * len(NAMES) : (worker + 1) * len(NAMES)]

    def totals(self) -> dict[str, float]:
        """The sums over all workers, dead ones included, by name."""
        return _by_name(_sums(self._rows))

    def starting(self, init: Callable[[int], Any] | None) -> Callable[[int], None]:
        """A ``worker_init_fn`` that gives the worker its row, then calls ``init``."""
        return functools.partial(_start_worker, self, init)


def count(name: int, number: int = 1) -> None:
    """Add to one of this process's counts, e.g. ``count(CACHE_HITS)``."""
    row = _thread.row or _process_row
    with _lock:
        row[name] += number


@contextlib.contextmanager
def downloading(size: int) -> Iterator[None]:
    """Count a file of this size, and the time that the block takes, unless it fails."""
    began = time.perf_counter_ns()
    yield
    count(FILES_DOWNLOADED)
    count(BYTES_DOWNLOADED, size)
    count(_DOWNLOAD_NS, time.perf_counter_ns() - began)


@contextlib.contextmanager
def counting_into(row: _Row | None) -> Iterator[None]:
    """Let this thread count into a row; None changes nothing."""
    if row is None:
        yield
        return
    before = _thread.row
    _thread.row = row
    try:
        yield
    finally:
        _thread.row = before


def bound(action: Callable[[], _T]) -> Callable[[], _T]:
    """An action for another thread, that counts there for whom the calling thread counts."""
    row = _thread.row
    return action if row is None else functools.partial(_run, row, action)


def rank_totals() -> dict[str, float]:
    """The sums over all loaders that this process made so far, and over itself."""
    # The living first: what is gone by then has been added to the retired.
    sums = [_sums(counters._rows) for counters in list(_live)]
    return _by_name([sum(c) for c in zip(_retired, _sums(_process_row), *sums, strict=True)])


def _run(row: _Row, action: Callable[[], _T]) -> _T:
    with counting_into(row):
        return action()


def _start_worker(counters: Counters, init: Callable[[int], Any] | None, worker: int) -> None:
    global _process_row  # noqa: PLW0603 - one per process
    _process_row = counters.row(worker)
    if init is not None:
        init(worker)


def _sums(rows: _Row) -> list[int]:
    return [sum(rows[name :: len(NAMES)]) for name in range(len(NAMES))]


def _by_name(sums: list[int]) -> dict[str, float]:
    totals: dict[str, float] = dict(zip(NAMES, sums, strict=True))
    totals[NAMES[_DOWNLOAD_NS]] /= 1e9
    return totals


def _retire(rows: _Row) -> None:
    """Keep what a loader counted that is gone. Takes no lock: it runs wherever collection does."""
    global _retired  # noqa: PLW0603 - one per process
    _retired = [sum(cells) for cells in zip(_retired, _sums(rows), strict=True)]


def _own_row() -> _Row:
    return memoryview(bytearray(_ROW_BYTES)).cast("q")


def _begin_process() -> None:
    """A process counts for itself until it is told otherwise, and a fork begins at nothing."""
    global _lock, _process_row, _thread, _retired  # noqa: PLW0603 - one each per process
    # A fork may copy the lock while another thread holds it: it would stay locked for ever.
    _lock = threading.Lock()
    _process_row = _own_row()
    _thread = _Thread()
    _retired = [0] * len(NAMES)
    _live.clear()


_live: "weakref.WeakSet[Counters]" = weakref.WeakSet()
_lock: threading.Lock
_process_row: _Row
_thread: _Thread
_retired: list[int]
_begin_process()
os.register_at_fork(after_in_child=_begin_process)
