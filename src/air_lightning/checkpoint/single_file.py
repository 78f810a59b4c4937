"""The checkpoints that Lightning itself writes, one file each: which of them is the newest.

A run that moves to this package finds those of before in its directory, and must not start anew
beside them. A file tells its step only from within, times mean nothing on object stores; what it
holds is a pickle beside the tensors' bytes. Of that pickle nothing is run, no class is looked up,
and no tensor is read: whatever is not a plain value becomes a ``_Nothing``.
"""

import io
import logging
import math
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from typing_extensions import override

from air_lightning.checkpoint.manifest import is_missing, step_in_name
from air_lightning.errors import AirError
from air_lightning.volumes import path as paths
from air_lightning.volumes.base import Entry
from air_lightning.volumes.storage import Storage, open_storage

_log = logging.getLogger("air_lightning")

_EXTENSION = ".ckpt"  # of ModelCheckpoint.FILE_EXTENSION
_LOCAL_HEADER = 30  # bytes before each entry of a zip file, and a name of the length it tells
_USELESS = 8  # files of other programs may have such names, thousands of them


class SingleFile(NamedTuple):
    """A complete checkpoint of Lightning's that a fit can resume from."""

    step: int
    path: str


def newest_file(
    listed: Mapping[str, Iterable[Entry]], *, storage_options: dict[str, Any] | None = None
) -> SingleFile | None:
    """Return the file of the latest step directly below some roots, or None.

    Those that are cut short are logged; weights alone and files of other programs are left out.

    Args:
        listed: What is directly below each root.
        storage_options: Passed to fsspec.

    Raises:
        StorageError: One cannot be read.
    """
    found = [_newest(root, entries, storage_options) for root, entries in listed.items()]
    return max((single for single in found if single is not None), default=None)


def _newest(
    root: str, entries: Iterable[Entry], options: dict[str, Any] | None
) -> SingleFile | None:
    """Of one root: what its name says is newest comes first, and mostly is."""
    storage = open_storage(root, allow_local=True, storage_options=options)
    newest: SingleFile | None = None
    believed, useless = True, 0
    for told, name in sorted(_named(entries), key=lambda each: each[0], reverse=True):
        if newest is not None and believed and told <= newest.step:
            return newest
        step = _step(storage, name)
        useless += step is None
        believed = believed and (step in (None, told) or told == math.inf)
        if step is not None:
            found = SingleFile(step, paths.join(storage.root, name))
            newest = found if newest is None else max(newest, found)
        elif useless == _USELESS:
            _log.warning("Of the files in %s, %d were no use; no more are read.", root, useless)
            break
    return newest


def _named(entries: Iterable[Entry]) -> Iterator[tuple[float, str]]:
    """The step that each file's name tells, and its name; one that tells none is looked at."""
    for entry in entries:
        if not entry.is_dir and entry.name.endswith(_EXTENSION) and entry.name[0] != ".":
            told = step_in_name(entry.name)
            yield (math.inf if told is None else told), entry.name


def _step(storage: Storage, name: str) -> int | None:
    try:
        with storage.open_read(name) as stream:
            outline = _outline(stream)
    except (AirError, OSError) as error:
        if isinstance(error, OSError) and is_missing(error):  # a running job keeps the best few
            return None
        raise
    except Exception as error:  # noqa: BLE001 - zipfile and pickle raise what comes, of garbage
        where = paths.join(storage.root, name)
        _log.warning(
            "Passing over the checkpoint %s: cut short, or another file (%s).", where, error
        )
        return None
    step = outline.get("global_step") if "optimizer_states" in outline else None
    return step if isinstance(step, int) else None


def _outline(stream: BinaryIO) -> dict[str, Any]:
    """The plain values of the dict that ``torch.save`` wrote."""
    with zipfile.ZipFile(stream) as archive:
        # Its directory is at the very end: what can be opened is whole.
        (entry,) = [x for x in archive.infolist() if x.filename.endswith("/data.pkl")]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed, as torch.save never does")
    value = _Outline(io.BytesIO(_stored(stream, entry))).load()
    return value if isinstance(value, dict) else {}


def _stored(stream: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry, unchecked: torch can be told to write no true CRC, and reads none."""
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ValueError("its parts are not where its directory says")
    stream.seek(sum(struct.unpack("<2H", header[-4:])), io.SEEK_CUR)  # a name, and padding
    return stream.read(entry.file_size)


class _Nothing:
    """Takes the place of every object, and does nothing that a pickle asks of it."""

    def __new__(cls, *_: Any, **__: Any) -> "_Nothing":
        return super().__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> "_Nothing":
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...


class _Outline(pickle.Unpickler):
    """Reads a pickle without what its classes and functions are for."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        return _Nothing

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        return None
