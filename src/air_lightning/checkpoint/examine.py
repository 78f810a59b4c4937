"""One directory, judged: is it a whole checkpoint, and if not, why; no torch.

Two steps, so that choosing the newest of many lists the files of few: ``look`` reads the marker
and the manifest, which tell the step; ``examine`` lists the files, and holds them against the
manifest or, without a marker, sees whether a save left them. What cannot be read is a reason, never
an exception.
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
    problem,
    read_manifest,
    step_in_name,
)
from air_lightning.checkpoint.outline import outline
from air_lightning.errors import AirError, CheckpointError, UnsafeCheckpointError
from air_lightning.volumes.storage import FileInfo, Storage, open_storage

_EXTRA = "meta.pt"  # where Lightning's sharded checkpoints keep all but tensors
_PIECE = 8 << 20
_GLANCE = 1000  # entries


@dataclass(frozen=True)
class CheckpointRecord:
    """What is known of one checkpoint directory.

    Attributes:
        path: The directory, as users see it.
        step: Global step, from the manifest, else from the name, else from what Lightning wrote of
            itself; None when none tells.
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
    """A directory, perhaps a checkpoint's: a record that is not yet judged by its files."""

    record: CheckpointRecord
    storage: Storage
    manifest: Manifest | None
    marker_size: int | None


def look(path: str, options: dict[str, Any] | None) -> Candidate:
    """Read marker and manifest, in the fewest requests."""
    storage = open_storage(path, allow_local=True, storage_options=options)
    record = CheckpointRecord(path, step=step_in_name(path))
    marker: FileInfo | None = None
    try:
        marker = storage.stat(METADATA)
        record = replace(record, time=marker.mtime or None)
        manifest = read_manifest(storage)
        if manifest is None:
            # A mount may tell of a file for a while after it was deleted; it cannot be opened then.
            storage.read_bytes(METADATA, 0, 1)
            if record.step is None:
                record = replace(record, step=_lightnings_step(storage))
    except (OSError, AirError) as error:
        if isinstance(error, OSError) and is_missing(error):
            return Candidate(replace(record, time=None), storage, None, None)
        size = None if marker is None else marker.size
        return Candidate(_unreadable(record, error), storage, None, size)
    return Candidate(_with_manifest(record, manifest), storage, manifest, marker.size)


def _lightnings_step(storage: Storage) -> int | None:
    """The step of a sharded directory that Lightning wrote under another name: ``last.ckpt``."""
    try:
        with storage.open_read(_EXTRA) as stream:
            found = outline(stream)
    except Exception:  # noqa: BLE001 - there is none, or zipfile and pickle raise what comes
        return None
    step = found.get("global_step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None


def no_checkpoint(storage: Storage, otherwise: str) -> CheckpointError:
    """The error about a path without a marker: a mistyped one is told as such.

    Args:
        storage: Of the path.
        otherwise: The message where something is there.
    """
    try:
        is_there = storage.exists("")
    except OSError:
        is_there = True  # as far as is known
    return CheckpointError(
        otherwise
        if is_there
        else f"{storage.root} does not exist, so it holds no checkpoint. Is it spelled as when it "
        "was saved? list_checkpoints(root) and `air-lightning ls ROOT` show which there are."
    )


def _names(storage: Storage, limit: int | None = None) -> list[str]:
    entries = storage.list_dir(limit=limit)
    return [entry.name for entry in entries if not entry.is_dir and is_ours(entry.name)]


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
    return replace(record, valid=False, reason=f"it cannot be read: {problem(error)}")


def examine(candidate: Candidate) -> CheckpointRecord | None:
    """Judge a candidate by the sizes of its files; None when nothing here is of a checkpoint."""
    record, marker = candidate.record, candidate.marker_size
    if record.reason is not None:
        return record
    if marker is None:
        return _examine_unmarked(candidate.storage, record)
    try:
        sizes = {file.name: file.size for file in candidate.storage.list_files(sizes=True)}
    except (OSError, AirError) as error:
        return _unreadable(record, error)
    sizes[METADATA] = marker
    reason = _wrong_size(candidate.manifest, sizes)
    return replace(record, size=sum(sizes.values()), valid=reason is None, reason=reason)


def _examine_unmarked(storage: Storage, record: CheckpointRecord) -> CheckpointRecord | None:
    try:
        # What a save left has hardly another file in it; a folder of a million images ends here.
        if not _names(storage, limit=_GLANCE):
            return None
        files = [storage.stat(name) for name in _names(storage)]
    except (OSError, AirError) as error:
        if isinstance(error, OSError) and is_missing(error):
            return None  # it went while we looked, or never was
        return _unreadable(record, error)
    return replace(
        record,
        time=max((file.mtime for file in files), default=0.0) or None,
        size=sum(file.size for file in files),
        reason=f"it has no {METADATA}: the save into it never completed, or still runs",
    )


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


def examine_marker(candidate: Candidate, record: CheckpointRecord) -> CheckpointRecord:
    """Judge a candidate by its marker's contents, too; ``record`` is what ``examine`` said.

    Without a sound one nothing can be loaded, and a run that chose it would end there.
    """
    manifest = candidate.manifest
    wanted = None if manifest is None else manifest.files.get(METADATA)
    told = None if wanted is None else wanted.checksum
    if manifest is not None and (told is None or not told.startswith(f"{Checksum.algorithm}:")):
        return record
    try:
        data = candidate.storage.read_bytes(METADATA)
    except (OSError, AirError) as error:
        return _unreadable(record, error)
    checksum = Checksum()
    checksum.update(data)
    is_pickle = data[:1] == b"\x80" and data[-1:] == b"."
    if is_pickle if told is None else told == str(checksum):
        return record
    return replace(record, valid=False, reason=f"its {METADATA} is not what was written")


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
