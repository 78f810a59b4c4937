"""Files of a volume on local disk: fetched once per node, whole or not at all, evicted when full.

A file's way into the cache::

    hit           open it, lock it shared, see that it is still linked and whole
    lock          else open <key>.part and lock it; where another process is at it, wait, look again
    make room     evict until the disk has its free share
    download      into the locked <key>.part; the size is checked
    publish       rename to <tree>/<relative path>; the lock goes with the inode, and turns shared

<tree> stands for the storage, and the file's time there is its time here: size and time tell one
version from another. A directory for each file would cost every download a second new inode.

A full disk evicts and tries again, and at last the file is read where it lies on the volume; at
once where it is larger than the whole disk.

What a process holds locked (a Lease) nobody evicts: what was just yielded, what was read ahead,
what is being downloaded. The locks are the kernel's: they end with their process, however it ends.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable
from typing import NoReturn

from air_lightning.data.counters import CACHE_HITS, READS_THROUGH, count, downloading
from air_lightning.data.eviction import Evictor, free_bytes, remove_parts
from air_lightning.data.scratch import private_directory, shared_directory
from air_lightning.errors import FileVanishedError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import FULL_DISK, FileInfo, Storage

_logger = logging.getLogger("air_lightning")

_SAME_TIME_S = 1e-3  # a time comes back from a file system rounded to what it can store


class Lease:
    """A local path that stays valid until it is closed.

    Args:
        path: The file.
        descriptor: Holds its shared lock; negative for a file that needs none.
    """

    __slots__ = ("_descriptor", "_pid", "path")

    def __init__(self, path: str, descriptor: int = -1) -> None:
        self.path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    def close(self) -> None:
        """Let the file be evicted."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _release(descriptor, self._pid)


class FileCache:
    """A directory of downloaded files; safe in many threads and processes at once, across forks.

    Args:
        storage: Where the files come from.
        directory: An existing directory on local disk that can be written.
        min_free_bytes: Free disk to keep, by evicting; None for the environment's, else a tenth.
        remake: Whether to make the directory again where it was removed. Not a private one: it goes
            when its process ends, and what still writes then must not bring it back.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        min_free_bytes: int | None = None,
        *,
        remake: bool = False,
    ) -> None:
        self.storage = storage
        self._directory = directory
        self._remake = remake
        self._told_full = False
        self._evictor = Evictor(directory, min_free_bytes)
        tree = hashlib.blake2b(_encode(storage.root), digest_size=8).hexdigest()
        self._tree = f"{directory}/{tree}/"

    def __deepcopy__(self, memo: object) -> "FileCache":
        return self  # a copy of a dataset shares its cache, which goes with the last of them

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A UCVolumeDataset was to be pickled, and its cache and position belong to this "
            'process; wanted are forked workers (multiprocessing_context="fork", the default '
            "here), or a dataset made anew in the other process from the same arguments, with "
            "load_state_dict()."
        )

    def place(self, info: FileInfo) -> str:
        """Where a file lies once it is here. Its relative path is kept: labels are read off it."""
        return self._tree + info.name

    def fetch(self, info: FileInfo, place: str | None = None) -> Lease:
        """Have a file here.

        Args:
            info: The file.
            place: What ``place(info)`` returned, if it is at hand.

        Raises:
            StorageError: It cannot be downloaded, or the disk is full and it lies nowhere that it
                could be read from instead.
        """
        place = place or self.place(info)
        remade = False
        while True:
            try:
                lease = self._fetch_once(info, place)
            except (FileNotFoundError, FileVanishedError) as error:
                # A download cannot tell whether what is missing is the file or where it is to go.
                if isinstance(error, FileVanishedError) and os.path.isdir(self._directory):
                    raise
                if remade or not self._is_remade():
                    raise self._removed(error) from error
                remade = True
                continue
            if lease is not None:
                return lease

    def bytes_so_far(self, info: FileInfo) -> int:
        """How much of a file that is being downloaded is here."""
        try:
            return os.stat(self.part(info)).st_blocks
        except OSError:
            return 0

    def stalled(self, info: FileInfo, seconds: float) -> StorageError:
        """The error for a download that stands still."""
        ours = StorageError(
            f"Could not download {volume_path.join(self.storage.root, info.name)}: no byte of it "
            f"came for {seconds:.0f} s. Check that the storage answers (is the mount alive, the "
            "network up?), then run again."
        )
        ours.errno = errno.ETIMEDOUT
        return ours

    def _fetch_once(self, info: FileInfo, place: str) -> Lease | None:
        """Have a file here; None: look again."""
        try:
            lease = lease_if_whole(place, info)
            if lease is None and not self._evictor.could_hold(info.size):
                return self._read_through(info, None)
            return lease or self._download(info, place)
        except OSError as error:
            if isinstance(error, StorageError) or error.errno not in FULL_DISK:
                raise
            if not self._evictor.free_up(info.size):
                return self._read_through(info, error)
            return None

    def _is_remade(self) -> bool:
        if self._remake:
            with contextlib.suppress(OSError):
                os.makedirs(self._directory, exist_ok=True)
        return os.path.isdir(self._directory)

    def _removed(self, error: OSError) -> StorageError:
        ours = StorageError(
            f"The cache directory {self._directory} was removed while it was in use. Leave it in "
            "place while a run lasts, or pass a cache_dir= that nothing cleans up, and run again."
        )
        ours.errno = error.errno
        return ours

    def part(self, info: FileInfo) -> str:
        """Where a file lies while it is being downloaded."""
        version = _encode(f"{self._tree}{info.name}\0{info.size}\0{info.mtime!r}")
        return f"{self._directory}/{hashlib.blake2b(version, digest_size=12).hexdigest()}.part"

    def _download(self, info: FileInfo, place: str) -> Lease | None:
        """Download a file, unless another process did meanwhile: None, look again."""
        part = self.part(info)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        pid = os.getpid()
        try:
            if not _lock_or_wait(descriptor) or not _is_at(descriptor, part):
                _release(descriptor, pid)
                return None
            lease = lease_if_whole(place, info)
            if lease is not None:
                os.unlink(part)
                _release(descriptor, pid)
                return lease
            return self._fill(info, place, part, descriptor)
        except BaseException:
            if _is_at(descriptor, part):
                _unlink(part)
            _release(descriptor, pid)
            raise

    def _fill(self, info: FileInfo, place: str, part: str, descriptor: int) -> Lease:
        self._evictor.make_room(info.size)
        with downloading(info.size):
            self.storage.download(info, part)
        # Eviction goes by the access time, to the nanosecond: the kernel's own times are too coarse
        # to tell which file came first.
        os.utime(part, ns=(time.time_ns(), int(info.mtime * 1e9)))
        _publish(part, place, self._directory)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return Lease(place, descriptor)

    def _read_through(self, info: FileInfo, error: OSError | None) -> Lease:
        """The file where it lies on the volume, when the disk has no room for it."""
        directory = volume_path.local_dir(self.storage.root)
        path = volume_path.join(self.storage.root, info.name)
        if directory is None:
            ours = StorageError(
                f"The disk of the cache {self._directory} is full ({free_bytes(self._directory)} "
                f"bytes free, nothing left to evict that would do), and {path} needs {info.size} "
                "bytes. Free disk, or pass a cache_dir= on a larger one."
            )
            ours.errno = errno.ENOSPC if error is None else error.errno
            raise ours from error
        count(READS_THROUGH)
        _logger.log(
            logging.DEBUG if self._told_full else logging.WARNING,
            "The disk of the cache %s has no room for %s (%d bytes), whatever is evicted: reading "
            "it from the volume itself. Pass a cache_dir= on a larger disk. Further files of this "
            "dataset are logged at level DEBUG.",
            *(self._directory, path, info.size),
        )
        self._told_full = True
        return Lease(f"{directory}/{info.name}")


def open_cache(
    storage: Storage, cache_dir: str | os.PathLike[str] | None, min_free_bytes: int | None
) -> tuple[FileCache, Callable[[], object]]:
    """A cache, and what removes its directory at once if it is a private one."""
    if cache_dir is not None:
        directory = shared_directory(cache_dir)
        remove_parts(directory)
        return FileCache(storage, directory, min_free_bytes, remake=True), lambda: None
    directory, remove = private_directory()
    try:
        cache = FileCache(storage, directory, min_free_bytes)
    except BaseException:
        remove()
        raise
    return cache, weakref.finalize(cache, remove)


def lease_if_whole(place: str, info: FileInfo) -> Lease | None:
    """A lease of a cached file; None where there is none, or not this version of it."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Waits where an evictor or a publisher is about to finish, for microseconds.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        same_time = abs(status.st_mtime - info.mtime) < _SAME_TIME_S
        if status.st_nlink and status.st_size == info.size and same_time:
            count(CACHE_HITS)
            return Lease(place, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _publish(part: str, place: str, cache: str) -> None:
    while True:
        try:
            os.replace(part, place)
        except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203 - tried twice as a rule
            # Its directory is not there yet, or an evictor removed it while it was empty.
            if not os.path.exists(part):
                raise
            _make_directories(cache, os.path.dirname(place))
        except IsADirectoryError:
            # Cached before the volume got a file of that directory's name.
            shutil.rmtree(place, ignore_errors=True)
        else:
            return


def _make_directories(cache: str, directory: str) -> None:
    """Make a directory in the cache, but never the cache: one that was removed stays removed."""
    made = cache
    for segment in directory[len(cache) + 1 :].split("/"):
        made = f"{made}/{segment}"
        try:
            os.mkdir(made)
        except FileExistsError:
            if not os.path.isdir(made):
                # A file of that name was cached before the volume got a directory of that name.
                _unlink(made)
                os.mkdir(made)


def _lock_or_wait(descriptor: int) -> bool:
    """Lock a part; False once another downloader is done with it, one way or the other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Shared: a finished download keeps a shared lock as its lease, for as long as it is used.
        # Waiting for that to end would deadlock where this very thread is to use it.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return False
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _release(descriptor: int, pid: int) -> None:
    """Unlock and close. A child only closes: an unlock would free its parent's lock, too.

    And a close alone would not do in the process itself: children that were forked in the meantime
    keep copies of the descriptor, and with them the lock.
    """
    if os.getpid() == pid:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
