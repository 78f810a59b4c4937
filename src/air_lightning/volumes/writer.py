"""A local file being written: errors name it as users know it, and many pieces go in one call."""

import errno
import io
import os
import stat
from collections.abc import Sequence
from typing import Any, BinaryIO

from air_lightning.errors import StorageError
from air_lightning.volumes.mount import is_local_disk
from air_lightning.volumes.reader import advance, first_views
from air_lightning.volumes.retry import naming

_CANNOT_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS)


class NamedFile(io.FileIO):
    """A file being written whose errors name it as users know it.

    Args:
        local: Its path, or its descriptor, which then stays open.
        mode: As of ``open``.
        visible: What to call it.
    """

    def __init__(self, local: str | int, mode: str, visible: str) -> None:
        super().__init__(local, mode, closefd=isinstance(local, str))
        self._visible = visible

    def write(self, data: Any, /) -> int:
        """See the base class."""
        with naming("write", self._visible):
            return super().write(data)

    def write_views(self, views: Sequence[memoryview]) -> None:
        """Write all of them without copying them together first."""
        waiting = list(reversed([view for view in views if view.nbytes]))
        while waiting:
            advance(waiting, self.write_some(first_views(waiting)))

    def write_some(self, views: Sequence[memoryview]) -> int:
        """Write what one system call takes of them; returns how many bytes that was."""
        with naming("write", self._visible):
            return os.writev(self.fileno(), views)

    def close(self) -> None:
        """See the base class; some file systems tell of a full disk only now."""
        with naming("write", self._visible):
            super().close()


class GatheringWriter(io.BufferedWriter):
    """A buffered writer that also takes many pieces of memory at once."""

    raw: NamedFile

    def write_views(self, views: Sequence[memoryview]) -> None:
        """Write all of them, after what was written before."""
        self.flush()
        self.raw.write_views(views)


def sync_file(writer: BinaryIO) -> None:
    """Let the bytes of a file outlive a loss of power, where its file system can."""
    writer.flush()
    try:
        os.fsync(writer.fileno())
    except OSError as error:
        if error.errno not in _CANNOT_FSYNC:
            raise


def sync_directory(directory: str) -> None:
    """Let the names in a directory of a local disk outlive a loss of power; elsewhere do nothing.

    A file's own fsync keeps its bytes, not the name that it is given afterwards.
    """
    if not is_local_disk(directory):
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directories(directory: str) -> None:
    """Make a directory and those above it, unless it is there."""
    try:
        os.makedirs(directory, exist_ok=True)
    except FileExistsError:
        # It says so as well of a directory that could not be asked what it is: raise that error.
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise


def unmakeable(path: str, error: FileNotFoundError) -> StorageError:
    """The error for what is missing though it was to be made; raise it ``from error``.

    Some file systems, as /proc, say so instead of refusing. Left as it is, the error would name a
    temporary file, and callers would take it for a missing one.
    """
    ours = StorageError(
        f"Could not create {path}: {error.strerror}. Its file system makes no new files there, or "
        "its directory was deleted meanwhile; use a place that can be written."
    )
    ours.errno = error.errno
    return ours
