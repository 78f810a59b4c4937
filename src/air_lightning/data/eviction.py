"""Free disk: how much is kept, and which cached files go for it.

Least-recently-downloaded files go first, never one that some process holds locked. What was
downloaded when is in the times of the cache's directories: there is no account that could die with
a worker, and eviction goes on where it, or a whole run, left off.
"""

import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Iterator

from air_lightning.data.counters import EVICTIONS, count
from air_lightning.errors import InvalidArgumentError

MIN_FREE_VARIABLE = "SGC_FSLAYER_MIN_FREE_DISK_BYTES"

_MIN_FREE_SHARE = 0.10
_LOCK = ".eviction"
# Nothing else in the directory is touched: a shared one may hold more than ours.
_CANDIDATE = re.compile(r"[0-9a-f]{24}(\.part)?")


class Evictor:
    """Keeps disk free on the file system of a cache directory.

    Args:
        directory: The cache directory.
        min_free_bytes: Free bytes to keep; None for ``SGC_FSLAYER_MIN_FREE_DISK_BYTES``, else a
            tenth of the file system.

    Attributes:
        min_free_bytes: Free bytes that are kept.
    """

    def __init__(self, directory: str, min_free_bytes: int | None = None) -> None:
        self._directory = directory
        self.min_free_bytes = _min_free(directory, min_free_bytes)
        self._candidates: deque[str] = deque()

    def could_hold(self, size: int) -> bool:
        """Whether the disk would have room for ``size`` bytes if nothing else was on it."""
        status = os.statvfs(self._directory)
        return size <= status.f_blocks * status.f_frsize

    def make_room(self, size: int) -> None:
        """Evict until ``size`` bytes more leave the free share, or nothing can go."""
        wanted = self.min_free_bytes + size
        if free_bytes(self._directory) >= wanted:
            return
        with self._alone():
            while free_bytes(self._directory) < wanted and self._evict_next() is not None:
                pass

    def free_up(self, size: int) -> bool:
        """Evict ``size`` bytes, if there is as much; returns whether anything went."""
        freed: list[int] = []
        with self._alone():
            while sum(freed) < size or not freed:
                evicted = self._evict_next()
                if evicted is None:
                    break
                freed.append(evicted)
        return bool(freed)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One evictor at a time on the node: otherwise each would free what all of them want."""
        descriptor = os.open(
            f"{self._directory}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Explicitly: a child forked in the meantime would keep the lock with its descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _evict_next(self) -> int | None:
        """Evict one file; returns its bytes, or None where nothing is left that may go."""
        for _ in range(2):
            while self._candidates:
                evicted = _evict(f"{self._directory}/{self._candidates.popleft()}")
                if evicted is not None:
                    count(EVICTIONS)
                    return evicted
            # Oldest first. What came since the last look is younger than all that is left of it.
            self._candidates.extend(_by_age(self._directory))
        return None


def free_bytes(directory: str) -> int:
    """Bytes that this user can still write on a directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _min_free(directory: str, given: int | None) -> int:
    if given is None:
        text = os.environ.get(MIN_FREE_VARIABLE)
        if not text:
            status = os.statvfs(directory)
            return int(status.f_blocks * status.f_frsize * _MIN_FREE_SHARE)
        source, number = f"{MIN_FREE_VARIABLE}={text!r}", int(text) if text.isdecimal() else -1
    else:
        source, number = f"min_free_bytes={given!r}", given if type(given) is int else -1
    if number < 0:
        raise InvalidArgumentError(f"{source} was given; wanted is a number of bytes, 0 or more.")
    return number


def _by_age(directory: str) -> list[str]:
    """Names of what may be evicted, oldest first; unfinished downloads before all."""
    aged: list[tuple[int, str]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _CANDIDATE.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):
                if match:
                    aged.append((0 if match[1] else entry.stat().st_mtime_ns, entry.name))
    return [name for _, name in sorted(aged)]


def _evict(path: str) -> int | None:
    """Delete a cached file, or an abandoned part; None where it is in use or gone."""
    if path.endswith(".part"):
        return _delete_unless_locked(path)
    freed: int | None = None
    for parent, _, names in os.walk(path, topdown=False):
        for name in names:
            size = _delete_unless_locked(f"{parent}/{name}")
            freed = freed if size is None else (freed or 0) + size
        with contextlib.suppress(OSError):  # not empty: in use, or about to be filled again
            os.rmdir(parent)
    return freed


def _delete_unless_locked(path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(descriptor).st_size
        os.unlink(path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        os.close(descriptor)
    return size
