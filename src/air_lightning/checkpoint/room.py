"""Room for a save, asked for before anything is written; and the detour over a local disk.

A full disk found at the end of an upload costs the upload, so the bytes of a plan are held against
the free bytes first, where storage tells them: volumes and object stores do not.

With a staging directory each shard is written there first and then copied to its place. It lies in
a file without a name, which goes with the process, however that ends: there is nothing to sweep.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from torch.distributed.checkpoint.planner import SavePlan

from air_lightning.checkpoint.manifest import is_ours
from air_lightning.checkpoint.shards import PIECE
from air_lightning.checkpoint.staging import LARGE
from air_lightning.errors import InvalidArgumentError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.direct import BLOCK
from air_lightning.volumes.storage import Storage
from air_lightning.volumes.writer import NamedFile

_AROUND = 2048  # bytes that an item takes beside its tensor's, at most


def planned_bytes(plan: SavePlan) -> int:
    """Return how many bytes a rank is to write; objects, whose size no plan tells, not counted."""
    total = 0
    for item in plan.items:
        if item.tensor_data is not None:
            chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
            size = chunk.sizes.numel() * properties.dtype.itemsize
            total += size + _AROUND + (BLOCK if size >= LARGE else 0)
    return total


def require_room(storage: Storage, needed: int) -> None:
    """Refuse a save that will not fit, before the earlier one in its directory is removed.

    Raises:
        StorageError: Names the bytes needed and the bytes free.
    """
    free = storage.free_bytes()
    if free is None or needed <= free:
        return
    free += _reclaimed(storage)
    if needed > free:
        raise no_room(
            f"a save in {storage.root}", needed, free, "Free space there, or save elsewhere."
        )


def _reclaimed(storage: Storage) -> int:
    """Bytes of an earlier save, which this one replaces."""
    try:
        names = [entry.name for entry in storage.list_dir() if not entry.is_dir]
    except FileNotFoundError:
        return 0
    return sum(storage.stat(name).size for name in names if is_ours(name))


class Detour:
    """Shards by way of a directory on the local disk.

    Args:
        directory: The directory; made where it is missing.

    Raises:
        InvalidArgumentError: It is no directory of this machine.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        text = os.fspath(directory)
        if not isinstance(text, str) or not text or "://" in text or text.startswith("/Volumes/"):
            raise InvalidArgumentError(
                f"staging_dir={directory!r} was given; wanted is a directory on this machine's own "
                "disk, as /local_disk0/staging."
            )
        self.directory = volume_path.normalize(text, allow_local=True)

    def prepare(self, needed: int) -> None:
        """See that so many bytes fit.

        Raises:
            StorageError: They do not, or the directory cannot be made.
        """
        try:
            os.makedirs(self.directory, exist_ok=True)
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._unusable(error) from error
        if needed > free:
            remedy = "Free space there, or leave staging_dir out: shards then go up directly."
            raise no_room(f"a save in staging_dir={self.directory}", needed, free, remedy)

    @contextlib.contextmanager
    def open_write(self, storage: Storage, name: str) -> Iterator[BinaryIO]:
        """A writer as ``storage.open_write`` gives it, that fills the local file first."""
        with self._unnamed_file() as file:
            local = NamedFile(file.fileno(), "rb+", f"a shard in staging_dir={self.directory}")
            yield cast("BinaryIO", local)
            local.seek(0)
            with storage.open_write(name) as target:
                while piece := local.read(PIECE):
                    target.write(piece)

    def _unnamed_file(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(dir=self.directory, buffering=0)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StorageError:
        ours = StorageError(
            f"staging_dir={self.directory} cannot be used ({type(error).__name__}: {error}). "
            "Name a directory that this user can create and write, or leave it out."
        )
        ours.errno = error.errno
        return ours


def no_room(what: str, needed: int, free: int, remedy: str) -> StorageError:
    """The error for what does not fit: ``what`` names it and its place."""
    error = StorageError(
        f"No space left for {what}: {free} bytes are free, and it needs {needed}. "
        f"Nothing was written. {remedy}"
    )
    error.errno = errno.ENOSPC
    return error
