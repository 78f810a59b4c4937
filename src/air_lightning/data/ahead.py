"""Read-ahead: the next files of one stream are downloaded while the last ones are used.

Threads start in the process that iterates (threads do not survive a fork), as many as there are
files to wait for, 64 at most. Files come out in order, and so do errors, each at its own file. A
file that is in the cache already goes through no thread: handing it over would cost more than
opening it.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from air_lightning.data.cache import FileCache, Lease, lease_if_whole
from air_lightning.data.counters import bound
from air_lightning.data.listing import FileList
from air_lightning.volumes.base import FileInfo

MAX_BYTES = 1 << 30  # bytes of a stream's files that may be on their way at once
MAX_DEPTH = 1024  # files; each one that is ahead takes a file descriptor
_MAX_THREADS = 64
_JOIN_S = 5.0

_Task = tuple["Future[Lease]", Callable[[], Lease]]


class _Ahead(NamedTuple):
    info: FileInfo
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
    """

    def __init__(
        self,
        cache: FileCache,
        files: FileList,
        indices: Iterable[int],
        *,
        depth: int,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._cache = cache
        self._files = files
        self._indices = iter(indices)
        self._depth = depth
        self._max_bytes = max_bytes
        self._ahead: deque[_Ahead] = deque()
        self._bytes = 0
        self._pool = _Pool(min(depth, _MAX_THREADS))
        self._pid = os.getpid()

    def take(self) -> Lease:
        """The next file; StopIteration is not raised: callers know how many there are.

        Raises:
            StorageError: This file cannot be had; the next call goes on with the one after it.
        """
        self._fill()
        info, lease, future = self._ahead.popleft()
        if lease is not None:
            return lease
        if future is None:
            return self._cache.fetch(info)
        self._bytes -= info.size
        try:
            return future.result()
        except BaseException:
            _abandon(future)
            raise

    def close(self) -> None:
        """Stop: nothing more is downloaded, and what was is free to be evicted."""
        if os.getpid() != self._pid:
            return  # a forked child's copy: threads, leases and locks are its parent's
        for _, lease, future in self._ahead:
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
            self._ahead.append(self._start(self._files[index]))

    def _start(self, info: FileInfo) -> _Ahead:
        if not self._depth:
            return _Ahead(info, None, None)
        place = self._cache.place(info)
        lease = lease_if_whole(place, info.size)
        if lease is not None:
            return _Ahead(info, lease, None)
        self._bytes += info.size
        return _Ahead(info, None, self._pool.submit(_fetcher(self._cache, info, place)))


def _fetcher(cache: FileCache, info: FileInfo, place: str) -> Callable[[], Lease]:
    return bound(lambda: cache.fetch(info, place))


def _abandon(future: "Future[Lease]") -> None:
    future.cancel()
    future.add_done_callback(_close_lease)


def _close_lease(future: "Future[Lease]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class _Pool:
    """Daemon threads; those of ThreadPoolExecutor would let a hung volume hang the exit."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, action: Callable[[], Lease]) -> "Future[Lease]":
        future: Future[Lease] = Future()
        self._tasks.put((future, action))
        if len(self._threads) < self._size:
            thread = threading.Thread(
                target=_work, args=(self._tasks,), name="air-read-ahead", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        future, action = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            lease = action()
        except BaseException as error:  # noqa: BLE001 - it is raised where the file is taken
            future.set_exception(error)
        else:
            future.set_result(lease)
