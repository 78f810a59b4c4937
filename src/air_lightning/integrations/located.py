"""Where the checkpoint of a path is, and who wrote it.

A path may be that of one of our directories, under either of its two names; of a single file, or of
a directory of a sharded strategy, that Lightning itself wrote; or of nothing.
"""

import os
from typing import Any, NamedTuple

from air_lightning.checkpoint import attempt
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.storage import open_storage

PathLike = str | os.PathLike[str]


class Located(NamedTuple):
    """A checkpoint's place and kind."""

    target: str
    is_file: bool = False  # that Lightning wrote
    is_lightnings: bool = False  # a directory of one of Lightning's sharded strategies
    is_whole: bool = False  # a directory with all that its manifest lists


def locate(path: PathLike, options: dict[str, Any] | None, *, resumable: bool) -> Located:
    """Find the checkpoint of a path.

    Args:
        path: As it was saved to.
        options: Passed to fsspec.
        resumable: Whether one that holds weights alone is the last choice.
    """
    target = volume_path.normalize(path, allow_local=True)
    found = attempt.newest_whole(target, options, resumable=resumable)
    if found is not None:
        return whole(found.path)
    return Located(target, _is_file(target, options), is_lightnings=_is_sharded(target))


def whole(target: str) -> Located:
    """As ``locate``, for a directory that is known to be a whole checkpoint."""
    return Located(target, is_lightnings=_is_sharded(target), is_whole=True)


def _is_file(target: str, options: dict[str, Any] | None) -> bool:
    local = volume_path.local_dir(target)
    if local is not None:
        return os.path.isfile(local)
    parent = open_storage(volume_path.parent(target), allow_local=True, storage_options=options)
    name = volume_path.name(target)
    try:
        entries = parent.list_dir()
    except FileNotFoundError:
        return False  # whoever reads the path says that it does not exist
    return any(not entry.is_dir and entry.name == name for entry in entries)


def _is_sharded(target: str) -> bool:
    local = volume_path.local_dir(target)
    return local is not None and os.path.isfile(os.path.join(local, "meta.pt"))
