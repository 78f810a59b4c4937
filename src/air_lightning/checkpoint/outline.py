"""What ``torch.save`` wrote, without tensors and without running anything of it; no torch.

No class is looked up and no function called: whatever is not a plain value becomes a ``StandIn``,
which keeps the name of what it stands for, and what the pickle would have given it.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO

from typing_extensions import override

_LOCAL_HEADER = 30  # bytes before each entry of a zip file, and a name of the length it tells


def outline(stream: BinaryIO) -> Any:
    """The plain values of the object that ``torch.save`` wrote.

    Raises:
        Exception: Of any kind that zipfile and pickle raise of garbage.
    """
    with zipfile.ZipFile(stream) as archive:
        # Its directory is at the very end: what can be opened is whole.
        (entry,) = [x for x in archive.infolist() if x.filename.endswith("/data.pkl")]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed, as torch.save never does")
    return _Outline(io.BytesIO(_stored(stream, entry))).load()


def _stored(stream: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry, unchecked: torch can be told to write no true CRC, and reads none."""
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ValueError("its parts are not where its directory says")
    stream.seek(sum(struct.unpack("<2H", header[-4:])), io.SEEK_CUR)  # a name, and padding
    return stream.read(entry.file_size)


class StandIn:
    """Takes the place of every object, and does nothing that a pickle asks of it.

    Attributes:
        stands_for: The class or function, as ``module.name``.
        parts: What it was given.
    """

    stands_for = ""
    parts: list[Any]

    def __new__(cls, *parts: Any, **more: Any) -> "StandIn":
        """Made, and nothing more."""
        made = super().__new__(cls)
        made.parts = [*parts, *more.values()]
        return made

    def __init__(self, *parts: Any, **more: Any) -> None:
        pass

    def __call__(self, *parts: Any, **more: Any) -> "StandIn":
        """Itself, whatever it would have made."""
        self.parts += (*parts, *more.values())
        return self

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)

    def append(self, value: Any) -> None:
        """As of a list."""
        self.parts.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """As of a list."""
        self.parts.extend(values)


class _Outline(pickle.Unpickler):
    """Reads a pickle without what its classes and functions are for."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        return type("StandIn", (StandIn,), {"stands_for": f"{module}.{name}"})

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        return None
