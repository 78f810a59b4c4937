"""Read-ahead: the next files of one stream are downloaded while the last ones are used.

A file's way::

    note       noted to be here, and all those after it for a while: taken at once   notes.py
    look       else in the cache already: seen, and not held before its turn
    queue      else a task for this process's threads, in the stream's order          pool.py
    fetch      size and time are asked for where the listing did not give them        cache.py
    take       in order, noted or locked; an error surfaces at its own file,   notes.py, leases.py
               and so does a download that stands still

What is ahead is held loosely: it goes where another file is needed at once, and what finds no room
is put off. When its turn comes, such a file is fetched again, and then it takes the room.
"""

import os
import resource
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np

from air_lightning.data import forks
from air_lightning.data.budget import Budget
from air_lightning.data.cache import FileCache, is_shortage
from air_lightning.data.counters import bound
from air_lightning.data.leases import Lease
from air_lightning.data.listing import FileList
from air_lightning.data.notes import Row
from air_lightning.data.pool import Pool, Task
from air_lightning.data.stream import Indices
from air_lightning.data.turns import current_turn
from air_lightning.errors import AirError
from air_lightning.volumes.base import UNKNOWN_SIZE

MAX_BYTES = 1 << 30  # bytes of a stream's files that may be ahead
MAX_DEPTH = 1024  # files; each one that was downloaded ahead takes a file descriptor
STALL_S = 300.0
"""Seconds without a byte after which a download counts as failed."""

_LOOK_FILES = 4 * MAX_DEPTH  # that a stream looks for in the notes at a time
_LOOK_S = 5.0  # between two looks at a download that is waited for
_SHARE = 4  # of the files that a process may still open, one in so many is for what is ahead


class _File:
    """A file that is ahead: on its way, or seen in the cache and not held yet."""

    __slots__ = ("index", "number", "seen", "task")

    def __init__(self, index: int, number: int) -> None:
        self.index = index
        self.number = number
        self.seen = False
        self.task: Task | None = None

    def fell_short(self) -> bool:
        """Whether it is put off: it found no room, or gave up its own."""
        return not self.seen and (self.task is None or self.task.fell_short())


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
        indices: Sequence[int] | Indices,
        *,
        depth: int,
        max_bytes: int = MAX_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self._closed = False
        self._process, self._pid = forks.process, os.getpid()
        self._cache = cache
        self._files = files
        self._indices = np.asarray(indices, dtype=np.int64)
        # A view that gives Python's own numbers: NumPy's cost more than the rest of a look-up.
        self._numbers = self._indices.data
        may_open = _may_open()
        self._depth = min(depth, may_open // _SHARE)
        self._stall_s = stall_s
        self._ahead: deque[_File] = deque()
        self._started = 0
        self._known_to = 0
        self._put_off = False
        self._turn = current_turn()
        self._row = cache.row()
        self._budget = Budget(max_bytes)
        self._pool = Pool(self._depth, self._budget, self._turn)
        if self._depth < depth:
            cache.tell(
                "Reading ahead %d files instead of %d: this process may open %d more files, and a "
                "quarter is taken for what is ahead. Raise the limit (ulimit -n) for more.",
                *(self._depth, depth, may_open),
            )

    def __del__(self) -> None:
        # A pass that was begun and never asked for its first file has no other end.
        self.close()

    def start(self) -> None:
        """Begin to download, before the first file is asked for."""
        self._look()
        if self._depth and self._started == self._known_to:
            self._fill(self._depth + 1)

    def take(self) -> Lease:
        """The next file; StopIteration is not raised: callers know how many there are.

        Raises:
            StorageError: This file cannot be had; the next call goes on with the one after it.
            AirError: This process is a child of the one that began.
        """
        self._check_process()
        if not self._ahead:
            noted = self._take_known()
            if noted is not None:
                return noted
            self._append()
        file = self._ahead.popleft()
        short = file.fell_short()
        if not short:
            self._fill(self._depth)
        try:
            lease = self._lease(file)
            if self._row is not None and lease is not self._row:
                self._note(self._row, file.index)
        finally:
            if file.task is not None:
                self._budget.leave(file.number)
        if short:  # only now: what is further ahead would have taken its room
            self._fill(self._depth)
        return lease

    def fetch(self, index: int) -> Lease:
        """One file out of turn, which is needed at once.

        Raises:
            StorageError: It cannot be had.
        """
        pool, task = Pool(1), Task(0, 0, None)
        cache, files = self._cache, self._files
        task.action = bound(lambda: cache.fetch(files.complete(index, cache.storage)))
        try:
            pool.submit(task)
            return self._result(index, task)
        finally:
            pool.dismiss()

    def close(self) -> None:
        """Stop: nothing more is downloaded, and what was is free to be evicted."""
        if self._closed or forks.process is not self._process:
            return  # a forked child's copy: threads, leases and locks are its parent's
        self._closed = True
        for file in self._ahead:
            if file.task is not None:
                file.task.abandon()
        self._ahead.clear()
        self._pool.close()
        if self._row is not None:
            self._row.free()

    def _check_process(self) -> None:
        if forks.process is not self._process:
            raise AirError(
                f"This process ({os.getpid()}) went on with an iterator that its parent "
                f"({self._pid}) had begun: the downloads, and the files that they made, are the "
                "parent's. Call iter() on the dataset in the child, or iterate in the parent only."
            )

    def _take_known(self) -> Lease | None:
        """The next file if it and those after it are in the cache: there is nothing to prepare."""
        if self._started == self._known_to:
            self._look()
        if self._row is None or self._started == self._known_to:
            return None
        lease = self._row.lease(self._numbers[self._started])
        if lease is None:
            self._known_to = self._started
        else:
            self._started += 1
        return lease

    def _look(self) -> None:
        """See how far files are in the cache; stops short of one that is not by the depth."""
        if self._row is not None:
            began, ended = self._started, self._started + _LOOK_FILES
            ended = began + self._row.known(self._indices[began:ended])
            whole = ended == len(self._indices)
            self._known_to = ended if whole else max(began, ended - self._depth)

    def _fill(self, count: int) -> None:
        """Have so many files ahead, if there is room for them."""
        if self._put_off and self._resume():
            return
        while len(self._ahead) < count and self._append():
            pass

    def _append(self) -> bool:
        if self._started == len(self._numbers):
            return False
        self._ahead.append(self._begin(self._numbers[self._started]))
        return True

    def _begin(self, index: int) -> _File:
        file = _File(index, self._started)
        self._started += 1
        if self._row is not None and self._row.knows(index):
            file.seen = True
            return file
        info = self._files[index]
        # Not held: most files are here in every epoch but the first, and two locks for each cost
        # more than fetching one again that had to go meanwhile.
        if info.size != UNKNOWN_SIZE and self._cache.has(info):
            file.seen = True
        else:
            self._submit(file)
        return file

    def _submit(self, file: _File) -> None:
        size = self._files[file.index].size
        batch = 0 if self._turn is None else self._turn.batch(file.number)
        task = Task(file.number, batch, None if size == UNKNOWN_SIZE else size)
        # Not self: its threads would keep it alive.
        cache, files, index = self._cache, self._files, file.index

        def fetch() -> Lease:
            # A size that is not known is asked for here: elsewhere it would be a round trip each.
            info = files.complete(index, cache.storage)
            task.tell(info.size)
            return cache.fetch(info, ahead=True)

        task.action = bound(fetch)
        file.task = task
        self._pool.submit(task)

    def _resume(self) -> bool:
        """Try the first file again that was put off; False if there is none."""
        for file in self._ahead:
            if file.fell_short():
                self._submit(file)
                return True
        self._put_off = False
        return False

    def _lease(self, file: _File) -> Lease:
        lease = None
        if file.task is None:
            lease = self._find(file) if file.seen else None
            if lease is not None:
                return lease
        else:
            try:
                lease = self._result(file.index, file.task)
            except OSError as error:
                if not is_shortage(error):
                    raise
                self._put_off = True
        if lease is not None:
            if lease.use():
                return lease
            lease.close()
        return self._fetch_at_once(file.index)

    def _find(self, file: _File) -> Lease | None:
        """A file that was seen in the cache."""
        if self._row is not None and self._row.knows(file.index):
            noted = self._row.lease(file.index)
            if noted is not None:
                return noted
        return self._cache.find(self._files[file.index])

    def _note(self, row: Row, index: int) -> None:
        """Remember a file that was downloaded or found: the next epoch need not look for it."""
        if self._cache.is_in_place(self._files[index]):
            row.saw(index)

    def _fetch_at_once(self, index: int) -> Lease:
        try:
            return self.fetch(index)
        except OSError as error:
            if not is_shortage(error) or not self._ahead:
                raise
        self._give_up()
        return self.fetch(index)

    def _give_up(self) -> None:
        """Let go of all that is ahead: of its descriptors, and of what is half downloaded."""
        futures = []
        for file in self._ahead:
            if file.task is not None:
                file.task.abandon()
                futures.append(file.task.future)
                self._budget.leave(file.number)
            file.task = None
        self._put_off = True
        wait(futures, _LOOK_S)

    def _result(self, index: int, task: Task) -> Lease:
        """Wait for a download for as long as it makes progress."""
        future: Future[Lease] = task.future
        seen, since = (-1, -1), time.monotonic()
        try:
            while not wait((future,), min(_LOOK_S, self._stall_s / 2)).done:
                info, now = self._files[index], time.monotonic()
                progress = self._cache.progress(info)
                if progress != seen:
                    seen, since = progress, now
                elif now - since > self._stall_s:
                    raise self._cache.stalled(info, now - since)
            return future.result()
        except BaseException:
            task.abandon()
            raise


def _may_open() -> int:
    """How many more files this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _SHARE * MAX_DEPTH
    try:
        return max(0, limit - len(os.listdir("/proc/self/fd")))
    except OSError:
        return limit
