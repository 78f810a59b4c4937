"""Files of a volume on local disk: fetched once per node, whole or not at all, evicted when full.

A file's way into the cache::

    hit           open it, lock it shared, see that it is still linked and whole      leases.py
    lock          else open <version>.part and lock it, or wait for who has it and look again
    make room     evict until the disk has its free share                             eviction.py
    download      into the locked part; the size is checked
    publish       rename to its place; the lock goes with the inode, and turns shared places.py

A full disk evicts and tries again, and lets other downloads end; at last the file is read where it
lies on the volume, at once where it is larger than the whole disk. A file that is not needed yet
gives up instead: neither the free share nor what others wait to use is its to take.

What a process holds (a Lease) nobody evicts: what was just yielded, what is being downloaded, and,
but for a file that is needed at once, what was read ahead. The locks are the kernel's: they end
with their process, however it ends.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import NoReturn

from air_lightning.data.counters import READS_THROUGH, count, downloading
from air_lightning.data.eviction import Evictor, free_bytes, remove_parts
from air_lightning.data.leases import Lease, hold, is_at, is_whole, lease_if_whole, release, time_of
from air_lightning.data.listing import FileList
from air_lightning.data.notes import Notes, Row
from air_lightning.data.places import Places
from air_lightning.data.scratch import private_directory, shared_directory
from air_lightning.errors import FileVanishedError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import FULL_DISK, FileInfo, Storage

_logger = logging.getLogger("air_lightning")

_SHORTAGES = (*FULL_DISK, errno.EMFILE, errno.ENFILE)
_LATER_NS = 1_000_000_000
_WAIT_S = 60.0  # for other downloads to end and leave room
_POLL_S = 0.05
_LOOKS = 100  # that find nothing to wait for and nothing to evict, before a disk counts as full
_ROUNDED_S = 1.0  # stores tell full seconds in some answers, fractions in others


class NoRoomError(OSError):
    """A file that is not needed yet would take the free share, or what others wait to use."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error is about this machine's disk or descriptors, not about the file at hand."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


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
        self._told: set[str] = set()
        self._notes: Notes | None = None
        self._evictor = Evictor(directory, min_free_bytes)
        self._places = Places(directory, storage.root)

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
        """Where a file lies once it is here, unless another one is in the way."""
        return self._places.first(info)

    def note(self, files: FileList) -> None:
        """Note in shared memory which files are in use, where all who could evict share it.

        Args:
            files: The list that the cache is for.
        """
        if not self._remake:
            place = self._places.place
            self._notes = Notes(self._directory, len(files), lambda file: place(files.name(file)))
            self._evictor.spare(self._notes.begin_evictions)

    def row(self) -> Row | None:
        """A row for the notes of one stream; None where files are locked."""
        return None if self._notes is None else self._notes.row()

    def find(self, info: FileInfo, *, ahead: bool = False) -> Lease | None:
        """A lease of a file that is here; ``ahead`` as of :meth:`fetch`."""
        first = lease_if_whole(self._places.first(info), info, ahead=ahead)
        return first or lease_if_whole(self._places.second(info), info, ahead=ahead)

    def has(self, info: FileInfo) -> bool:
        """Whether a file is here at this moment; nothing keeps it from going."""
        return is_whole(self._places.first(info), info) or is_whole(self._places.second(info), info)

    def is_in_place(self, info: FileInfo) -> bool:
        """Whether a file is here, in the place that is its own."""
        return is_whole(self._places.first(info), info)

    def fetch(self, info: FileInfo, *, ahead: bool = False) -> Lease:
        """Have a file here.

        Args:
            info: The file.
            ahead: Whether it is not needed yet. Then it takes no room from others that wait to be
                used, none of the free share, and gives its own to one that is needed: ``use()``
                tells whether it is still there. Where there is no room, that is an error at once.

        Raises:
            StorageError: It cannot be downloaded, or the disk is full and it lies nowhere that it
                could be read from instead.
            OSError: A file that is not needed yet finds no room (see ``is_shortage``).
        """
        remade, deadline = False, time.monotonic() + _WAIT_S
        while True:
            try:
                lease = self._fetch_once(info, ahead, deadline)
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

    def progress(self, info: FileInfo) -> tuple[int, int]:
        """What changes whenever a byte of a file that is being downloaded is written."""
        try:
            status = os.stat(self._places.part(info))
        except OSError:
            return 0, 0
        # A second reading writes what is there already: its bytes show in the time only.
        return status.st_blocks, status.st_mtime_ns

    def stalled(self, info: FileInfo, seconds: float) -> StorageError:
        """The error for a download that stands still."""
        ours = StorageError(
            f"Could not download {volume_path.join(self.storage.root, info.name)}: no byte of it "
            f"came for {seconds:.0f} s. Check that the storage answers (is the mount alive, the "
            "network up?), then run again."
        )
        ours.errno = errno.ETIMEDOUT
        return ours

    def _fetch_once(self, info: FileInfo, ahead: bool, deadline: float) -> Lease | None:
        """Have a file here; None: look again."""
        try:
            lease = self.find(info, ahead=ahead)
            if lease is None and not self._evictor.could_hold(info.size):
                return self._read_through(info, None)
            return lease or self._download(info, ahead)
        except NoRoomError:
            raise
        except OSError as error:
            if isinstance(error, StorageError) or error.errno not in FULL_DISK:
                raise
            if self._evictor.free_up(info.size, ahead=ahead):
                return None
            if self._is_worth_another_look(info.size, ahead, deadline):
                return None
            if ahead:
                raise
            return self._read_through(info, error)

    def _is_worth_another_look(self, size: int, ahead: bool, deadline: float) -> bool:
        """Let downloads end that take the room now; False if there is no point in that."""
        can_read_through = volume_path.local_dir(self.storage.root) is not None
        if ahead or can_read_through or time.monotonic() > deadline:
            return False
        # Not one look alone: what was a part while files were looked at may be a file while parts
        # are, and what was in use may be free a moment later.
        for _ in range(_LOOKS):
            time.sleep(_POLL_S)
            if self._evictor.others_download() or self._evictor.free_up(size):
                return True
        return False

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

    def _download(self, info: FileInfo, ahead: bool) -> Lease | None:
        """Download a file, unless another process did meanwhile: None, look again."""
        part = self._places.part(info)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        pid = os.getpid()
        try:
            if not _lock_or_wait(descriptor) or not is_at(descriptor, part):
                release(descriptor, pid)
                return None
            lease = self.find(info, ahead=ahead)
            if lease is not None:
                os.unlink(part)
                release(descriptor, pid)
                return lease
            return self._fill(info, part, descriptor, ahead)
        except BaseException:
            if is_at(descriptor, part):
                _unlink(part)
            release(descriptor, pid)
            raise

    def _fill(self, info: FileInfo, part: str, descriptor: int, ahead: bool) -> Lease | None:
        if not self._evictor.make_room(info.size, ahead=ahead) and ahead:
            self.tell(
                "The disk of the cache %s has less free than is to be kept (min_free_bytes, %d), "
                "whatever is evicted: files are not read ahead while that is so. Free disk, pass "
                "a cache_dir= on a larger one, or a smaller min_free_bytes=.",
                *(self._directory, self._evictor.min_free_bytes),
            )
            raise NoRoomError(errno.ENOSPC, "no room to read ahead", self._directory)
        with downloading(info.size):
            self.storage.download(info, part)
        came = self._as_it_came(info)
        # Decides which file came first where the kernel's clock is too coarse to tell. In the
        # future, since a reading sets an access time that is older than the last change.
        accessed = time.time_ns() + _LATER_NS
        os.utime(part, ns=(accessed, int(time_of(came) * 1e9)))
        lease = Lease(self._places.publish(part, came), descriptor)
        hold(descriptor, ahead=ahead)
        if os.fstat(descriptor).st_nlink:
            return lease
        lease.close()  # evicted while one lock turned into the other
        return None

    def _as_it_came(self, info: FileInfo) -> FileInfo:
        """The version that came: a newer one must not be found as the listed one later."""
        reported = self.storage.reported.pop(info.name, None)
        if reported is None or not time_of(info):  # without a time versions cannot be told apart
            return info
        try:
            found = self.storage.stat(info.name)
        except OSError:
            return info._replace(mtime=reported)
        if found.size != info.size:  # changed once more since
            return info._replace(mtime=reported)
        # A store may always tell one time in listings and another of open files, and stores round.
        newer = abs(found.mtime - info.mtime) >= _ROUNDED_S
        return info._replace(mtime=found.mtime) if newer else info

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
        self.tell(
            "The disk of the cache %s has no room for %s (%d bytes), whatever is evicted: reading "
            "it from the volume itself. Pass a cache_dir= on a larger disk. Further files of this "
            "dataset are logged at level DEBUG.",
            *(self._directory, path, info.size),
        )
        return Lease(f"{directory}/{info.name}")

    def tell(self, text: str, *values: object) -> None:
        """Warn once; what is told again goes to the debug log."""
        level = logging.DEBUG if text in self._told else logging.WARNING
        self._told.add(text)
        _logger.log(level, text, *values)


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


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
