"""Reading pickles of a volume without running what they say: the promise of this module.

Whoever can write to a volume could otherwise run code wherever a checkpoint is read: ``.metadata``
is a raw pickle, and DCP's default planner loads byte items with ``weights_only=False``.

``.metadata``: every global is looked up in the table below, never imported; then the result's
shape is checked. Blobs: ``torch.load(weights_only=True)``, unless the caller says otherwise.
"""

import io
import pathlib
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
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

from air_lightning.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError

_METADATA_CLASSES: dict[tuple[str, str], type] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
}
_BUILTINS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}
_PATH_NAMES = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_PATH_MODULES = {"pathlib", "pathlib._local"}  # the second since Python 3.13


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
            loaded = _MetadataUnpickler(io.BytesIO(data), path).load()
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
    try:
        return torch.load(stream, map_location="cpu", weights_only=safe)
    except Exception as error:  # garbage makes torch.load raise anything
        stream.seek(start)
        raise _blob_error(stream.read(), error, safe, path) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Looks globals up in the tables above; never imports."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str, /) -> Any:
        found = _METADATA_CLASSES.get((module, name)) or _BUILTINS.get((module, name))
        if found is None:
            found = _special(module, name)
        if found is None:
            raise UnsafeCheckpointError(
                f"{self._path} names the global {module}.{name}, which DCP metadata does not need; "
                "wanted only torch's own metadata classes. It was not run. If you trust whoever "
                "wrote this checkpoint, convert it with torch's own tools; else delete it."
            )
        return found

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError(f"persistent id {pid!r}")


def _special(module: str, name: str) -> Any:
    """Stand-ins for globals that are too powerful, or differ between machines and versions.

    New functions at each look-up: a pickle can set attributes on whatever it gets here.
    """
    if module == "torch":
        value = vars(torch).get(name)
        return value if isinstance(value, torch.dtype) else None
    if (module, name) == ("torch.serialization", "_get_layout"):
        return _fresh(_layout)
    if (module, name) in {("builtins", "getattr"), ("__builtin__", "getattr")}:
        return _fresh(_enum_member)  # Python 3.11 pickles the member of an Enum so
    if module in _PATH_MODULES and name in _PATH_NAMES:
        windows = "Windows" in name
        return _fresh(pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)
    return None


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    def fresh(*arguments: Any) -> Any:
        return function(*arguments)

    return fresh


def _layout(name: str) -> torch.layout:
    value = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(value, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no torch.layout")
    return value


def _enum_member(cls: type, name: str) -> Enum:
    if cls is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr on {cls!r}")
    return metadata._MEM_FORMAT_ENCODING[name]


@contextmanager
def _classes_unchanged(path: str) -> Iterator[None]:
    """Undo and report attributes that the pickle set on torch's classes themselves.

    The BUILD opcode sets attributes on any object on the stack, a class of ours included: a
    ``__setstate__`` smuggled in so would outlive this load.
    """
    before = {cls: _attributes(cls) for cls in _METADATA_CLASSES.values()}
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
        and isinstance(getattr(value, "size", None), torch.Size)
        and isinstance(getattr(value, "properties", None), metadata.TensorProperties)
        and all(map(_is_chunk, getattr(value, "chunks", (None,))))
    )


def _is_chunk(chunk: Any) -> bool:
    return type(chunk) is metadata.ChunkStorageMetadata and all(
        isinstance(getattr(chunk, name, None), torch.Size) for name in ("offsets", "sizes")
    )


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
    return CorruptCheckpointError(
        f"{path} ({len(data)} bytes) is not what torch.save wrote: {type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else 'no message'}. Resume from another "
        "checkpoint: find_latest_valid(root) names the newest sound one."
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
    return zipfile.is_zipfile(io.BytesIO(data))


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
