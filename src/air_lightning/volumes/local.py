"""Storage on a mounted file system: volumes behind FUSE, ``file://`` and local paths.

Writing a file: a hidden temporary name in the same directory, front to back, fsync, close, rename;
on local disks then fsync of the directory.
Where the mount refuses the rename, the bytes are written once more, under the final name.
"""

import contextlib
import errno
import io
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from typing import BinaryIO, TypeVar

from air_lightning.errors import StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import Entry, FileInfo, Listing
from air_lightning.volumes.mount import MountGuard
from air_lightning.volumes.reader import FileRanges, RetryingReader
from air_lightning.volumes.retry import Retry, naming
from air_lightning.volumes.statx import size_and_mtime
from air_lightning.volumes.transfer import Download, State, Times
from air_lightning.volumes.walk import Walk, is_circular
from air_lightning.volumes.writer import (
    NamedFile,
    make_directories,
    sync_directory,
    sync_file,
    unmakeable,
)

_logger = logging.getLogger("air_lightning")
_T = TypeVar("_T")

_CHUNK = 4 << 20  # bytes of one read or write; large, since each may be one request
_CANNOT_RENAME = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_CANNOT_FOLLOW = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOSYS, errno.EOPNOTSUPP)


class LocalStorage:
    """A directory that the operating system can open.

    Args:
        root: The normalized path, as users see it.
        retry: How long to try on transient errors.
    """

    def __init__(self, root: str, *, retry: Retry | None = None) -> None:
        directory = volume_path.local_dir(root)
        if directory is None:
            raise ValueError(f"{root} is not on this machine's file systems")
        self.root = root
        self._directory = directory
        self._retry = retry or Retry()
        self._guard = MountGuard(directory)
        self._times = Times()
        self.reported: dict[str, float] = {}

    def list_files(self, *, sizes: bool = False) -> Listing:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        try:
            return Walk(self._call, self.root, sizes=sizes).run(self._directory)
        except NotADirectoryError as error:
            raise not_a_directory(self.root) from error

    def list_dir(self, name: str = "", *, limit: int | None = None) -> list[Entry]:
        """See :class:`~air_lightning.volumes.base.Storage`."""

        def scan() -> list[Entry]:
            with os.scandir(self._local(name)) as found:
                listed = [(entry.name, _is_dir(entry)) for entry in islice(found, limit)]
            return sorted(Entry(name, is_dir) for name, is_dir in listed if is_dir is not None)

        return self._call("list", name, scan)

    def stat(self, name: str) -> FileInfo:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        found = self._call("stat", name, lambda: os.stat(self._local(name)))
        return FileInfo(name, found.st_size, found.st_mtime)

    def exists(self, name: str) -> bool:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        try:
            self._call("stat", name, lambda: os.stat(self._local(name)))
        except FileNotFoundError:
            return False
        except StorageError as error:
            if error.errno == errno.ENOTDIR:
                return False
            raise
        return True

    def read_bytes(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~air_lightning.volumes.base.Storage`."""

        def read() -> bytes:
            # Not open(): that asks for the file's state as well, which is a request of its own.
            descriptor = os.open(self._local(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return b"".join(_chunks(descriptor, offset, length))
            finally:
                os.close(descriptor)

        return self._call("read", name, read)

    def open_read(self, name: str) -> BinaryIO:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        local = self._local(name)
        reader = RetryingReader(lambda: io.FileIO(local), self._visible(name), self._retry)
        return io.BufferedReader(reader, buffer_size=1 << 20)

    @contextlib.contextmanager
    def open_ranges(self, name: str) -> Iterator[FileRanges]:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with contextlib.closing(
            FileRanges(self._local(name), self._visible(name), self._retry)
        ) as file:
            yield file

    def download(self, info: FileInfo, destination: str) -> int:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        download = Download(_Source(self, info.name), info, destination, self._retry)
        size = download.run()
        if download.mtime != info.mtime:
            self.reported[info.name] = download.mtime
        return size

    @contextlib.contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        # It imports numpy, which those who list and read can do without.
        from air_lightning.volumes.direct import writer_to

        target = self._local(name)
        temporary = temporary_name(target)
        file = self._call("create", name, lambda: self._create(temporary, name))
        try:
            with writer_to(file, os.path.dirname(temporary), _CHUNK) as writer:
                yield writer
                with naming("write", self._visible(name)):
                    sync_file(writer)
            self._publish(name, temporary, target)
        except BaseException:
            _discard(temporary)
            raise

    def write_bytes(self, name: str, data: bytes) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        target = self._local(name)
        temporary = temporary_name(target)

        def write() -> None:
            with self._create(temporary, name, "wb") as file, io.BufferedWriter(file) as writer:
                writer.write(data)
                sync_file(writer)

        try:
            self._call("write", name, write)
            self._publish(name, temporary, target)
        except BaseException:
            _discard(temporary)
            raise

    def make_root(self) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        try:
            self._call("create", "", self._make_directory)
        except StorageError as error:
            if error.errno in (errno.EEXIST, errno.ENOTDIR):
                raise not_a_directory(self.root) from error
            raise

    def free_bytes(self) -> int | None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        if self.root.startswith("/Volumes/"):
            return None
        directory = self._directory
        while not os.path.exists(directory) and directory not in ("", "/"):
            directory = os.path.dirname(directory)
        try:
            status = os.statvfs(directory)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize or None

    def remove(self, name: str) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with contextlib.suppress(FileNotFoundError):
            self._call("remove", name, lambda: os.unlink(self._local(name)))

    def remove_tree(self, name: str = "") -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with contextlib.suppress(FileNotFoundError):
            self._call("remove", name, lambda: shutil.rmtree(self._local(name)))

    def _call(self, operation: str, name: str, action: Callable[[], _T]) -> _T:
        visible = self._visible(name)
        with naming(operation, visible):
            return self._retry.call(operation, visible, lambda: self._guard.run(action))

    def _visible(self, name: str) -> str:
        return volume_path.join(self.root, name)

    def _local(self, name: str) -> str:
        return f"{self._directory}/{name}" if name else self._directory

    def _create(self, temporary: str, name: str, mode: str = "xb") -> NamedFile:
        try:
            return NamedFile(temporary, mode, self._visible(name))
        except FileNotFoundError:
            self._guard.check()  # or the directory would be made beneath the mount that is away
        try:
            make_directories(os.path.dirname(temporary))
            return NamedFile(temporary, mode, self._visible(name))
        except FileNotFoundError as error:
            self._guard.check(error)
            raise unmakeable(self._visible(name), error) from error

    def _make_directory(self) -> None:
        try:
            make_directories(self._directory)
        except FileNotFoundError as error:
            self._guard.check(error)
            raise unmakeable(self.root, error) from error

    def _publish(self, name: str, temporary: str, target: str) -> None:
        size = os.stat(temporary).st_size
        try:
            self._call("publish", name, lambda: _rename(temporary, target, size))
        except StorageError as error:
            if error.errno not in _CANNOT_RENAME or os.path.isdir(target):
                raise
            _logger.debug("%s: rename is refused here; writing it again", self._visible(name))
            self._call("write", name, lambda: _write_again(temporary, target))
            _discard(temporary)
        with naming("publish", self._visible(name)):
            sync_directory(os.path.dirname(target))


class _Source:
    """One file to be downloaded; see :class:`~air_lightning.volumes.transfer.Source`."""

    step = _CHUNK
    min_span = 2 << 20  # at 50 MB/s, reading fewer takes no longer than another open
    cached = True
    settle_s = 2.0  # mounts keep sizes for a second

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._storage = storage
        self._local = storage._local(name)
        self.path = storage._visible(name)
        self.times = storage._times

    def open(self) -> "_Stream":
        return self._storage._guard.run(lambda: _Stream(self._local))


class _Stream:
    """A handle, and a buffer that its reads share."""

    def __init__(self, local: str) -> None:
        # Not open(): that asks for the file's state as well, which is a request of its own.
        self._descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = memoryview(b"")

    def read(self, offset: int, length: int) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        count = os.preadv(self._descriptor, [self._buffer[:length]], offset)
        return self._buffer[:count]

    def state(self) -> State:
        return State(*size_and_mtime(self._descriptor))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a mount that died cannot be told either
            os.close(self._descriptor)


def _is_dir(entry: os.DirEntry[str]) -> bool | None:
    """Whether it is a directory; None for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError as error:
        # One such link among others must not be in the way of listing them.
        if is_circular(error) or (entry.is_symlink() and error.errno in _CANNOT_FOLLOW):
            return None
        raise


def _chunks(descriptor: int, offset: int, length: int | None) -> Iterator[bytes]:
    left = length
    while left is None or left > 0:
        chunk = os.pread(descriptor, _CHUNK if left is None else min(_CHUNK, left), offset)
        if not chunk:
            return
        offset += len(chunk)
        left = None if left is None else left - len(chunk)
        yield chunk


def temporary_name(target: str) -> str:
    """A hidden name beside a file, that no other process makes."""
    head, _, tail = target.rpartition("/")
    return f"{head}/.{tail}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _rename(temporary: str, target: str, size: int) -> None:
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        # A rename that was done, but whose answer was lost, finds nothing to rename when retried.
        if not os.path.exists(target) or os.stat(target).st_size != size:
            raise


def _write_again(temporary: str, target: str) -> None:
    try:
        with open(temporary, "rb") as source, open(target, "wb", buffering=_CHUNK) as file:
            shutil.copyfileobj(source, file, _CHUNK)
            sync_file(file)
    except BaseException:
        _discard(target)
        raise


def _discard(local: str) -> None:
    try:
        os.unlink(local)
    except FileNotFoundError:
        pass  # nothing was begun
    except OSError as error:
        _logger.warning("Could not remove the unfinished file %s: %s", local, error)


def not_a_directory(path: str) -> StorageError:
    """The error for a root that is a file."""
    error = StorageError(f"{path} is a file (or below one); a directory is wanted.")
    error.errno = errno.ENOTDIR
    return error
