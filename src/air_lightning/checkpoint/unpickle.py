"""Reading pickles of a volume without running what they say: the promise of this module.

Whoever can write to a volume could otherwise run code wherever a checkpoint is read: ``.metadata``
is a raw pickle, and DCP's default planner loads byte items with ``weights_only=False``.

``.metadata``: by an unpickler of its own (``unpickler.py``), which imports nothing and makes no
more of the bytes than their size; then the result's shape is checked. Blobs: refused where they
would grow in memory, or claim tensors beyond their bytes; then ``torch.load(weights_only=True)``,
unless the caller says otherwise.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.serialization import get_unsafe_globals_in_checkpoint

from air_lightning.checkpoint.proportion import DisproportionError, require_shallow
from air_lightning.checkpoint.records import require_backed
from air_lightning.checkpoint.unpickler import METADATA_CLASSES, MetadataUnpickler
from air_lightning.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError

_ARCHIVE = b"PK\3\4"  # how torch.load, too, tells its archives from its older format


def load_metadata(data: bytes, *, path: str = ".metadata") -> Metadata:
    """Read a DCP ``.metadata`` file's bytes without importing or calling anything foreign.

    Args:
        data: The whole file.
        path: Where the bytes come from, for messages.

    Returns:
        The metadata, its parts checked to be of the types that DCP uses.

    Raises:
        UnsafeCheckpointError: The pickle names a global that DCP metadata does not need.
        CorruptCheckpointError: The bytes are no DCP metadata.
    """
    try:
        with _classes_unchanged(path):
            loaded = MetadataUnpickler(data, path).load()
    except CheckpointError:
        raise
    except Exception as error:  # garbage makes a pickle raise anything
        raise _not_metadata(path, len(data), f"{type(error).__name__}: {error}") from error
    problem = _shape_problem(loaded)
    if problem:
        raise _not_metadata(path, len(data), problem)
    return cast("Metadata", loaded)


def load_blob(
    data: bytes | BinaryIO, *, weights_only: bool | None = True, path: str = "a checkpoint entry"
) -> Any:
    """Load an object that ``torch.save`` wrote, tensors on the CPU.

    Args:
        data: The bytes, or a seekable stream at the object's start.
        weights_only: As of ``torch.load``; None means True. False runs what the pickle says.
        path: Where the bytes come from, for messages.

    Raises:
        UnsafeCheckpointError: The object needs more than plain values and tensors.
        CorruptCheckpointError: The bytes are not a file of ``torch.save``.
    """
    stream = io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
    start = stream.tell()
    safe = weights_only is not False
    _require_plain(stream, path, safe=safe)
    stream.seek(start)
    try:
        return torch.load(stream, map_location="cpu", weights_only=safe)
    except Exception as error:  # garbage makes torch.load raise anything
        stream.seek(start)
        raise _blob_error(stream.read(), error, safe, path) from error


def _require_plain(stream: BinaryIO, path: str, *, safe: bool) -> None:
    """Refuse an archive that would grow in memory: compressed, or of the same bytes many times.

    With ``safe`` also one whose tuples are nested so deep that hashing one ends the process, and
    one whose tensors are larger than their bytes.

    torch.save writes none, but torch.load reads them, and a few MB can be made to hold more
    than any memory. Nor is an archive loaded that only torch can read: nobody would have looked.
    """
    start = stream.tell()
    is_archive = stream.read(len(_ARCHIVE)) == _ARCHIVE
    held = stream.seek(0, io.SEEK_END) - start
    stream.seek(start)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            grown = sum(record.file_size for record in records)
            if safe and grown <= held:
                _require_harmless(archive, path, held)
    except CheckpointError:
        raise
    except Exception as error:  # garbage makes zipfile raise anything
        if is_archive:
            raise _not_saved(path, held, error) from error
        return  # an older format, or none, and torch says so
    if grown > held:
        raise UnsafeCheckpointError(
            f"{path} would grow from {held} to {grown} bytes in memory; torch.save writes nothing "
            "like it. Nothing of it was loaded. Do not use this checkpoint unless you know who "
            "made it."
        )


def _require_harmless(archive: zipfile.ZipFile, path: str, size: int) -> None:
    for record in archive.infolist():
        if not record.filename.endswith("data.pkl"):
            continue
        with archive.open(record) as file:
            file._expected_crc = None  # type: ignore[attr-defined] # torch may leave it out
            data = file.read()
        try:
            is_whole = require_shallow(data)
        except DisproportionError as error:
            raise UnsafeCheckpointError(
                f"{path} would end this process when loaded: {error}. Do not use this checkpoint "
                "unless you know who made it."
            ) from error
        if not is_whole:
            return
        try:
            require_backed(data, archive.infolist())
        except Exception as error:  # garbage makes a pickle raise anything
            raise _not_saved(path, size, error) from error


@contextmanager
def _classes_unchanged(path: str) -> Iterator[None]:
    """Undo and report attributes that the pickle set on torch's classes themselves.

    The BUILD opcode sets attributes on any object on the stack, a class of ours included: a
    ``__setstate__`` smuggled in so would outlive this load.
    """
    before = {cls: _attributes(cls) for cls in METADATA_CLASSES.values()}
    try:
        yield
    finally:
        changed = [cls.__name__ for cls, attributes in before.items() if _restore(cls, attributes)]
    if changed:
        raise UnsafeCheckpointError(
            f"{path} tried to change torch's own classes {', '.join(changed)}; they were put back. "
            "Do not use this checkpoint: it was made to attack its readers."
        )


def _attributes(cls: type) -> dict[str, Any]:
    # Python fills in the annotations of a class at their first use, whoever asks.
    return {name: value for name, value in vars(cls).items() if not name.startswith("__annot")}


def _restore(cls: type, attributes: dict[str, Any]) -> bool:
    now = _attributes(cls)
    for name in now.keys() - attributes.keys():
        delattr(cls, name)
    altered = [name for name, value in attributes.items() if now.get(name) is not value]
    for name in altered:
        setattr(cls, name, attributes[name])
    return bool(altered) or now.keys() != attributes.keys()


def _shape_problem(loaded: Any) -> str | None:
    """Say what is not as DCP writes it: later code would trip over it far from the cause."""
    if type(loaded) is not Metadata:
        return f"it holds a {type(loaded).__name__}"
    entries = getattr(loaded, "state_dict_metadata", None)
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.items())):
        return "its table of entries is not one"
    storage = getattr(loaded, "storage_data", None)
    if not isinstance(storage, dict) or not all(map(_is_location, storage.items())):
        return "its table of places is not one"
    return None


def _is_entry(item: tuple[Any, Any]) -> bool:
    key, value = item
    if type(key) is not str:
        return False
    if type(value) is BytesStorageMetadata:
        return True
    return (
        type(value) is TensorStorageMetadata
        and _is_shape(getattr(value, "size", None))
        and isinstance(getattr(value, "properties", None), metadata.TensorProperties)
        and all(map(_is_chunk, getattr(value, "chunks", (None,))))
    )


def _is_chunk(chunk: Any) -> bool:
    return type(chunk) is metadata.ChunkStorageMetadata and all(
        _is_shape(getattr(chunk, name, None)) for name in ("offsets", "sizes")
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(length >= 0 for length in value)


def _is_location(item: tuple[Any, Any]) -> bool:
    index, info = item
    return (
        type(index) is MetadataIndex
        and type(info) is filesystem._StorageInfo
        and type(getattr(info, "relative_path", None)) is str
        and type(getattr(info, "offset", None)) is int
        and type(getattr(info, "length", None)) is int
        and info.offset >= 0
        and info.length >= 0
    )


def _not_metadata(path: str, size: int, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} ({size} bytes) is no DCP metadata: {problem}; wanted what "
        "torch.distributed.checkpoint writes. Resume from another checkpoint: "
        "find_latest_valid(root) names the newest sound one."
    )


def _blob_error(data: bytes, error: Exception, safe: bool, path: str) -> CheckpointError:
    unsafe = _unsafe_globals(data) if safe else []
    if unsafe or (safe and _is_archive(data) and isinstance(error, pickle.UnpicklingError)):
        names = ", ".join(unsafe) or "objects that are built while loading"
        return UnsafeCheckpointError(
            f"{path} needs {names}, which weights_only=True does not load. If you trust it: "
            "torch.serialization.add_safe_globals([...]) with these, or weights_only=False, "
            "which runs whatever code the checkpoint holds."
        )
    return _not_saved(path, len(data), error)


def _not_saved(path: str, size: int, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} ({size} bytes) is not what torch.save wrote: {type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else 'no message'}. Delete the .metadata of "
        "this checkpoint, so that it is passed over, and resume from the one before it."
    )


def _unsafe_globals(data: bytes) -> list[str]:
    """Name what a blob would import: by torch for its own archives, by hand for bare pickles."""
    if _is_archive(data):
        try:
            if _is_torchscript(data):
                return ["TorchScript code"]
            return sorted(get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
        except Exception:  # noqa: BLE001 - a damaged archive; the caller reports it as such
            return []
    return sorted(_bare_pickle_globals(data))


def _is_archive(data: bytes) -> bool:
    return data[: len(_ARCHIVE)] == _ARCHIVE


def _is_torchscript(data: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return any(name.endswith("constants.pkl") for name in archive.namelist())


def _bare_pickle_globals(data: bytes) -> set[str]:
    """Name the foreign globals of a file that is one pickle after another (torch before 1.6)."""
    found: set[str] = set()
    stream = io.BytesIO(data)
    try:
        while stream.tell() < len(data):
            found |= _globals_of_one(stream)
    except Exception:  # noqa: BLE001 - genops raises anything on garbage; what came before counts
        return found
    return found


def _globals_of_one(stream: BinaryIO) -> set[str]:
    strings: list[str] = []
    names: list[str] = []
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in {"GLOBAL", "INST"}:
            names.append(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            names.append(".".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return {name for name in names if not name.startswith(("torch.", "collections."))}
