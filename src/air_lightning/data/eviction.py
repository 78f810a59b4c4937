"""Free disk: how much is kept, and which cached files go for it.

Least-recently-downloaded files go first, never one that some process uses. What was read ahead goes
only for a file that is needed at once, and then the youngest first: it is needed last. When a file
was downloaded is what the file system says its inode was changed, which no reading alters: there is
no account that could die with a worker, and eviction goes on where it, or a whole run, left off.
"""

import contextlib
import fcntl
import heapq
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator

from air_lightning.data.counters import EVICTIONS, count
from air_lightning.data.leases import is_ahead, is_at
from air_lightning.errors import InvalidArgumentError
from air_lightning.volumes.base import FULL_DISK

MIN_FREE_VARIABLE = "SGC_FSLAYER_MIN_FREE_DISK_BYTES"

_MIN_FREE_SHARE = 0.10
_LOCK = ".eviction"
# Nothing else in the directory is touched: a shared one may hold more than ours.
_TREE = re.compile(r"[0-9a-f]{16}")
_PART = re.compile(r"[0-9a-f]{24}\.part")
# Candidates kept in mind: all of a million files would be 200 MB. More where these are in use.
_AT_A_TIME = (4096, sys.maxsize)


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
        self._spared: Callable[[], set[str]] = set
        self._noted: set[str] = set()
        # Made while there is an inode for it.
        with contextlib.suppress(OSError):
            os.close(self._open_lock())

    def spare(self, noted: Callable[[], set[str]]) -> None:
        """Say what tells, when an eviction begins, which files are in use without a lock."""
        self._spared = noted

    def could_hold(self, size: int) -> bool:
        """Whether the disk would have room for ``size`` bytes if nothing else was on it."""
        status = os.statvfs(self._directory)
        return size <= status.f_blocks * status.f_frsize

    def make_room(self, size: int, *, ahead: bool = False) -> bool:
        """Evict until ``size`` bytes more leave the free share, or nothing can go.

        Args:
            size: Bytes that are to come.
            ahead: Whether they are not needed yet: then what others have read ahead stays.

        Returns:
            Whether the free share is left.
        """
        wanted = self.min_free_bytes + size
        if free_bytes(self._directory) >= wanted:
            return True
        with self._alone():
            while free_bytes(self._directory) < wanted:
                if self._evict_next(ahead) is None:
                    return False
        return True

    def free_up(self, size: int, *, ahead: bool = False) -> bool:
        """Evict ``size`` bytes, if there is as much; returns whether anything went.

        Args:
            size: Bytes that are to come.
            ahead: As of :meth:`make_room`.
        """
        freed: list[int] = []
        with self._alone():
            while sum(freed) < size or not freed:
                evicted = self._evict_next(ahead)
                if evicted is None:
                    break
                freed.append(evicted)
        return bool(freed)

    def others_download(self) -> bool:
        """Whether downloads are under way; after an eviction, what is left of parts is in use."""
        return bool(_ours(self._directory)[0])

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One evictor at a time on the node: otherwise each would free what all of them want."""
        try:
            descriptor = self._open_lock()
        except OSError as error:
            # Without a lock too much may go, without an eviction nothing comes any more.
            if not isinstance(error, PermissionError) and error.errno not in FULL_DISK:
                raise
            self._noted = self._spared()
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._noted = self._spared()
            yield
        finally:
            # Explicitly: a child forked in the meantime would keep the lock with its descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open_lock(self) -> int:
        return os.open(f"{self._directory}/{_LOCK}", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _evict_next(self, ahead: bool) -> int | None:
        """Evict one file; returns its bytes, or None where nothing is left that may go."""
        for at_a_time in (0, *_AT_A_TIME):
            # Oldest first. What came since the last look is younger than all that is left of it.
            if at_a_time:
                self._candidates.extend(_by_age(self._directory, at_a_time))
            while self._candidates:
                evicted = self._evict(self._candidates.popleft())
                if evicted is not None:
                    return evicted
        return None if ahead else self._evict_ahead()

    def _evict_ahead(self) -> int | None:
        for path in reversed(_by_age(self._directory, sys.maxsize)):
            evicted = self._evict(path, read_ahead=True)
            if evicted is not None:
                return evicted
        return None

    def _evict(self, path: str, *, read_ahead: bool = False) -> int | None:
        if path in self._noted:
            return None
        return _evict(path, self._directory, read_ahead=read_ahead)


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
    status = os.statvfs(directory)
    total = status.f_blocks * status.f_frsize
    if number >= total:
        raise InvalidArgumentError(
            f"{source} was given, and the disk of the cache {directory} has {total} bytes in all, "
            "so nothing could ever be cached. Ask for less to be kept free (a tenth of the disk is "
            "the default), or pass a cache_dir= on a larger disk."
        )
    return number


def _by_age(directory: str, count: int) -> list[str]:
    """Paths of what may be evicted, oldest first; unfinished downloads before all."""
    parts, trees = _ours(directory)
    return parts + [path for _, path in heapq.nsmallest(count, _aged(trees))]


def remove_parts(directory: str) -> None:
    """Remove what downloads that were killed left unfinished."""
    for part in _ours(directory)[0]:
        with contextlib.suppress(OSError):
            _delete_unless_locked(part)


def _ours(directory: str) -> tuple[list[str], list[str]]:
    with os.scandir(directory) as entries:
        paths = {entry.name: entry.path for entry in entries}
    parts = [path for name, path in paths.items() if _PART.fullmatch(name)]
    return parts, [path for name, path in paths.items() if _TREE.fullmatch(name)]


def _aged(trees: list[str]) -> Iterator[tuple[tuple[int, int], str]]:
    """(when it was published, path) of each cached file."""
    while trees:
        for entry in _entries(trees.pop()):
            if entry.is_dir(follow_symlinks=False):
                trees.append(entry.path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    # The kernel's clock is coarse; what the access time was set to decides a tie.
                    yield (status.st_ctime_ns, status.st_atime_ns), entry.path


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        yield from entries


def _evict(path: str, directory: str, *, read_ahead: bool = False) -> int | None:
    """Delete a cached file, or an abandoned part; None where it is in use or gone."""
    freed = _delete_unless_locked(path, read_ahead=read_ahead)
    if freed is not None:
        count(EVICTIONS)
    parent = os.path.dirname(path)
    while freed is not None and parent != directory:
        try:
            os.rmdir(parent)
        except OSError:  # not empty: in use, or about to be filled again
            break
        parent = os.path.dirname(parent)
    return freed


def _delete_unless_locked(path: str, *, read_ahead: bool = False) -> int | None:
    """Delete a file that nobody uses, nor has read ahead unless that is no reason to keep it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to touch
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another version may have taken the place since it was opened, and be in use.
        if not is_at(descriptor, path) or (not read_ahead and is_ahead(descriptor)):
            return None
        size = os.fstat(descriptor).st_size
        os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
    return size
