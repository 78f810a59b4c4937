"""The list of a dataset's files: taken once, packed, fingerprinted.

Names lie one after another in one ``bytes``, with an array of offsets. Forked workers share these
pages for good; a list of ``str`` would be copied into each of them by its reference counts alone
(216 MB a worker for two million files).
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from air_lightning.errors import EmptyVolumeError, InvalidArgumentError
from air_lightning.volumes.base import FileInfo, Storage


class FileList:
    """Files by number, in the order of their names.

    Args:
        files: The files, sorted as they are to be numbered.
    """

    def __init__(self, files: Sequence[FileInfo]) -> None:
        names = [_encode(info.name) for info in files]
        self._names = b"".join(names)
        self._offsets = np.zeros(len(names) + 1, dtype=np.int64)
        np.cumsum([len(name) for name in names], out=self._offsets[1:])
        self._sizes = np.array([info.size for info in files], dtype=np.int64)
        self._mtimes = np.array([info.mtime for info in files], dtype=np.float64)
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> FileInfo:
        start, end = self._offsets[index], self._offsets[index + 1]
        name = self._names[start:end].decode("utf-8", "surrogateescape")
        return FileInfo(name, int(self._sizes[index]), float(self._mtimes[index]))

    def _fingerprint(self) -> str:
        """Hash of names and sizes. Not of times: a copy of the same files is the same list."""
        digest = hashlib.blake2b(self._names, digest_size=16)
        digest.update(self._offsets.astype("<i8").tobytes())
        digest.update(self._sizes.astype("<i8").tobytes())
        return digest.hexdigest()


def take_listing(storage: Storage, pattern: str | None) -> FileList:
    """List a dataset's files.

    Args:
        storage: The directory.
        pattern: Glob on the relative path, or None for all files.

    Raises:
        EmptyVolumeError: There is no such directory, no file in it, or none that matches.
    """
    try:
        files = storage.list_files()
    except FileNotFoundError as error:
        raise EmptyVolumeError(
            f"{storage.root} does not exist, so there is no file to train on. Check the path "
            "(catalog, schema, volume and directory), and that this user may see it."
        ) from error
    if pattern is None:
        kept = files
    else:
        matches = compile_pattern(pattern)
        kept = [info for info in files if matches.fullmatch(info.name)]
    if not kept:
        raise _empty(storage.root, pattern, files)
    return FileList(kept)


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


def _empty(root: str, pattern: str | None, files: Sequence[FileInfo]) -> EmptyVolumeError:
    if pattern is None:
        return EmptyVolumeError(
            f"{root} holds no file (pattern=None; dot-files are left out), so there is nothing to "
            "train on. Check the path, and that the files have been written."
        )
    example = f", e.g. {files[0].name!r}" if files else ""
    return EmptyVolumeError(
        f"No file below {root} matches pattern={pattern!r}: there are {len(files)} files{example}. "
        "Check the path, and that the pattern is a glob on the relative path."
    )


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
