"""The list of a dataset's files: taken once, packed, fingerprinted.

Names lie one after another in one ``bytes``, with an array of offsets. Forked workers share these
pages for good; a list of ``str`` would be copied into each of them by its reference counts alone
(216 MB a worker for two million files).

A listing of a mount does not tell sizes and times. They are asked file by file when a file is about
to be fetched, and lie in memory that forked workers write together: what one learns, all know.
"""

import hashlib
import mmap
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from air_lightning.errors import EmptyVolumeError, InvalidArgumentError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import UNKNOWN_SIZE, FileInfo, Listing, Storage
from air_lightning.volumes.transfer import vanished


class FileList:
    """Files by number, in the order of their names.

    Args:
        names: The relative paths as bytes, in the order in which they are to be numbered.
        sizes: Bytes of each, ``UNKNOWN_SIZE`` for one that is not known; None if none is.
        mtimes: The time of each, or None.
    """

    def __init__(
        self,
        names: Sequence[bytes],
        sizes: Sequence[int] | npt.NDArray[np.int64] | None = None,
        mtimes: Sequence[float] | npt.NDArray[np.float64] | None = None,
    ) -> None:
        count = len(names)
        self._names = b"".join(names)
        self._offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, names), np.int64, count), out=self._offsets[1:])
        # Anonymous and shared: a page that a worker writes is not copied, the others see it.
        memory = mmap.mmap(-1, max(1, 16 * count))
        self._sizes = np.frombuffer(memory, np.int64, count)
        self._mtimes = np.frombuffer(memory, np.float64, count, offset=8 * count)
        self._sizes[:] = UNKNOWN_SIZE if sizes is None else sizes
        self._mtimes[:] = np.nan if mtimes is None else mtimes
        # Views that give Python's own numbers: NumPy's cost more than the rest of a look-up.
        self._spans = self._offsets.data
        self._known = self._sizes.data, self._mtimes.data
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> FileInfo:
        sizes, mtimes = self._known
        size, mtime = sizes[index], mtimes[index]
        if size == UNKNOWN_SIZE or mtime != mtime:  # noqa: PLR0124 - not a number: not yet written
            return FileInfo(self.name(index), UNKNOWN_SIZE, 0.0)
        return FileInfo(self.name(index), size, mtime)

    def __deepcopy__(self, memo: object) -> "FileList":
        return self  # the same files, whoever knows their sizes first

    def name(self, index: int) -> str:
        """The relative path of a file."""
        start, end = self._spans[index], self._spans[index + 1]
        return self._names[start:end].decode("utf-8", "surrogateescape")

    def complete(self, index: int, storage: Storage) -> FileInfo:
        """A file with its size and time, which are asked for where they are not known yet.

        Raises:
            FileVanishedError: The file is gone.
            StorageError: It cannot be asked for, retries included, or its store tells no size.
        """
        info = self[index]
        if info.size != UNKNOWN_SIZE:
            return info
        try:
            found = storage.stat(info.name)
        except FileNotFoundError as error:
            raise vanished(volume_path.join(storage.root, info.name)) from error
        if found.size == UNKNOWN_SIZE:
            raise StorageError(
                f"{volume_path.join(storage.root, info.name)} has no size: its store tells none, "
                "and without one a file that came whole cannot be told from a part of it. Copy the "
                "files to a volume or an object store."
            )
        # The time first: whoever sees the size in another process must not miss it.
        self._mtimes[index] = found.mtime
        self._sizes[index] = found.size
        return found

    def packed(self) -> tuple[bytes, npt.NDArray[np.int64], list[npt.NDArray[np.generic]]]:
        """The names, their lengths, and sizes and times as they are known now."""
        return self._names, np.diff(self._offsets), [self._sizes.copy(), self._mtimes.copy()]

    def _fingerprint(self) -> str:
        """Hash of the names: sizes may not be known yet, and a copy is the same list."""
        digest = hashlib.blake2b(self._names, digest_size=16)
        digest.update(self._offsets.astype("<i8").tobytes())
        return digest.hexdigest()


def take_listing(storage: Storage, pattern: str | None, *, sizes: bool = False) -> FileList:
    """List a dataset's files.

    Args:
        storage: The directory.
        pattern: Glob on the relative path, or None for all files.
        sizes: Whether sizes and times are wanted at once.

    Raises:
        EmptyVolumeError: There is no such directory, no file in it, or none that matches.
    """
    return select(list_all(storage, sizes=sizes), pattern, storage.root)


def list_all(storage: Storage, *, sizes: bool = False) -> Listing:
    """All files of a directory, with their sizes and times if these are wanted.

    Raises:
        EmptyVolumeError: There is no such directory.
    """
    try:
        return storage.list_files(sizes=sizes)
    except FileNotFoundError as error:
        raise EmptyVolumeError(
            f"{storage.root} does not exist, so there is no file to train on. Check the path "
            "(catalog, schema, volume and directory), and that this user may see it."
        ) from error


def select(files: Listing, pattern: str | None, where: str) -> FileList:
    """The files that match a pattern, packed.

    Raises:
        EmptyVolumeError: There is none.
    """
    kept = files if pattern is None else files.only(_matching(files.names, pattern))
    if not kept.names:
        raise _empty(where, pattern, files)
    return FileList(kept.names, kept.sizes, kept.mtimes)


def _matching(names: Sequence[bytes], pattern: str) -> list[int]:
    matches = compile_pattern(pattern).fullmatch
    decoded = (name.decode("utf-8", "surrogateescape") for name in names)
    return [index for index, name in enumerate(decoded) if matches(name)]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a glob on relative paths.

    ``*``, ``?`` and ``[...]`` stay within a segment, ``**`` spans any number of them. A pattern
    without a slash is about the file's own name, at any depth.

    Raises:
        InvalidArgumentError: It is not a str, is empty, starts with a slash, or has a range that
            runs backwards.
    """
    if not isinstance(pattern, str) or not pattern or pattern.startswith("/"):
        raise InvalidArgumentError(
            f"pattern={pattern!r} was given; wanted is a glob on the path relative to the "
            'dataset\'s, as "*.png" or "train/**/*.png".'
        )
    segments = pattern.split("/") if "/" in pattern else ["**", pattern]
    parts = [_segment(segment) for segment in segments[:-1]]
    last = "(?:[^/]+/)*[^/]+" if segments[-1] == "**" else _translate(segments[-1])
    try:
        return re.compile("".join(parts) + last, re.DOTALL)
    except re.error as error:
        raise InvalidArgumentError(
            f"pattern={pattern!r} was given, which is no glob ({error.msg}); wanted is one as "
            '"*.png" or "[a-f]*.png", with ranges from the lower to the higher character.'
        ) from error


def _segment(segment: str) -> str:
    return "(?:[^/]+/)*" if segment == "**" else _translate(segment) + "/"


def _translate(segment: str) -> str:
    def part(match: re.Match[str]) -> str:
        glyph = match[0]
        if glyph in ("*", "**"):
            return "[^/]*"
        if glyph == "?":
            return "[^/]"
        if len(glyph) > 1:
            negated, body = glyph[1] == "!", glyph[1:-1].lstrip("!").replace("\\", "\\\\")
            return f"(?!/)[{'^' if negated else ''}{body}]"
        return re.escape(glyph)

    return re.sub(r"\*+|\?|\[!?[^\]/]+\]|.", part, segment, flags=re.DOTALL)


def _empty(root: str, pattern: str | None, files: Listing) -> EmptyVolumeError:
    if pattern is None:
        return EmptyVolumeError(
            f"{root} holds no file (pattern=None; dot-files are left out), so there is nothing to "
            "train on. Check the path, and that the files have been written."
        )
    example = next((f", e.g. {info.name!r}" for info in files), "")
    return EmptyVolumeError(
        f"No file below {root} matches pattern={pattern!r}: there are {len(files)} files{example}. "
        "Check the path, and that the pattern is a glob on the relative path."
    )
