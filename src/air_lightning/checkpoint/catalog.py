"""Which directories under a root are whole checkpoints, and which is newest; no torch.

A directory counts when it has ``.metadata``, written last, and every file that its manifest lists
at the size listed; of the one that is chosen, ``.metadata`` is read as well. Plain DCP directories
have no manifest: there ``.metadata`` and at least one shard must be, and
``verify_checkpoint(deep=True)`` does the rest. What cannot be read is invalid, with a reason, and
never an exception: one bad directory must not stop a resume.

Newest means the highest global step recorded in the manifest, else in the directory's name. Times
of modification only break ties; on object stores they mean little. Of two saves of one path, the
later one is newer whatever its step (``order``). ``search`` finds it by a look at few of them.
"""

import logging
import os
from typing import Any

from air_lightning.checkpoint.examine import (
    CheckpointRecord,
    examine,
    examine_deep,
    look,
    no_checkpoint,
)
from air_lightning.checkpoint.manifest import MANIFEST, METADATA, is_missing
from air_lightning.checkpoint.order import newest_first
from air_lightning.checkpoint.retention import condemned, is_link
from air_lightning.checkpoint.search import Search, each
from air_lightning.errors import CorruptCheckpointError, InvalidArgumentError
from air_lightning.volumes import path as paths
from air_lightning.volumes.base import Entry
from air_lightning.volumes.storage import open_storage

__all__ = [
    "MANIFEST",
    "METADATA",
    "CheckpointRecord",
    "find_latest_valid",
    "list_checkpoints",
    "prune_checkpoints",
    "remove_checkpoint",
    "verify_checkpoint",
]

_log = logging.getLogger("air_lightning")
_REMEDY = "find_latest_valid(root) names the newest sound checkpoint."

Path = str | os.PathLike[str]


def list_checkpoints(
    root: Path, *, storage_options: dict[str, Any] | None = None
) -> list[CheckpointRecord]:
    """Describe every checkpoint directly below ``root``, newest first; damaged ones too.

    Args:
        root: A volume path, an fsspec URL or a local path; a missing one has no checkpoints.
        storage_options: Passed to fsspec.

    Returns:
        One record for each directory that holds files of a checkpoint.

    Raises:
        InvalidPathError: ``root`` is no path.
        StorageError: ``root`` itself cannot be listed.
    """
    children = _children(root, storage_options)
    candidates = each(lambda child: look(child, storage_options), children)
    records = [record for record in each(examine, candidates) if record is not None]
    return newest_first(records, lambda record: record.valid)


def find_latest_valid(
    root: Path, *, resumable: bool = False, storage_options: dict[str, Any] | None = None
) -> str | None:
    """Return the path of the newest complete checkpoint directly below ``root``, or None.

    Newer ones that are passed over are logged, each with its reason.

    Args:
        root: A volume path, an fsspec URL or a local path; a missing one has no checkpoints.
        resumable: Leave out those that hold weights alone (``save_weights_only=True``).
        storage_options: Passed to fsspec.

    Raises:
        InvalidPathError: ``root`` is no path.
        StorageError: ``root`` itself cannot be listed.
    """
    record = newest_valid(root, resumable=resumable, storage_options=storage_options)
    return None if record is None else record.path


def newest_valid(
    root: Path,
    *,
    resumable: bool = False,
    storage_options: dict[str, Any] | None = None,
    listed: list[Entry] | None = None,
    begin: tuple[str, ...] = ("",),
) -> CheckpointRecord | None:
    """As :func:`find_latest_valid`, and return its record.

    Args:
        root: As there.
        resumable: As there.
        storage_options: As there.
        listed: What ``list_root`` returned a moment ago.
        begin: The name must begin with one of these.
    """
    told: set[str] = set()
    before: tuple[list[str], list[CheckpointRecord]] | None = None
    while True:
        # Between listing and looking, a running job may publish a checkpoint and delete the one
        # before it: neither is then found whole, though one was at every moment. So look again,
        # until nothing changes.
        children = [
            child
            for child in _children(root, storage_options, listed)
            if paths.name(child).startswith(begin)
        ]
        listed = None
        found, passed = Search(children, storage_options, resumable=resumable).run()
        for record in passed:
            if record.path not in told:
                told.add(record.path)
                _log.warning("Passing over the checkpoint %s: %s.", record.path, record.reason)
        if found is not None or not children or (children, passed) == before:
            return found
        before = children, passed


def verify_checkpoint(
    path: Path, *, deep: bool = False, storage_options: dict[str, Any] | None = None
) -> CheckpointRecord:
    """Check one checkpoint, and return its record.

    Args:
        path: The checkpoint's directory.
        deep: Read every file, too, and compare checksums. Without a manifest, every stored item
            is loaded instead, which imports torch.
        storage_options: Passed to fsspec.

    Raises:
        CorruptCheckpointError: It is not complete, or something in it was altered.
        CheckpointError: There is no such directory, or it holds no checkpoint.
    """
    target = paths.normalize(path, allow_local=True)
    candidate = look(target, storage_options)
    record = examine(candidate)
    if record is None:
        raise no_checkpoint(
            candidate.storage,
            f"{target} holds no checkpoint; wanted a directory with {METADATA} and shard files. "
            "list_checkpoints(root) and `air-lightning ls ROOT` show which there are.",
        )
    if record.valid and deep:
        record = examine_deep(candidate, record)
    if not record.valid:
        raise CorruptCheckpointError(
            f"{target} is not a sound checkpoint: {record.reason}. {_REMEDY}"
        )
    return record


def prune_checkpoints(
    root: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    dry_run: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> list[CheckpointRecord]:
    """Delete old and torn checkpoints directly below ``root``.

    What is not complete and newer than the newest complete one stays: it may be in the writing.
    A checkpoint with several names, by symbolic or hard links, counts once, and stays or goes with
    all of them; a link to a checkpoint elsewhere neither counts nor goes.

    Args:
        root: A volume path, an fsspec URL or a local path.
        keep_last: How many of the newest complete ones stay; at least 1.
        keep_every: Complete ones whose step is a multiple of this stay as well.
        dry_run: Delete nothing, only say what would go.
        storage_options: Passed to fsspec.

    Returns:
        The records of what was, or would be, deleted; newest first.

    Raises:
        InvalidArgumentError: ``keep_last`` or ``keep_every`` is not at least 1.
    """
    _require_positive("keep_last", keep_last)
    if keep_every is not None:
        _require_positive("keep_every", keep_every)
    records = list_checkpoints(root, storage_options=storage_options)
    doomed = condemned(records, keep_last, keep_every)
    if not dry_run:
        # Links first: killed half-way, none is left that leads nowhere.
        for record in sorted(doomed, key=lambda record: not is_link(record.path)):
            remove_checkpoint(record.path, storage_options=storage_options)
    return doomed


def remove_checkpoint(path: Path, *, storage_options: dict[str, Any] | None = None) -> None:
    """Delete a checkpoint, a directory or a single file; a missing one is fine.

    ``.metadata`` goes first: killed half-way, what is left does not count as a checkpoint.

    Args:
        path: The checkpoint.
        storage_options: Passed to fsspec.
    """
    target = paths.normalize(path, allow_local=True)
    local = paths.local_dir(target)
    if local is not None and os.path.islink(local):
        os.unlink(local)  # and not the checkpoint that it leads to
        return
    storage = open_storage(target, allow_local=True, storage_options=storage_options)
    try:
        storage.remove(METADATA)
    except OSError as error:
        if not is_missing(error):
            raise
        _remove_file(target, storage_options)
    else:
        storage.remove_tree()


def _remove_file(path: str, options: dict[str, Any] | None) -> None:
    parent = open_storage(paths.parent(path), allow_local=True, storage_options=options)
    parent.remove(paths.name(path))


def list_root(root: Path, options: dict[str, Any] | None) -> list[Entry]:
    """What is directly below a root; nothing for a missing one."""
    target = paths.normalize(root, allow_local=True)
    try:
        return open_storage(target, allow_local=True, storage_options=options).list_dir()
    except FileNotFoundError:
        return []


def _children(
    root: Path, options: dict[str, Any] | None, listed: list[Entry] | None = None
) -> list[str]:
    """The directories directly below a root."""
    target = paths.normalize(root, allow_local=True)
    entries = list_root(target, options) if listed is None else listed
    return [
        paths.join(target, entry.name)
        for entry in entries
        if entry.is_dir and not entry.name.startswith(".")
    ]


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(
            f"{name}={value!r} was given; wanted a whole number of at least 1. The newest "
            "complete checkpoint is never deleted."
        )
