"""Which checkpoints may go; no torch.

A checkpoint may have several names in one directory: ``save_last="link"`` adds a symbolic link,
``save_last=True`` a directory of hard links. Counted by names, the link would be kept and what it
leads to deleted. So, in order: names of one checkpoint are put together; each group counts once;
it stays with all its names, or goes with all of them. A link to a checkpoint elsewhere is no
checkpoint of this directory: it neither counts nor goes.
"""

import os
from collections.abc import Hashable, Iterable

from air_lightning.checkpoint.examine import CheckpointRecord
from air_lightning.checkpoint.manifest import METADATA
from air_lightning.volumes import path as paths

Group = list[CheckpointRecord]


def condemned(
    records: Iterable[CheckpointRecord], keep_last: int, keep_every: int | None
) -> list[CheckpointRecord]:
    """Return what may be deleted, in the order given.

    Args:
        records: All of a directory, newest first.
        keep_last: How many of the newest complete ones stay.
        keep_every: Complete ones whose step is a multiple of this stay as well.
    """
    groups = _groups(records)
    sound = [group for group in groups if any(record.valid for record in group)]
    if not sound:
        return []
    kept = sound[:keep_last]
    if keep_every is not None:
        kept += [group for group in sound if _is_multiple(group, keep_every)]
    newest = next(record for record in sound[0] if record.valid)
    torn = [group for group in groups if not any(record.valid for record in group)]
    kept += [group for group in torn if not all(_is_older(record, newest) for record in group)]
    staying = {record.path for group in kept for record in group}
    return [record for group in groups for record in group if record.path not in staying]


def is_link(path: str) -> bool:
    """Say whether a name is a symbolic link."""
    local = paths.local_dir(path)
    return local is not None and os.path.islink(local)


def _groups(records: Iterable[CheckpointRecord]) -> list[Group]:
    """Put the names of each checkpoint together; the order is that of each one's first name."""
    groups: dict[Hashable, Group] = {}
    for record in records:
        groups.setdefault(_identity(record.path), []).append(record)
    return [group for group in groups.values() if not all(is_link(r.path) for r in group)]


def _identity(path: str) -> Hashable:
    local = paths.local_dir(path)
    if local is None:
        return path
    try:
        found = os.stat(f"{local}/{METADATA}")
    except OSError:
        return os.path.realpath(local)
    # Not the inode of a file with one name: some mounts give all their files the same one.
    return (found.st_dev, found.st_ino) if found.st_nlink > 1 else os.path.realpath(local)


def _is_multiple(group: Group, keep_every: int) -> bool:
    return any(r.valid and r.step is not None and r.step % keep_every == 0 for r in group)


def _is_older(record: CheckpointRecord, newest: CheckpointRecord) -> bool:
    """Say whether a torn one is older by step and by time: only then nobody writes it now."""
    if record.time is None or newest.time is None or record.time >= newest.time:
        return False
    return record.step is None or newest.step is None or record.step <= newest.step
