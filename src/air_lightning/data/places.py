"""Where files lie in a cache directory, and how one that has been downloaded gets there.

A file has two places::

    <tree>/<relative path>           <tree> stands for the storage; the file's time is its time
                                     here, and tells its versions apart
    <version>/<relative path>        <version> stands for the storage, the file and its version

The second is for what cannot have the first: another version lies there and is in use or read
ahead, or a directory does, or a file lies where its directory would be (object stores know both
``a`` and ``a/b``). It is the exception, as it costs a directory for each file. Nothing that another
holds is replaced or removed, and nothing appears at a place but whole.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable

from air_lightning.data.leases import is_ahead, is_at
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.libc import c_function

_AT_FDCWD = -100
_NO_REPLACE = 1
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL)

_renameat2 = c_function("renameat2")  # Linux 3.15, and a C library from 2018


class Places:
    """The paths of one storage's files.

    Args:
        directory: The cache directory.
        root: The storage's root.
    """

    def __init__(self, directory: str, root: str) -> None:
        self._directory = directory
        self._root = root
        self._tree = f"{directory}/{_hash(root, 8)}/"

    def first(self, info: FileInfo) -> str:
        """Where a file is to lie. Its relative path is kept: labels are read off it."""
        return self.place(info.name)

    def place(self, name: str) -> str:
        """The first place of the file of a relative path."""
        return self._tree + name

    def second(self, info: FileInfo) -> str:
        """Where this version of it lies if the first place is taken."""
        return f"{self._directory}/{_hash(self._version(info), 8)}/{info.name}"

    def part(self, info: FileInfo) -> str:
        """Where it lies while it is being downloaded."""
        return f"{self._directory}/{_hash(self._version(info), 12)}.part"

    def publish(self, part: str, info: FileInfo) -> str:
        """Give a whole part its place, under its lock; returns the place."""
        first = self.first(info)
        try:
            if self._in_directory(first, part, lambda: _put(part, first)):
                return first
        except NotADirectoryError:
            pass  # a file lies where one of its directories is to be: another version of the volume
        second = self.second(info)
        # Nothing but this version can be there, and whoever has it has these bytes.
        self._in_directory(second, part, lambda: os.replace(part, second))
        return second

    def _version(self, info: FileInfo) -> str:
        return f"{self._root}\0{info.name}\0{info.size}\0{info.mtime!r}"

    def _in_directory(self, place: str, part: str, action: Callable[[], bool | None]) -> bool:
        while True:
            try:
                return action() is not False
            except FileNotFoundError:  # noqa: PERF203 - tried twice as a rule
                # Its directory is not there yet, or an evictor removed it while it was empty.
                if not os.path.exists(part):
                    raise
                _make_directories(self._directory, os.path.dirname(place))


def _put(part: str, place: str) -> bool:
    """Publish a part unless something is at the place that has to stay."""
    while not _rename_if_free(part, place):
        replaced = _replace_unheld(part, place)
        if replaced is not None:
            return replaced
    return True


def _rename_if_free(part: str, place: str) -> bool:
    """Rename, but replace nothing: what came in between may be in use already."""
    if _renameat2 is None:
        return _rename_if_missing(part, place)
    here, there = os.fsencode(part), os.fsencode(place)
    if not _renameat2(_AT_FDCWD, here, _AT_FDCWD, there, _NO_REPLACE):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in _UNSUPPORTED:
        return _rename_if_missing(part, place)
    raise OSError(number, os.strerror(number), part, None, place)


def _rename_if_missing(part: str, place: str) -> bool:
    if os.path.lexists(place):
        return False
    os.rename(part, place)
    return True


def _replace_unheld(part: str, place: str) -> bool | None:
    """Put a part in the place of another version, if nobody has that; None: look again."""
    with contextlib.suppress(OSError):
        os.rmdir(place)  # an empty directory is left of what was evicted
        return None
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    try:
        return _replace_if_unheld(part, place, descriptor)
    except BlockingIOError:
        return False
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _replace_if_unheld(part: str, place: str, descriptor: int) -> bool | None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not is_at(descriptor, place):
        return None
    if is_ahead(descriptor) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    os.replace(part, place)
    return True


def _make_directories(cache: str, directory: str) -> None:
    """Make a directory in the cache, but never the cache: one that was removed stays removed."""
    made = cache
    for segment in directory[len(cache) + 1 :].split("/"):
        made = f"{made}/{segment}"
        try:
            os.mkdir(made)
        except FileExistsError:
            if not os.path.isdir(made):
                raise NotADirectoryError(errno.ENOTDIR, "a file is there", made) from None


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size).hexdigest()
