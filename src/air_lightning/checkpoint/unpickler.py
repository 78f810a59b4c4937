"""The unpickler of ``.metadata``: imports nothing, and takes no more than the file's size allows.

Pickles are programs. What this one refuses, beside every global that DCP metadata does not need:

* memory out of proportion: the C unpickler takes 8 bytes for each number below the greatest memo
  index, so that nine bytes of a pickle fill any machine; calls on the same long list again and
  again do it, too;
* time out of proportion: the hash of a tuple of one tuple twice, of one twice, ... is never done;
* the end of the process: the hash of tuples nested a million deep overflows the C stack.

The price is Python's unpickler instead of C's: 0.1 s instead of 0.03 for 1,000 tensors.
"""

import io
import pathlib
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import NoneType
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

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


# Made of tuples in DCP metadata: shapes, paths of names, and the arguments of calls with these.
_LONGEST_TUPLE = 256
_LONGEST_NEST = 8
_LONGEST_NUMBER = 64  # bytes
_CONTAINERS = (tuple, list, dict, set, frozenset)


class MetadataUnpickler(pickle._Unpickler):
    """Reads one pickle; its globals come from the tables above.

    Args:
        data: The pickle.
        path: Where it comes from, for messages.
    """

    stack: list[Any]  # the base class's, which the type checker knows as C's
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        # What calls may copy: a long list is a few bytes of the pickle when it is named again.
        self._budget = len(data)

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

    def _check_tuple(self) -> None:
        made = self.stack[-1]
        nested = [item for item in made if type(item) is tuple]
        deep = any(type(item) is tuple for inner in nested for item in inner)
        if deep or len(made) > (_LONGEST_NEST if nested else _LONGEST_TUPLE):
            raise pickle.UnpicklingError("tuples nested or long beyond what DCP metadata has")

    def _pay(self, *copied: Any) -> None:
        self._budget -= sum(len(item) for item in copied if isinstance(item, _CONTAINERS))
        if self._budget < 0:
            raise pickle.UnpicklingError("it copies the same values over and over")

    def _instantiate(self, klass: Any, args: Any) -> None:
        self._pay(*args)
        super()._instantiate(klass, args)  # type: ignore[misc]


def _then_check(load: Callable[[Any], None]) -> Callable[[MetadataUnpickler], None]:
    def load_tuple(self: MetadataUnpickler) -> None:
        load(self)
        self._check_tuple()

    return load_tuple


def _pay_first(load: Callable[[Any], None], depth: int = 1) -> Callable[[MetadataUnpickler], None]:
    """Pay for what a call is given: tuples and dicts on top of the stack."""

    def load_call(self: MetadataUnpickler) -> None:
        for given in self.stack[-depth:]:
            self._pay(given, *(given if type(given) is tuple else ()))
        load(self)
        _check_made(self.stack[-1])

    return load_call


def _check_made(made: Any) -> None:
    """Refuse what takes long to hash, and is hashed again wherever the pickle names it."""
    if type(made) is torch.Size and len(made) > _LONGEST_TUPLE:
        raise pickle.UnpicklingError("a shape of too many dimensions")
    if type(made) is MetadataIndex:
        offset, index = vars(made).get("offset"), vars(made).get("index")
        plain = type(vars(made).get("fqn", "")) is str and type(index) in (int, NoneType)
        if not plain or type(offset) not in (torch.Size, NoneType):
            raise pickle.UnpicklingError("an index that is none")


def _short_number(self: Any) -> None:
    (length,) = struct.unpack("<i", self.read(4))
    if not 0 <= length <= _LONGEST_NUMBER:
        raise pickle.UnpicklingError(f"a number of {length} bytes")
    self.append(pickle.decode_long(self.read(length)))


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("an opcode that DCP metadata does not need")


_CHANGED: dict[bytes, Callable[[Any], None]] = {
    **{
        code: _then_check(MetadataUnpickler.dispatch[code[0]])
        for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    },
    pickle.REDUCE: _pay_first(MetadataUnpickler.dispatch[pickle.REDUCE[0]]),
    pickle.NEWOBJ: _pay_first(MetadataUnpickler.dispatch[pickle.NEWOBJ[0]]),
    pickle.NEWOBJ_EX: _pay_first(MetadataUnpickler.dispatch[pickle.NEWOBJ_EX[0]], 2),
    pickle.BUILD: _pay_first(MetadataUnpickler.dispatch[pickle.BUILD[0]]),
    pickle.LONG4: _short_number,
    # Buffers of any claimed size, and globals that another part of the program registered.
    **dict.fromkeys((pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER), _refuse),
    **dict.fromkeys((pickle.EXT1, pickle.EXT2, pickle.EXT4), _refuse),
}
MetadataUnpickler.dispatch.update({code[0]: load for code, load in _CHANGED.items()})


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
