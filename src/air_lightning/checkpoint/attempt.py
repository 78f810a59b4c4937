"""Saving to the path of a complete checkpoint without losing it.

A writer that overwrites must first make the old checkpoint none; killed then, nothing is left. With
``save_last`` alone that is the whole run. So two names take turns::

    choose   ``<path>``, or ``<path>.alt`` while ``<path>`` is a complete checkpoint
    require  the directory is made: where that is refused, nothing is staged
    save     ...
    settle   after publication: the other one is deleted, and ``<path>.alt`` is renamed to
             ``<path>`` where directories can be renamed; elsewhere it keeps its name
    newest   what loading ``<path>`` means: of the two, the complete one that was published last;
             to resume, of those that do not hold weights alone

``is_torn`` tells what a kill cut short from what a save must not take the name of.
"""

import contextlib
import os
from typing import Any

from air_lightning.checkpoint.catalog import remove_checkpoint
from air_lightning.checkpoint.examine import CheckpointRecord, examine, look
from air_lightning.checkpoint.manifest import is_ours
from air_lightning.checkpoint.order import SUFFIX, as_published, both
from air_lightning.checkpoint.search import each
from air_lightning.errors import AirError, SaveFailedError
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import open_storage


def choose(path: str, options: dict[str, Any] | None) -> str:
    """The name that a save to ``path`` may write to: of the two, never the newest complete one."""
    found = _complete_ones(path, options)
    if len(found) > 1:
        return found[0].path
    first, second = both(path)
    return second if found and found[0].path == first else first


def require_place(path: str, options: dict[str, Any] | None) -> None:
    """Make a checkpoint's directory, before the state is staged for it: a save needs no more.

    Raises:
        SaveFailedError: It cannot be made: below a file, read-only, not permitted.
    """
    try:
        open_storage(path, allow_local=True, storage_options=options).make_root()
    except (AirError, OSError) as error:
        raise SaveFailedError(
            f"Nothing can be saved to {path}, and nothing was staged: {error} The checkpoint "
            "before it is as it was. Name a directory that can be written."
        ) from error


def settle(written: str, options: dict[str, Any] | None) -> None:
    """Give a published checkpoint the place of the one that it replaces."""
    path = written.removesuffix(SUFFIX)
    for name in both(path):
        if name != written:
            remove_checkpoint(name, storage_options=options)
    local = paths.local_dir(written)
    if written != path and local is not None:
        # A volume may refuse to rename; the checkpoint then stays where it is.
        with contextlib.suppress(OSError):
            os.rename(local, local.removesuffix(SUFFIX))


def newest(path: str, options: dict[str, Any] | None) -> str:
    """The name under which a checkpoint of ``path`` is; ``path`` itself where there is none."""
    found = newest_whole(path, options)
    return path if found is None else found.path


def newest_whole(
    path: str, options: dict[str, Any] | None, *, resumable: bool = False
) -> CheckpointRecord | None:
    """The complete checkpoint of ``path`` that was published last.

    Args:
        path: Where it was saved to.
        options: Passed to fsspec.
        resumable: Prefer one that a run can be resumed from.
    """
    found = _complete_ones(path, options)
    usable = [record for record in found if not (resumable and record.weights_only)]
    return next(iter([*reversed(usable), *reversed(found)]), None)


def is_torn(path: str, options: dict[str, Any] | None) -> bool:
    """Whether all that is under a path is what a save left that never came to its end."""
    try:
        if _complete_ones(path, options):
            return False
        entries = open_storage(path, allow_local=True, storage_options=options).list_dir()
    except (AirError, OSError):
        return False  # a file, or nothing that can be told
    return all(is_ours(entry.name) and not entry.is_dir for entry in entries)


def _complete_ones(path: str, options: dict[str, Any] | None) -> list[CheckpointRecord]:
    """What is complete under the two names, the one published last at the end."""
    records = each(lambda name: _complete(name, options), both(path))
    return as_published(record for record in records if record is not None)


def _complete(path: str, options: dict[str, Any] | None) -> CheckpointRecord | None:
    record = examine(look(paths.normalize(path, allow_local=True), options))
    return record if record is not None and record.valid else None
