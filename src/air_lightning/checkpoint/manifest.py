"""What a checkpoint directory holds, and the manifest that says so.

The manifest is written after the shards and before ``.metadata``: a reader that finds
``.metadata`` can hold every shard against the size and checksum that its writer computed.
"""

import contextlib
import errno
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from air_lightning.errors import CorruptCheckpointError
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import Storage

METADATA = ".metadata"
MANIFEST = "air_manifest.json"
FORMAT_VERSION = 1
SHARD_SUFFIX = ".distcp"
_REMEDY = " Resume from another checkpoint: find_latest_valid(root) names the newest sound one."

_FINAL = r"(?:__\d+_\d+\.distcp|(?:__\d+)?\.metadata(?:\.tmp)?|air_manifest\.json)"
_OF_A_SAVE = re.compile(rf"{_FINAL}|\.{_FINAL}\..+\.tmp")  # storage's temporary name, too
_STEP_IN_NAME = re.compile(r"step[=_-]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_SUFFIX_OF_TAKEN_NAME = re.compile(r"-v\d+(?=$|\.)")


class FileRecord(NamedTuple):
    """Size in bytes and checksum (``algorithm:hex``, or None when not known) of one file."""

    size: int
    checksum: str | None


class Checksum:
    """A running CRC-32: the cheapest of the standard library (6 GB/s here, BLAKE2b 1.3).

    It is there to find damage, not attackers, who would change the manifest as well.
    """

    algorithm = "crc32"

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece of the file."""
        self._value = zlib.crc32(data, self._value)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self._value:08x}"


@dataclass(frozen=True)
class Manifest:
    """The contents of ``air_manifest.json``.

    Attributes:
        files: Every shard's size and checksum, by its name in the directory.
        global_step: The step that was recorded with the save, if any.
        epoch: The epoch that was recorded with the save, if any.
        world_size: Number of ranks that wrote.
        time: Seconds since 1970 (UTC) at the commit.
        versions: Versions of the libraries that wrote.
        weights_only: Whether it holds weights and no state to resume training from.
    """

    files: Mapping[str, FileRecord]
    global_step: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    time: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    weights_only: bool = False

    def to_bytes(self) -> bytes:
        """Return the manifest as indented JSON, for people too."""
        document = {
            "format_version": FORMAT_VERSION,
            "global_step": self.global_step,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "time": None if self.time is None else _utc(self.time),
            "weights_only": self.weights_only,
            "versions": dict(self.versions),
            "files": {name: record._asdict() for name, record in sorted(self.files.items())},
        }
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Parse a manifest.

        Args:
            data: The whole file.
            path: Where it comes from, for messages.

        Raises:
            CorruptCheckpointError: It is no manifest, or one of a later format.
        """
        try:
            document = json.loads(data)
            version = document["format_version"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _not_manifest(path, len(data), repr(error)) from error
        if version != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"{path} has format version {version!r}, and this air_lightning reads "
                f"{FORMAT_VERSION}. Upgrade air_lightning to read this checkpoint."
            )
        try:
            return cls._from_document(document)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _not_manifest(path, len(data), repr(error)) from error

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> "Manifest":
        files = {
            _text(name): FileRecord(_count(record["size"]), _text_or_none(record["checksum"]))
            for name, record in document["files"].items()
        }
        time = _text_or_none(document.get("time"))
        return cls(
            files=files,
            global_step=_count_or_none(document.get("global_step")),
            epoch=_count_or_none(document.get("epoch")),
            world_size=_count_or_none(document.get("world_size")),
            time=None if time is None else datetime.fromisoformat(time).timestamp(),
            weights_only=document.get("weights_only") is True,
            versions={_text(k): _text(v) for k, v in document.get("versions", {}).items()},
        )


def read_manifest(storage: Storage) -> Manifest | None:
    """Return a checkpoint directory's manifest, or None where there is none: plain DCP.

    Raises:
        CorruptCheckpointError: There is one that cannot be read.
    """
    try:
        data = storage.read_bytes(MANIFEST)
    except OSError as error:
        if is_missing(error):
            return None
        raise
    return Manifest.from_bytes(data, f"{storage.root}/{MANIFEST}")


def retire(storage: Storage) -> None:
    """Make a directory no checkpoint any more, and clear it of all that saves leave behind.

    The marker goes first: with it still there, a process killed half-way would leave a directory
    that counts as a checkpoint and lacks files. Foreign files stay.
    """
    storage.remove(METADATA)
    storage.remove(MANIFEST)
    with contextlib.suppress(FileNotFoundError):  # in a bucket, an empty directory is none
        for entry in storage.list_dir():
            if not entry.is_dir and is_ours(entry.name):
                storage.remove(entry.name)


def is_ours(name: str) -> bool:
    """Say whether a file of such a name comes from a save, finished or not, ours or torch's."""
    return _OF_A_SAVE.fullmatch(name) is not None


def is_missing(error: OSError) -> bool:
    """Say whether there is no such file; below a file, storage says ENOTDIR."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ENOTDIR


def step_in_name(path: str) -> int | None:
    """Return the step that a directory's name tells: after ``step``, else its last number.

    ``step_1000`` and ``epoch=1-step=200.ckpt`` give 1000 and 200; ``best`` and Lightning's name
    for a second one, ``best-v1``, give None.
    """
    name = _SUFFIX_OF_TAKEN_NAME.sub("", paths.name(path))
    found = _STEP_IN_NAME.findall(name) or _NUMBER.findall(name)
    return int(found[-1]) if found else None


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _count_or_none(value: Any) -> int | None:
    return None if value is None else _count(value)


def _not_manifest(path: str, size: int, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} ({size} bytes) is no checkpoint manifest: {found}.{_REMEDY}"
    )


def problem(error: Exception) -> str:
    """What an error says, for the middle of a sentence: without the remedy, which follows there."""
    return str(error).removesuffix(_REMEDY).rstrip(".")
