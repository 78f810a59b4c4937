"""The checkpoints that Lightning itself writes, one file each: which of them is the newest.

A run that moves to this package finds those of before in its directory, and must not start anew
beside them. A file tells its step only from within, times mean nothing on object stores; what it
holds is a pickle beside the tensors' bytes. Of that pickle nothing is run, no class is looked up,
and no tensor is read (``outline``).
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from air_lightning.checkpoint.manifest import is_missing, step_in_name
from air_lightning.checkpoint.outline import outline
from air_lightning.errors import AirError
from air_lightning.volumes import path as paths
from air_lightning.volumes.base import Entry
from air_lightning.volumes.storage import Storage, open_storage

_log = logging.getLogger("air_lightning")

_EXTENSION = ".ckpt"  # of ModelCheckpoint.FILE_EXTENSION
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
            found = outline(stream)
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
    is_resumable = isinstance(found, dict) and "optimizer_states" in found
    step = found.get("global_step") if is_resumable else None
    return step if isinstance(step, int) else None
