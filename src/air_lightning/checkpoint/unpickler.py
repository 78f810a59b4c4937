"""The unpickler of ``.metadata``: imports nothing, and takes no more than the file's size allows.

Every global is looked up in the tables below. What else a pickle can do to its reader,
``proportion.py`` has refused before.
"""

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from air_lightning.checkpoint.proportion import require_proportion
from air_lightning.errors import UnsafeCheckpointError

METADATA_CLASSES: dict[tuple[str, str], type] = {
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


class MetadataUnpickler(pickle.Unpickler):
    """Reads one pickle; its globals come from the tables above.

    Args:
        data: The pickle.
        path: Where it comes from, for messages.
    """

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._data = data
        self._path = path

    def load(self) -> Any:
        """Read it, if that takes no more than its size allows."""
        require_proportion(self._data)
        return super().load()

    def find_class(self, module: str, name: str, /) -> Any:
        """Look a global up; UnsafeCheckpointError for one that is in no table."""
        found = METADATA_CLASSES.get((module, name)) or _BUILTINS.get((module, name))
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
        """Refuse: DCP metadata has none."""
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
