"""What a file of ``torch.save`` claims of its tensors, held against the bytes that it has for them.

Its pickle names, for every tensor, a record of the archive and a number of elements. Torch before
2.10 takes that number as it is: a tensor larger than its record shows whatever lies behind the
record in memory, or ends the process.

The pickle is run with stand-ins that keep nothing of what they are given, so that each claim is
seen as torch will see it.
"""

import io
import pickle
import zipfile
from typing import Any

from typing_extensions import override

_BYTES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def require_backed(data: bytes, records: list[zipfile.ZipInfo]) -> None:
    """Refuse a pickle whose tensors are larger than their records.

    Args:
        data: The archive's ``data.pkl``, which ``require_shallow`` has passed.
        records: What the archive holds.

    Raises:
        Exception: They are, or the pickle is garbage, or other than torch.save would write it.
    """
    _Claims(data, records).load()


class _StandIn:
    """Takes the place of every class, function and result, and keeps nothing."""

    __slots__ = ()
    element = 0  # bytes of one, where it stands for a class of storages

    def __new__(cls, *_: Any, **__: Any) -> "_StandIn":
        return _NOTHING

    def __call__(self, *_: Any, **__: Any) -> "_StandIn":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As of a list, without effect."""

    def extend(self, values: Any) -> None:
        """As of a list, without effect."""

    def add(self, value: Any) -> None:
        """As of a set, without effect."""


_NOTHING = object.__new__(_StandIn)


class _Claims(pickle.Unpickler):
    def __init__(self, data: bytes, records: list[zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._held: dict[str, int] = {}
        for record in records:
            name = record.filename.partition("/")[2].lower()
            # Of two alike: torch may take either.
            self._held[name] = min(record.file_size, self._held.get(name, record.file_size))

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        size = _BYTES.get(name.removesuffix("Storage"), 0) if name.endswith("Storage") else 0
        return type(name, (_StandIn,), {"__slots__": (), "element": size}) if size else _StandIn

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        match pid:
            case ("storage", kind, str(key), _, int(count)) if getattr(kind, "element", 0):
                claimed, held = kind.element * count, self._held.get(f"data/{key}".lower(), 0)
            case _:
                raise pickle.UnpicklingError("it tells of a tensor as torch.save never does")
        if not 0 <= claimed <= held:
            raise pickle.UnpicklingError(f"a tensor of {claimed} bytes is claimed, and {held} held")
        return _NOTHING
