"""Leases: local paths that stay valid, held by locks of the kernel that end with their process.

Two kinds, each shared by any number of processes::

    in use      flock                         nobody evicts or replaces the file
    read ahead  a lock of the open file (OFD) it goes only for a file that is needed at once

The second is what keeps a disk from being filled for good by files that others need later: before
such a file is used, its lease is turned into the first kind, if the file is still there. Where a
kernel does not know it, what is read ahead is held like what is in use.
"""

import fcntl
import os
import stat
import struct

from air_lightning.data.counters import CACHE_HITS, count
from air_lightning.volumes.base import FileInfo

_FLOCK = struct.Struct("hhqqi4x")  # of struct flock: type, whence, start, length, process
_READ, _WRITE, _NONE = (
    _FLOCK.pack(kind, 0, 0, 0, 0) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
)
_SAME_TIME_S = 1e-3  # a time comes back from a file system rounded to what it can store
_EARLIEST, _LATEST = -(1 << 31), 1 << 33  # that every file system can store, and Python convert


class Lease:
    """A local path that stays valid until it is closed.

    Args:
        path: The file.
        descriptor: Holds its lock; negative for a file that needs none.
    """

    __slots__ = ("_descriptor", "_pid", "path")

    def __init__(self, path: str, descriptor: int = -1) -> None:
        self.path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    def use(self) -> bool:
        """Let nobody evict the file; False where it had to go, having only been read ahead."""
        if self._descriptor < 0:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        return os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        """Let the file be evicted."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            release(descriptor, self._pid)


def lease_if_whole(place: str, info: FileInfo, *, ahead: bool = False) -> Lease | None:
    """A lease of a cached file; None where there is none, or not this version of it.

    Args:
        place: Where it may lie.
        info: The version that is wanted.
        ahead: Whether it is only read ahead.
    """
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # Waits where an evictor or a publisher is about to finish, for microseconds.
        hold(descriptor, ahead=ahead)
        status = os.fstat(descriptor)
        if status.st_nlink and _is_version(status, info):
            count(CACHE_HITS)
            return Lease(place, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    release(descriptor, os.getpid())
    return None


def is_whole(place: str, info: FileInfo) -> bool:
    """Whether a cached file lies there, and is this version."""
    try:
        return _is_version(os.stat(place), info)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_version(status: os.stat_result, info: FileInfo) -> bool:
    if status.st_size != info.size or abs(status.st_mtime - time_of(info)) >= _SAME_TIME_S:
        return False
    # A directory of the file's name may have its size and time by chance.
    return stat.S_ISREG(status.st_mode)


def time_of(info: FileInfo) -> float:
    """A file's time as the cache stores it; 0.0, as for an unknown one, where it is out of range.

    A store may say anything. A file system that cannot store it would give back another time, and
    the file would never be found again.
    """
    return info.mtime if _EARLIEST <= info.mtime < _LATEST else 0.0


def hold(descriptor: int, *, ahead: bool) -> None:
    """Take a lease's lock; one that is held exclusively already turns into it."""
    # Set before the other one goes: in between the file would be anybody's.
    weaker = ahead and _set(descriptor, _READ)
    fcntl.flock(descriptor, fcntl.LOCK_UN if weaker else fcntl.LOCK_SH)


def is_ahead(descriptor: int) -> bool:
    """Whether another one has read the file ahead."""
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WRITE)
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def is_at(descriptor: int, path: str) -> bool:
    """Whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def release(descriptor: int, pid: int) -> None:
    """Unlock and close. A child only closes: an unlock would free its parent's lock, too.

    And a close alone would not do in the process itself: children that were forked in the meantime
    keep copies of the descriptor, and with them the locks.
    """
    if os.getpid() == pid:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _set(descriptor, _NONE)
    os.close(descriptor)


def _set(descriptor: int, lock: bytes) -> bool:
    """Set or drop the weaker lock; False where there is none such."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except OSError:
        return False
    return True
