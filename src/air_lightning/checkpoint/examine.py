"""One directory, judged: is it a whole checkpoint, and if not, why; no torch.

Two steps, so that choosing the newest of many lists the files of few: ``look`` reads the marker
and the manifest, which tell the step; ``examine`` holds the listed files against the manifest.
What cannot be read is a reason, never an exception.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from air_lightning.checkpoint.location import refuse_link_out
from air_lightning.checkpoint.manifest import (
    METADATA,
    SHARD_SUFFIX,
    Checksum,
    Manifest,
    is_missing,
    is_ours,
    read_manifest,
    step_in_name,
)
from air_lightning.errors import AirError, UnsafeCheckpointError
from air_lightning.volumes.storage import Storage, open_storage

_PIECE = 8 << 20


@dataclass(frozen=True)
class CheckpointRecord:
    """What is known of one checkpoint directory.

    Attributes:
        path: The directory, as users see it.
        step: Global step, from the manifest, else from the name; None when neither tells.
        epoch: Epoch, from the manifest.
        world_size: Number of ranks that wrote, from the manifest.
        time: When it was published, in seconds since 1970 (UTC).
        size: Bytes of all its files.
        valid: Whether it is complete, as far as sizes tell.
        reason: Why it is not valid; None when it is.
        weights_only: Whether it holds weights and no state to resume from, by the manifest.
    """

    path: str
    step: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    time: float | None = None
    size: int = 0
    valid: bool = False
    reason: str | None = None
    weights_only: bool = False


@dataclass(frozen=True)
class Candidate:
    """A directory with files of a checkpoint: a record that is not yet judged by its files."""

    record: CheckpointRecord
    storage: Storage
    manifest: Manifest | None
    marker_size: int | None


def look(path: str, options: dict[str, Any] | None) -> Candidate | None:
    """Read marker and manifest; None when nothing here is of a checkpoint."""
    storage = open_storage(path, allow_local=True, storage_options=options)
    record = CheckpointRecord(path, step=step_in_name(path))
    try:
        marker = storage.stat(METADATA)
    except (OSError, AirError) as error:
        if isinstance(error, OSError) and is_missing(error):
            return _look_unmarked(storage, record)
        return Candidate(_unreadable(record, error), storage, None, None)
    record = replace(record, time=marker.mtime or None)
    try:
        manifest = read_manifest(storage)
    except (OSError, AirError) as error:
        return Candidate(_unreadable(record, error), storage, None, marker.size)
    return Candidate(_with_manifest(record, manifest), storage, manifest, marker.size)


def _look_unmarked(storage: Storage, record: CheckpointRecord) -> Candidate | None:
    try:
        names = [entry.name for entry in storage.list_dir() if not entry.is_dir]
        files = [storage.stat(name) for name in names if is_ours(name)]
    except (OSError, AirError) as error:
        if isinstance(error, OSError) and is_missing(error):
            return None  # it went while we looked, or never was
        return Candidate(_unreadable(record, error), storage, None, None)
    if not files:
        return None
    reason = f"it has no {METADATA}: the save into it never completed, or still runs"
    record = replace(
        record,
        time=max(file.mtime for file in files) or None,
        size=sum(file.size for file in files),
        reason=reason,
    )
    return Candidate(record, storage, None, None)


def _with_manifest(record: CheckpointRecord, manifest: Manifest | None) -> CheckpointRecord:
    if manifest is None:
        return record
    return replace(
        record,
        step=record.step if manifest.global_step is None else manifest.global_step,
        epoch=manifest.epoch,
        world_size=manifest.world_size,
        weights_only=manifest.weights_only,
        time=record.time if manifest.time is None else manifest.time,
    )


def _unreadable(record: CheckpointRecord, error: Exception) -> CheckpointRecord:
    return replace(record, valid=False, reason=f"it cannot be read: {error}")


def examine(candidate: Candidate) -> CheckpointRecord:
    """Judge a candidate by the sizes of its files."""
    record, marker = candidate.record, candidate.marker_size
    if record.reason is not None or marker is None:
        return record
    try:
        sizes = {file.name: file.size for file in candidate.storage.list_files(sizes=True)}
    except (OSError, AirError) as error:
        return _unreadable(record, error)
    sizes[METADATA] = marker
    reason = _wrong_size(candidate.manifest, sizes)
    return replace(record, size=sum(sizes.values()), valid=reason is None, reason=reason)


def _wrong_size(manifest: Manifest | None, sizes: dict[str, int]) -> str | None:
    if manifest is None:
        if not sizes[METADATA]:
            return f"its {METADATA} is empty"
        if not any(name.endswith(SHARD_SUFFIX) for name in sizes):
            return f"it has no {SHARD_SUFFIX} file"
        return None
    for name, wanted in manifest.files.items():
        if name not in sizes:
            return f"{name} is missing; wanted {wanted.size} bytes"
        if sizes[name] != wanted.size:
            return f"{name} has {sizes[name]} bytes; wanted {wanted.size}"
    return None


def examine_deep(candidate: Candidate, record: CheckpointRecord) -> CheckpointRecord:
    """Judge a candidate by the contents of its files; ``record`` is what ``examine`` said."""
    if candidate.manifest is None:
        # By name, so that this module, which starts the command line, is without torch.
        inspection = import_module("air_lightning.checkpoint.inspection")
        reason = inspection.damaged_item(candidate.storage)
    else:
        try:
            reason = _wrong_checksum(candidate.storage, candidate.manifest)
        except UnsafeCheckpointError as error:
            reason = str(error)
    return replace(record, valid=reason is None, reason=reason)


def _wrong_checksum(storage: Storage, manifest: Manifest) -> str | None:
    for name, wanted in manifest.files.items():
        refuse_link_out(storage.root, name)
        if wanted.checksum is None:
            continue
        if not wanted.checksum.startswith(f"{Checksum.algorithm}:"):
            return f"{name} has a checksum of an unknown kind, {wanted.checksum}"
        got = _checksum(storage, name)
        if got != wanted.checksum:
            return f"{name} has checksum {got}; wanted {wanted.checksum}"
    return None


def _checksum(storage: Storage, name: str) -> str:
    checksum = Checksum()
    with storage.open_read(name) as stream:
        while piece := stream.read(_PIECE):
            checksum.update(piece)
    return str(checksum)
