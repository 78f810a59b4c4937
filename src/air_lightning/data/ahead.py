"""Read-ahead: the next files of one stream are downloaded while the last ones are used.

A file's way::

    look       in the cache already: leased at once, since a thread would cost more than opening it
    queue      else a task for this process's threads, in the stream's order
    turn       the task waits until its batch may be downloaded                       turns.py
    fetch      size and time are asked for where the listing did not give them        cache.py
    take       in order; an error surfaces at its own file, and so does a download that stands still

Threads start in the process that iterates (threads do not survive a fork), as many as there are
files to wait for, 64 at most.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import NamedTuple

from air_lightning.data.cache import FileCache, Lease, lease_if_whole
from air_lightning.data.counters import bound
from air_lightning.data.listing import FileList
from air_lightning.data.turns import Turn, current_turn
from air_lightning.volumes.base import UNKNOWN_SIZE

MAX_BYTES = 1 << 30  # bytes of a stream's files that may be on their way at once
MAX_DEPTH = 1024  # files; each one that is ahead takes a file descriptor
STALL_S = 300.0
"""Seconds without a byte after which a download counts as failed."""

_MAX_THREADS = 64
_JOIN_S = 5.0
_LOOK_S = 5.0  # between two looks at a download that is waited for


class _Task(NamedTuple):
    future: "Future[Lease]"
    action: Callable[[], Lease]
    batch: int
    size: int


class _Ahead(NamedTuple):
    number: int
    size: int
    lease: Lease | None
    future: "Future[Lease] | None"


class ReadAhead:
    """Leases of a stream's files, in order.

    Args:
        cache: Fetches them.
        files: The file list.
        indices: The numbers of the stream's files, in order.
        depth: How many files beyond the next one are downloaded ahead; 0 for none.
        max_bytes: How many bytes may be ahead; one file always may.
        stall_s: Seconds without a byte after which a download counts as failed.
    """

    def __init__(
        self,
        cache: FileCache,
        files: FileList,
        indices: Iterable[int],
        *,
        depth: int,
        max_bytes: int = MAX_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self._cache = cache
        self._files = files
        self._indices = iter(indices)
        self._depth = depth
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._ahead: deque[_Ahead] = deque()
        self._started = 0
        self._typical = 0  # bytes of a file whose size is not known: those of the last one
        self._bytes = 0
        self._turn = current_turn()
        self._pool = _Pool(max(1, min(depth, _MAX_THREADS)), self._turn)
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A pass that was begun and never asked for its first file has no other end.
        self.close()

    def start(self) -> None:
        """Begin to download, before the first file is asked for."""
        if self._depth:
            self._fill()

    def take(self) -> Lease:
        """The next file; StopIteration is not raised: callers know how many there are.

        Raises:
            StorageError: This file cannot be had; the next call goes on with the one after it.
        """
        self._fill()
        index, size, lease, future = self._ahead.popleft()
        if future is None:
            assert lease is not None, "what is not on its way is here"
            return lease
        self._bytes -= size
        lease = self._result(index, future)
        self._typical = self._files[index].size
        return lease

    def fetch(self, index: int) -> Lease:
        """One file out of turn.

        Raises:
            StorageError: It cannot be had.
        """
        pool = _Pool(1, None)
        try:
            return self._result(index, pool.submit(self._fetcher(index), 0, 0))
        finally:
            pool.dismiss()

    def close(self) -> None:
        """Stop: nothing more is downloaded, and what was is free to be evicted."""
        if os.getpid() != self._pid:
            return  # a forked child's copy: threads, leases and locks are its parent's
        for _, _, lease, future in self._ahead:
            if lease is not None:
                lease.close()
            if future is not None:
                _abandon(future)
        self._ahead.clear()
        self._pool.close()

    def _fill(self) -> None:
        while not self._ahead or (
            len(self._ahead) <= self._depth and self._bytes < self._max_bytes
        ):
            index = next(self._indices, None)
            if index is None:
                return
            self._ahead.append(self._start(index))

    def _start(self, index: int) -> _Ahead:
        info = self._files[index]
        number, self._started = self._started, self._started + 1
        known = info.size != UNKNOWN_SIZE
        lease = lease_if_whole(self._cache.place(info), info) if known else None
        if lease is not None:
            return _Ahead(index, 0, lease, None)
        size = info.size if known else self._typical
        self._bytes += size
        batch = 0 if self._turn is None else self._turn.batch(number)
        future = self._pool.submit(self._fetcher(index), batch, size)
        return _Ahead(index, size, None, future)

    def _fetcher(self, index: int) -> Callable[[], Lease]:
        cache, files = self._cache, self._files  # not self: its threads would keep it alive
        # A size that is not known is asked for there, too: here it would be a round trip per item.
        return bound(lambda: cache.fetch(files.complete(index, cache.storage)))

    def _result(self, index: int, future: "Future[Lease]") -> Lease:
        """Wait for a download for as long as it makes progress."""
        seen, since = -1, time.monotonic()
        try:
            while not wait((future,), min(_LOOK_S, self._stall_s / 2)).done:
                info, now = self._files[index], time.monotonic()
                size = self._cache.bytes_so_far(info)
                if size != seen:
                    seen, since = size, now
                elif now - since > self._stall_s:
                    raise self._cache.stalled(info, now - since)
            return future.result()
        except BaseException:
            _abandon(future)
            raise


def _abandon(future: "Future[Lease]") -> None:
    future.cancel()
    future.add_done_callback(_close_lease)


def _close_lease(future: "Future[Lease]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class _Pool:
    """Daemon threads; those of ThreadPoolExecutor would let a hung volume hang the exit."""

    def __init__(self, size: int, turn: Turn | None) -> None:
        self._size = size
        self._turn = turn
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._in_order = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, action: Callable[[], Lease], batch: int, size: int) -> "Future[Lease]":
        future: Future[Lease] = Future()
        self._tasks.put(_Task(future, action, batch, size))
        if len(self._threads) < self._size:
            thread = threading.Thread(
                target=_work,
                args=(self._tasks, self._in_order, self._turn),
                name="air-read-ahead",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        return future

    def dismiss(self) -> None:
        """Let the threads end when their tasks are done."""
        for _ in self._threads:
            self._tasks.put(None)

    def close(self) -> None:
        """End the threads, if what they are at lets them."""
        self.dismiss()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(
    tasks: "queue.SimpleQueue[_Task | None]", in_order: threading.Lock, turn: Turn | None
) -> None:
    while True:
        with in_order:  # else a thread that overtakes another would be given its turn
            task = tasks.get()
            if task is None:
                return
            if turn is not None:
                turn.wait(task.batch, task.size, task.future.cancelled)
        if task.future.set_running_or_notify_cancel():
            with contextlib.nullcontext() if turn is None else turn.under_way(task.size):
                _do(task)


def _do(task: _Task) -> None:
    try:
        lease = task.action()
    except BaseException as error:  # noqa: BLE001 - it is raised where the file is taken
        task.future.set_exception(error)
    else:
        task.future.set_result(lease)
