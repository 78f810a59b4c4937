"""Manifests: a file list kept in a file, so that a dataset need not list its directory.

Layout, little-endian::

    magic          "AIRLIST" and a line feed
    header length  8 bytes
    header         JSON: version, root, pattern, count, names_bytes, fingerprint, checksum, ...
    name lengths   4 bytes each
    sizes          8 bytes each, -1 where it is not known
    times          8 bytes each, a float; not a number where it is not known
    names          one after another, sorted by their bytes

Reading checks, in this order: magic, version, header, length, checksum, names, fingerprint. Nothing
in it is run, and no name in it leaves the dataset's directory.
"""

import hashlib
import json
import logging
import operator
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from air_lightning.data.listing import FileList, compile_pattern, list_all, select
from air_lightning.errors import InvalidArgumentError, ManifestError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import UNKNOWN_SIZE, Listing, Storage
from air_lightning.volumes.storage import open_storage

_logger = logging.getLogger("air_lightning")

VERSION = 1
_MAGIC = b"AIRLIST\n"
_LENGTH = struct.Struct("<Q")
_BYTES_PER_FILE = 4 + 8 + 8
_LATEST = 1e12  # seconds: in 30,000 years
# Between separators that no name can hold: an absolute name, an empty segment, "." and "..".
_BAD = (
    *(b"//", b"\0/", b"/\0", b"\0\0"),
    *(b"/./", b"\0./", b"/.\0", b"\0.\0"),
    *(b"/../", b"\0../", b"/..\0", b"\0..\0"),
)
_REMEDY = "Write it anew with air-lightning manifest PATH OUT."


def write_manifest(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    pattern: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """List a directory and keep the list, sizes and times included, in a file.

    Args:
        path: The directory: a volume path, an fsspec URL or a local path.
        out: The file to write: a volume path, an fsspec URL or a local path. It appears whole or
            not at all. Below ``path`` its name must begin with a dot, or be below a directory whose
            name does: it would be listed as a file to train on by whoever uses no manifest.
        pattern: Glob on the relative path, as of ``UCVolumeDataset``.
        storage_options: For fsspec URLs, passed to the file system.

    Returns:
        How many files it lists.

    Raises:
        InvalidArgumentError: An argument cannot work; InvalidPathError for a path.
        EmptyVolumeError: There is no file, or none that matches the pattern.
        StorageError: The directory cannot be listed, or the file not written.
    """
    if pattern is not None:
        compile_pattern(pattern)
    target, name = _locate(out, "out")
    storage = open_storage(path, allow_local=True, storage_options=storage_options)
    destination = _open(target, storage.root, storage_options)
    _require_not_listed(_below(storage.root, volume_path.join(target, name)), name)
    files = select(list_all(storage, sizes=True), pattern, storage.root)
    with destination.open_write(name) as file:
        for part in pack(files, {"root": storage.root, "pattern": pattern}):
            file.write(part)
    return len(files)


def read_manifest(
    manifest: str | os.PathLike[str],
    root: str,
    *,
    pattern: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FileList:
    """The file list of a manifest, for a dataset of this root.

    Raises:
        ManifestError: There is no such file, or it is no sound manifest.
        EmptyVolumeError: No file of it matches the pattern.
        StorageError: It cannot be read.
    """
    parent, name = _locate(manifest, "manifest")
    where = volume_path.join(parent, name)
    try:
        data = _open(parent, root, storage_options).read_bytes(name)
    except FileNotFoundError as error:
        raise ManifestError(
            f"manifest={where!r} was given, and there is no such file. Check the path, or write "
            f"one with air-lightning manifest {root} {where}."
        ) from error
    header, listing = unpack(data, where)
    if _place(header["root"]) != _place(root):
        _logger.warning(
            "The manifest %s was written for %s and is used for %s: the files must have the same "
            "names and sizes there.",
            *(where, header["root"], root),
        )
    return select(listing, pattern, f"{root} in the manifest {where}")


def pack(files: FileList, facts: Mapping[str, Any]) -> list[bytes]:
    """The bytes of a manifest, in parts; ``facts`` are what the header says beside its own."""
    names, lengths, (sizes, mtimes) = files.packed()
    parts = [
        lengths.astype("<u4").tobytes(),
        sizes.astype("<i8").tobytes(),
        mtimes.astype("<f8").tobytes(),
        names,
    ]
    header = {
        "version": VERSION,
        **facts,
        "count": len(files),
        "names_bytes": len(names),
        "fingerprint": files.fingerprint,
        "checksum": _checksum(parts),
    }
    text = json.dumps(header).encode()
    return [_MAGIC, _LENGTH.pack(len(text)), text, *parts]


def unpack(data: bytes, where: str) -> tuple[dict[str, Any], Listing]:
    """The header of a manifest and what it lists.

    Raises:
        ManifestError: It is not sound.
    """
    header, start = _header(data, where)
    count, names_bytes = header["count"], header["names_bytes"]
    wanted = start + count * _BYTES_PER_FILE + names_bytes
    if len(data) != wanted:
        raise ManifestError(
            f"{where} has {len(data)} bytes, and its header tells of {wanted}: it is cut short or "
            f"not the file that was written. {_REMEDY}"
        )
    if _checksum([memoryview(data)[start:]]) != header["checksum"]:
        raise ManifestError(
            f"{where} does not have the checksum that its header tells of: it was altered. "
            f"{_REMEDY}"
        )
    listing = _listing(data, start, count)
    if sum(map(len, listing.names)) != names_bytes:
        raise _malformed(where, "the lengths of its names do not add up")
    _check_names(listing.names, where)
    _check_facts(listing, where)
    if FileList(listing.names).fingerprint != header["fingerprint"]:
        raise ManifestError(
            f"{where} does not have the fingerprint that its header tells of: it was altered. "
            f"{_REMEDY}"
        )
    return header, listing


def _header(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    """The checked header, and where the lists begin."""
    start = len(_MAGIC) + _LENGTH.size
    if len(data) < start or not data.startswith(_MAGIC):
        raise ManifestError(f"{where} is no manifest (it begins {data[:8]!r}). {_REMEDY}")
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    try:
        header = json.loads(data[start : start + length])
        version = header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _malformed(where, f"{type(error).__name__}: {error}") from error
    if version != VERSION:
        raise ManifestError(
            f"{where} has version {version!r}; this release reads version {VERSION}. Write it anew "
            "with this release, or read it with the one that wrote it."
        )
    for key in ("root", "fingerprint", "checksum"):
        if not isinstance(header.get(key), str):
            raise _malformed(where, f"{key}={header.get(key)!r}")
    for key in ("count", "names_bytes"):
        number = header.get(key)
        if type(number) is not int or number < 0:
            raise _malformed(where, f"{key}={number!r}")
    return header, start + length


def _malformed(where: str, what: str) -> ManifestError:
    return ManifestError(f"The header of {where} is malformed ({what}). {_REMEDY}")


def _listing(data: bytes, start: int, count: int) -> Listing:
    lengths = np.frombuffer(data, "<u4", count, start)
    sizes = np.frombuffer(data, "<i8", count, start + 4 * count)
    mtimes = np.frombuffer(data, "<f8", count, start + 12 * count)
    begin = start + _BYTES_PER_FILE * count
    ends = begin + np.cumsum(lengths, dtype=np.int64)
    bounds = [begin, *ends.tolist()]
    return Listing([data[a:b] for a, b in pairwise(bounds)], sizes.tolist(), mtimes.tolist())


def _check_names(names: Sequence[bytes], where: str) -> None:
    joined = b"\0".join([b"", *names, b""])
    if joined.count(b"\0") != len(names) + 1:
        raise ManifestError(f"{where} lists a name with a NUL byte. {_REMEDY}")
    if names and any(bad in joined for bad in _BAD):
        first = next(name for name in names if any(bad in b"\0%b\0" % name for bad in _BAD))
        raise ManifestError(
            f"{where} lists {os.fsdecode(first)!r}; wanted are relative paths without '..', '.' or "
            f"empty segments. {_REMEDY}"
        )
    if not all(map(operator.lt, names, names[1:])):
        raise ManifestError(f"The names in {where} are not sorted, or one comes twice. {_REMEDY}")


def _check_facts(listing: Listing, where: str) -> None:
    sizes, mtimes = np.asarray(listing.sizes), np.asarray(listing.mtimes)
    # Not a number is a time that is not known; what no clock tells could not be given to a file.
    odd = (sizes < UNKNOWN_SIZE) | (np.abs(np.nan_to_num(mtimes, posinf=np.inf)) > _LATEST)
    if odd.any():
        first = int(np.argmax(odd))
        raise ManifestError(
            f"{where} lists {os.fsdecode(listing.names[first])!r} with {sizes[first]} bytes and "
            f"the time {mtimes[first]}; wanted are a size from 0 on, and seconds since 1970. "
            f"{_REMEDY}"
        )


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _locate(path: str | os.PathLike[str], option: str) -> tuple[str, str]:
    """The directory of a file, and its name there."""
    whole = volume_path.normalize(path, allow_local=True)
    name = volume_path.name(whole)
    if not name:
        raise InvalidArgumentError(f"{option}={path!r} was given; wanted is the path of a file.")
    return volume_path.parent(whole), name


def _open(parent: str, root: str, options: Mapping[str, Any] | None) -> Storage:
    """The manifest's directory; the dataset's options are for its own kind of store."""
    same = parent.partition("://")[0] == root.partition("://")[0]
    return open_storage(
        parent, allow_local=True, storage_options=dict(options or {}) if same else None
    )


def _place(root: str) -> str:
    return root.removeprefix("file://")


def _require_not_listed(name: str, own: str) -> None:
    if name and not any(segment.startswith(".") for segment in name.split("/")):
        raise InvalidArgumentError(
            f"out={name!r} was given, below the directory that is listed: datasets without a "
            f"manifest would take it for a file to train on. Call it .{own}, or write it elsewhere."
        )


def _below(root: str, path: str) -> str:
    """The name of a path relative to a root; empty for one that is not below it."""
    root, path = _place(root), _place(path)
    prefix = root if root.endswith("/") else f"{root}/"
    return path.removeprefix(prefix) if path.startswith(prefix) else ""
