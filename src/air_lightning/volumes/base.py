"""The surface of storage: what a volume can do for us, and nothing it cannot.

Volumes are object stores behind FUSE: there is no append, no seek while writing, no lock and no
link here, so that nothing above this layer can come to need one.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, NamedTuple, Protocol

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
UNKNOWN_SIZE = -1


class FileInfo(NamedTuple):
    """A file as it was listed.

    Attributes:
        name: Path relative to the storage's root, with ``/`` between segments.
        size: Bytes; ``UNKNOWN_SIZE`` where a listing did not tell.
        mtime: Seconds since the epoch; 0.0 where the store does not say.
    """

    name: str
    size: int
    mtime: float


class Listing:
    """What was listed: names by their bytes, sorted, and sizes and times where these came too.

    Not a FileInfo per file, which for a million files would be most of the memory; iterating
    makes them.

    Args:
        names: Relative paths, as the system's bytes.
        sizes: Bytes of each, or None where they are not known.
        mtimes: The time of each, or None.
    """

    def __init__(
        self,
        names: Sequence[bytes],
        sizes: Sequence[int] | None = None,
        mtimes: Sequence[float] | None = None,
    ) -> None:
        self.names = names
        self.sizes = sizes
        self.mtimes = mtimes

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[FileInfo]:
        for index, name in enumerate(self.names):
            size = UNKNOWN_SIZE if self.sizes is None else self.sizes[index]
            mtime = 0.0 if self.mtimes is None else self.mtimes[index]
            yield FileInfo(os.fsdecode(name), size, mtime)

    def only(self, wanted: Sequence[int]) -> "Listing":
        """The files of these numbers."""
        return Listing(
            [self.names[index] for index in wanted],
            None if self.sizes is None else [self.sizes[index] for index in wanted],
            None if self.mtimes is None else [self.mtimes[index] for index in wanted],
        )


class Entry(NamedTuple):
    """One name in a directory."""

    name: str
    is_dir: bool


class RangeReader(Protocol):
    """An open file, for one thread, whose bytes go straight to where they are wanted."""

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill ``views``, one after the other, with the bytes from ``offset`` on.

        Returns:
            How many bytes came: fewer than wanted only at the end of the file.
        """


class Storage(Protocol):
    """A directory of a volume, an object store or this machine.

    Transient errors are retried, bounded in time; then they are StorageErrors. A missing file is
    a FileNotFoundError (except in ``download``), a full disk an OSError with its errno.

    Attributes:
        reported: Of files whose download was told another time than the listed one, that time. It
            may be a newer version, or what this store tells of every open file.
    """

    reported: dict[str, float]

    @property
    def root(self) -> str:
        """The normalized path, as users see it."""

    def list_files(self, *, sizes: bool = False) -> Listing:
        """All files below the root, recursively, without dot-files, sorted by their names' bytes.

        Args:
            sizes: Whether sizes and times are wanted in any case. On a mount they cost a round trip
                per file; without, there are none. Object stores give them for nothing.
        """

    def list_dir(self, name: str = "", *, limit: int | None = None) -> list[Entry]:
        """One level, dot-files included, sorted; FileNotFoundError for a missing directory.

        Args:
            name: Of the directory, below the root.
            limit: At most so many entries, whichever come first.
        """

    def stat(self, name: str) -> FileInfo:
        """Size and time of one file."""

    def exists(self, name: str) -> bool:
        """Whether there is a file or directory of that name."""

    def read_bytes(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from ``offset``, ``length`` of them at most."""

    def open_read(self, name: str) -> BinaryIO:
        """A buffered, seekable reader."""

    def open_ranges(self, name: str) -> AbstractContextManager[RangeReader]:
        """A reader of parts of a file; the file is opened at the first read."""

    def download(self, info: FileInfo, destination: str) -> int:
        """Copy a listed file to a local path, overwriting it; returns its bytes.

        What comes is one version of the file, as long as listed: see
        :mod:`~air_lightning.volumes.transfer`.

        Raises:
            FileVanishedError: The file is gone.
            FileChangedError: It does not have ``info.size`` bytes, or goes on changing.
            StorageError: It cannot be read, retries included.
        """

    def open_write(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A writer whose file appears under its name, whole, at the block's clean end only.

        One that has ``write_views(views)`` takes many pieces of memory in one request.
        """

    def write_bytes(self, name: str, data: bytes) -> None:
        """Publish a file of these bytes, whole or not at all; transient errors are retried."""

    def make_root(self) -> None:
        """Create the root directory and its parents where they are missing."""

    def free_bytes(self) -> int | None:
        """Bytes that fit below the root; None where the store does not say, or says zero."""

    def remove(self, name: str) -> None:
        """Delete a file; a missing one is fine."""

    def remove_tree(self, name: str = "") -> None:
        """Delete a directory and all below it; a missing one is fine."""
