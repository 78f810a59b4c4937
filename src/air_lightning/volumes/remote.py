"""Storage behind fsspec: object stores, and whatever else has a URL.

Writing a file: into a temporary file on local disk, then one upload under the final name. Thus an
upload that failed can be repeated, and one that was cut off never shows (object stores publish at
the end of an upload; fsspec's own writers publish what there is when an exception closes them).
"""

import contextlib
import errno
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar, cast

import fsspec.asyn

from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import Entry, FileInfo, Listing
from air_lightning.volumes.filesystem import open_fs
from air_lightning.volumes.local import not_a_directory
from air_lightning.volumes.objects import is_hidden, is_marker, is_nameless, mtime_of, size_of
from air_lightning.volumes.reader import RetryingReader
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.streams import cut
from air_lightning.volumes.transfer import Download, NoRangesError, State, Times, changed, vanished

_logger = logging.getLogger("air_lightning")
_T = TypeVar("_T")

_BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
_PART = 8 << 20  # bytes of one ranged request, in memory
_IN_MEMORY = 32 << 20  # bytes of an upload that are kept in memory instead of on disk


# At the fork, while the child has one thread: later, another thread may be about to use the loop.
# fsspec itself, at a fork, leaves the lock as it was, which another thread may have held.
os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


class FsspecStorage:
    """A directory of any fsspec file system.

    Args:
        root: The normalized URL.
        storage_options: Passed to the file system, as ``{"anon": True}``.
        retry: How long to try on transient errors.
    """

    def __init__(
        self,
        root: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.root = root
        self._options = dict(storage_options or {})
        self._retry = retry or Retry()
        self._fs_of: tuple[int, Any] | None = None
        # There are no directories in a bucket, and a mistyped one must not be created.
        self._in_bucket = root.partition("://")[0] in _BUCKETS
        self._has_ranges = True
        self._times = Times()
        self.reported: dict[str, float] = {}
        self._base = self._fs._strip_protocol(root).rstrip("/")

    @property
    def _fs(self) -> Any:
        """This process's file system; one that was opened before a fork has lost its threads."""
        opened = self._fs_of
        if opened is None or opened[0] != os.getpid():
            opened = self._fs_of = (os.getpid(), open_fs(self.root, self._options))
        return opened[1]

    def list_files(self, *, sizes: bool = False) -> Listing:  # noqa: ARG002 - it always has them
        """See :class:`~air_lightning.volumes.base.Storage`; the client bounds the time."""
        found = self._call("list", "", lambda: self._fresh().find(self._base, detail=True))
        if not found and not self.exists(""):
            raise FileNotFoundError(f"{self.root} does not exist")
        listed = {path: info for path, info in found.items() if not is_marker(path, info)}
        if list(listed) == [self._base]:
            raise not_a_directory(self.root)
        files = [self._info(path, info) for path, info in listed.items()]
        self._tell_nameless(info.name for info in files)
        kept = sorted(
            (os.fsencode(info.name), info.size, info.mtime)
            for info in files
            if not is_hidden(info.name) and not is_nameless(info.name)
        )
        return Listing(
            [name for name, _, _ in kept],
            [size for _, size, _ in kept],
            [mtime for _, _, mtime in kept],
        )

    def list_dir(self, name: str = "", *, limit: int | None = None) -> list[Entry]:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        path = self._path(name)
        found = self._call("list", name, lambda: self._fresh().ls(path, detail=True))
        entries = {
            Entry(info["name"].rstrip("/").rpartition("/")[2], info["type"] == "directory")
            for info in found
            if info["name"].strip("/") != path.strip("/")
        }
        return sorted(entries)[:limit]

    def stat(self, name: str) -> FileInfo:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        info = self._call("stat", name, lambda: self._fresh().info(self._path(name)))
        return FileInfo(name, size_of(info), mtime_of(info))

    def exists(self, name: str) -> bool:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        path = self._path(name)
        if length == 0:
            return b""
        if offset == 0 and length is None:
            return cast("bytes", self._call("read", name, lambda: self._fs.cat_file(path)))
        end = None if length is None else offset + length
        data = self._call("read", name, lambda: self._fs.cat_file(path, start=offset, end=end))
        return cast("bytes", data)

    def open_read(self, name: str) -> BinaryIO:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        path = self._path(name)
        reader = RetryingReader(
            lambda: cast("BinaryIO", self._fs.open(path, "rb")), self._visible(name), self._retry
        )
        return io.BufferedReader(reader, buffer_size=1 << 20)

    @contextlib.contextmanager
    def open_ranges(self, name: str) -> Iterator["_Ranges"]:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        yield _Ranges(self, name)

    def download(self, info: FileInfo, destination: str) -> int:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        if len(cut(info.size, _PART)) > 1 and self._has_ranges:
            download = Download(_Source(self, info.name), info, destination, self._retry)
            try:
                size = download.run()
            except NoRangesError:
                self._has_ranges = False
            else:
                if download.mtime != info.mtime:
                    self.reported[info.name] = download.mtime
                return size
        return self._get_file(info, destination)

    @contextlib.contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as spool:
            yield cast("BinaryIO", spool)
            self._call("write", name, lambda: self._upload(name, cast("BinaryIO", spool)))

    def write_bytes(self, name: str, data: bytes) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        self._call("write", name, lambda: self._in_parent(name, "pipe_file", data))

    def make_root(self) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        if self._call("stat", "", lambda: self._fresh().isfile(self._base)):
            raise not_a_directory(self.root)
        if not self._in_bucket:
            self._call("create", "", lambda: self._fs.makedirs(self._base, exist_ok=True))

    def free_bytes(self) -> int | None:
        """See :class:`~air_lightning.volumes.base.Storage`; object stores do not say."""
        return None

    def remove(self, name: str) -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with contextlib.suppress(FileNotFoundError):
            self._call("remove", name, lambda: self._fs.rm_file(self._path(name)))

    def remove_tree(self, name: str = "") -> None:
        """See :class:`~air_lightning.volumes.base.Storage`."""
        with contextlib.suppress(FileNotFoundError):
            self._call("remove", name, lambda: self._fresh().rm(self._path(name), recursive=True))

    def _call(self, operation: str, name: str, action: Callable[[], _T]) -> _T:
        path = self._visible(name)
        try:
            return self._retry.call(operation, path, action)
        except FileNotFoundError as error:
            # Of a missing bucket clients say so without its name.
            raise FileNotFoundError(errno.ENOENT, f"{path} does not exist ({error})") from error

    def _get_file(self, info: FileInfo, destination: str) -> int:
        """Have the file system copy a file in one request, which gives one version of it."""
        path = self._path(info.name)

        def get() -> int:
            self._fs.get_file(path, destination)
            got = os.stat(destination).st_size
            if got != info.size and size_of(self._fresh().info(path)) == info.size:
                raise OSError(errno.EIO, f"a short read: {got} of {info.size} bytes came")
            return got

        try:
            got = self._call("download", info.name, get)
        except FileNotFoundError as error:
            raise vanished(self._visible(info.name)) from error
        if got != info.size:
            raise changed(self._visible(info.name), info.size, got)
        return got

    def _visible(self, name: str) -> str:
        return volume_path.join(self.root, name)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _fresh(self) -> Any:
        """The file system without what it remembers of earlier listings."""
        self._fs.invalidate_cache()
        return self._fs

    def _info(self, path: str, info: Mapping[str, Any]) -> FileInfo:
        # One slash: a key may go on with another one, and is another key than the one without it.
        name = path[len(self._base) :].removeprefix("/")
        return FileInfo(name, size_of(info), mtime_of(info))

    def _tell_nameless(self, names: Iterable[str]) -> None:
        nameless = [name for name in names if is_nameless(name)]
        if nameless:
            _logger.warning(
                "Left out %d keys below %s with an empty segment, as %r, which is no path of a "
                "file. Rename them to train on them.",
                *(len(nameless), self.root, f"{self._base}/{nameless[0]}"),
            )

    def _upload(self, name: str, spool: BinaryIO) -> None:
        spool.seek(0)
        with _on_disk(spool) as local:
            if local is None:
                self._in_parent(name, "pipe_file", spool.read())
            else:
                self._in_parent(name, "put_file", local)

    def _in_parent(self, name: str, method: str, what: Any) -> None:
        """Write a file, and make its directory first where a store wants one."""
        path = self._path(name)
        write = getattr(self._fs, method)
        arguments = (what, path) if method == "put_file" else (path, what)
        try:
            write(*arguments)
        except FileNotFoundError:
            if self._in_bucket:
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(*arguments)


class _Source:
    """One large file to be downloaded; see :class:`~air_lightning.volumes.transfer.Source`."""

    step = _PART
    min_span = _PART
    cached = False
    settle_s = 0.0  # each question is a request, nothing is outdated

    def __init__(self, storage: FsspecStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self.path = storage._visible(name)
        self.times = storage._times

    def open(self) -> "_Stream":
        return _Stream(self._storage._fs, self._storage._path(self._name))


class _Stream:
    """Ranges of one object, each a request."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + length)
        except NotImplementedError as error:
            raise NoRangesError(str(error)) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # of s3fs, for a range beyond the object's end
                return b""
            raise
        if len(data) > length:
            raise NoRangesError(f"{len(data)} bytes came where {length} were asked for")
        return cast("bytes", data)

    def state(self) -> State:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path)
        return State(size_of(info), mtime_of(info))

    def close(self) -> None:
        pass


class _Ranges:
    """Reads parts of one file, each with a request of its own."""

    def __init__(self, storage: FsspecStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """See :class:`~air_lightning.volumes.base.RangeReader`."""
        wanted = sum(view.nbytes for view in views)
        data = memoryview(self._storage.read_bytes(self._name, offset, wanted))
        position = 0
        for view in views:
            piece = data[position : position + view.nbytes]
            view[: piece.nbytes] = piece
            position += piece.nbytes
        return position


@contextlib.contextmanager
def _on_disk(spool: Any) -> Iterator[str | None]:
    """A path to a spool's bytes, or None where they are in memory."""
    if not spool._rolled:
        yield None
        return
    spool.flush()
    yield f"/proc/self/fd/{spool.fileno()}"
