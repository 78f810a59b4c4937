"""DCP storage on a volume: nothing half-written ever counts as a checkpoint.

A save, in order: the coordinator sees whether there is room, and removes an earlier checkpoint's
``.metadata``, then its manifest and shards; every rank writes its shards, each published whole; the
coordinator writes the manifest and, when every rank has reported success, ``.metadata``, last. A
process killed at any moment leaves either no ``.metadata`` or all that it speaks of.

The way back is in :mod:`air_lightning.checkpoint.reader`.
"""

import io
import os
import pickle
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from air_lightning.checkpoint.envelope import envelope, is_plain, raw_bytes
from air_lightning.checkpoint.location import OnVolume, require_count
from air_lightning.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Checksum,
    FileRecord,
    Manifest,
    retire,
)
from air_lightning.checkpoint.reader import UCVolumeReader
from air_lightning.checkpoint.room import Detour, planned_bytes, require_room
from air_lightning.checkpoint.shards import ShardStream, run_jobs
from air_lightning.checkpoint.staging import LARGE
from air_lightning.checkpoint.suspended import no_collections, no_zip_checksums
from air_lightning.errors import CheckpointError, InvalidArgumentError

__all__ = ["UCVolumeReader", "UCVolumeWriter"]


@dataclass(frozen=True)
class ShardResult(WriteResult):
    """What DCP wants to know of a written item, and the file it went to, for the manifest."""

    file_name: str
    file: FileRecord


class UCVolumeWriter(OnVolume, FileSystemWriter):  # type: ignore[misc] # a Path there, a str here
    """Writes a DCP checkpoint to a volume; ``.metadata`` is written last, or not at all.

    For ``torch.distributed.checkpoint.save`` and ``async_save``. What it writes is plain DCP.

    Args:
        path: The checkpoint's directory: a volume path, an fsspec URL or a local path.
        global_step: Recorded in the manifest, for :func:`find_latest_valid`. Without one the
            number in the directory's name counts.
        epoch: Recorded in the manifest.
        weights_only: Recorded in the manifest: training cannot be resumed from this one.
        thread_count: Files that each rank writes at the same time.
        storage_options: Passed to fsspec.
        staging_dir: A local directory through which shards go to ``path``. None, the default,
            writes them to ``path`` directly, which takes a third of the time on a volume; name
            one where uploads must not depend on the pace of the writing.
        **kwargs: Of torch's ``FileSystemWriter``. ``sync_files`` and ``per_thread_copy_ahead``
            are taken and have no effect: files are always synced where storage can.

    Raises:
        InvalidArgumentError: An argument cannot work.
        InvalidPathError: ``path`` is none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        global_step: int | None = None,
        epoch: int | None = None,
        weights_only: bool = False,
        thread_count: int = 2,
        storage_options: dict[str, Any] | None = None,
        staging_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        require_count("global_step", global_step, least=0, optional=True)
        require_count("epoch", epoch, least=0, optional=True)
        require_count("thread_count", thread_count, least=1)
        _require_torch_format(kwargs.get("serialization_format"))
        super().__init__(path=".", thread_count=thread_count, **kwargs)
        self.place(path, storage_options)
        self.global_step = global_step
        self.epoch = epoch
        self.weights_only = weights_only
        self._detour = None if staging_dir is None else Detour(staging_dir)
        self._world_size = 1

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save; at another path, step and epoch of this one do not apply."""
        super().reset(None)
        if checkpoint_id and self.move(checkpoint_id):
            self.global_step = self.epoch = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy to memory; with ``cache_staged_state_dict`` also where that cannot be pinned."""
        cached = getattr(self, "cache_staged_state_dict", False)
        if cached and self.state_dict_cache is None and not torch.cuda.is_available():
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        staged: dict[str, Any] = super().stage(state_dict)
        return staged if cached else _apart(staged, state_dict)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch's; refuses saves without coordination, for they have no moment of commit."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "dcp.save(use_collectives=False) writes one metadata file per rank, so no moment "
                f"exists at which {self.path} is complete. Leave use_collectives=True."
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; the directory is the coordinator's business."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory, and an earlier checkpoint in it none; no rank has written yet.

        Raises:
            CheckpointError: There is a checkpoint, and ``overwrite=False``.
            StorageError: The path is a file, cannot be written to, or has no room.
        """
        self._world_size = len(plans)
        self._storage.make_root()
        require_room(self._storage, sum(map(planned_bytes, plans)))
        if not self.overwrite and self._storage.exists(METADATA):
            raise CheckpointError(
                f"{self.path} holds a finished checkpoint and overwrite=False was given. Save to "
                "another directory, or leave overwrite=True."
            )
        retire(self._storage)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; the first failure of any thread is raised.

        Raises:
            StorageError: ``staging_dir`` has no room for them.
        """
        if self._detour is not None:
            self._detour.prepare(planned_bytes(plan))
        buckets = self._buckets(plan.items)
        jobs = [
            (f"{plan.storage_data.prefix}{i}{filesystem.DEFAULT_SUFFIX}", bucket, planner)
            for i, bucket in enumerate(buckets)
        ]
        with no_zip_checksums():
            written = run_jobs(jobs, self._write_shard, threads=self.thread_count)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest, then ``.metadata``; every rank's shards are whole by now."""
        with no_collections():
            written = [result for of_rank in results for result in of_rank]
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
            metadata.storage_data = {result.index: result.storage_data for result in written}
            metadata.storage_meta = self.storage_meta()
            marker = pickle.dumps(metadata)
        self._storage.write_bytes(MANIFEST, self._manifest(written, marker).to_bytes())
        self._storage.write_bytes(METADATA, marker)

    def _buckets(self, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
        if not self.single_file_per_rank:
            return [[item] for item in items]
        split = filesystem._split_by_size_and_type(self.thread_count, list(items))
        return [bucket for bucket in split if bucket]

    def _write_shard(self, job: tuple[str, list[WriteItem], SavePlanner]) -> list[ShardResult]:
        name, items, planner = job
        blobs_first = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        with self._open_write(name) as raw:
            stream = ShardStream(raw)
            places = [self._write_item(stream, name, item, planner) for item in blobs_first]
            stream.drain()
        file = FileRecord(stream.tell(), str(stream.checksum))
        return [
            ShardResult(item.index, place.length, place, name, file)
            for item, place in zip(blobs_first, places, strict=True)
        ]

    def _open_write(self, name: str) -> AbstractContextManager[BinaryIO]:
        if self._detour is None:
            return self._storage.open_write(name)
        return self._detour.open_write(self._storage, name)

    def _write_item(
        self, stream: ShardStream, name: str, item: WriteItem, planner: SavePlanner
    ) -> filesystem._StorageInfo:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            data = _compact(data)
        if not self._extensions:
            start = _write_plain(data, stream)
            return filesystem._StorageInfo(name, start, stream.tell() - start)
        start = stream.tell()
        sink, descriptors = self.transforms.transform_save_stream(item, cast("Any", stream))
        _write(data, sink)
        sink.close()
        return filesystem._StorageInfo(name, start, stream.tell() - start, descriptors)

    @property
    def _extensions(self) -> Sequence[Any]:
        transforms = getattr(self, "transforms", None)  # torch 2.6 has none
        return getattr(transforms, "extensions", ())

    def _manifest(self, written: list[WriteResult], marker: bytes) -> Manifest:
        checksum = Checksum()
        checksum.update(marker)
        files = {r.file_name: r.file for r in written if isinstance(r, ShardResult)}
        return Manifest(
            files={**files, METADATA: FileRecord(len(marker), str(checksum))},
            global_step=self.global_step,
            epoch=self.epoch,
            weights_only=self.weights_only,
            world_size=self._world_size,
            time=time.time(),
            versions=_versions(),
        )


def _write_plain(data: torch.Tensor | io.BytesIO, stream: ShardStream) -> int:
    """Write an item, its bytes as they lie if that can be; returns where it begins."""
    around = None
    if isinstance(data, torch.Tensor) and is_plain(data):
        around = envelope(data.dtype, data.shape, _stride(data))
    if around is None:
        start = stream.tell()
        _write(data, cast("IO[bytes]", stream))
        return start
    assert isinstance(data, torch.Tensor)
    if around.nbytes >= LARGE:
        stream.align(data.data_ptr(), len(around.head))
    start = stream.tell()
    for piece in (around.head, raw_bytes(data), around.tail):
        stream.lend(memoryview(piece))
    return start


def _write(data: torch.Tensor | io.BytesIO, sink: IO[bytes]) -> None:
    if isinstance(data, io.BytesIO):
        sink.write(data.getbuffer())
    else:
        torch.save(data.detach(), sink)  # without attributes of the user's, which are pickled too


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return it on the CPU with a storage of its own: torch.save writes whole storages."""
    if tensor.requires_grad or not tensor.is_cpu or type(tensor) is not torch.Tensor:
        tensor = tensor.detach().cpu()  # what was staged needs neither
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()


def _apart(staged: Any, given: Any) -> Any:
    """Return what was staged with copies of tensors that were not: older torch leaves the CPU's."""
    if isinstance(staged, torch.Tensor):
        return staged.detach().clone() if staged is given else staged
    if isinstance(staged, dict):
        return {key: _apart(value, given[key]) for key, value in staged.items()}
    if isinstance(staged, list | tuple):
        return type(staged)([_apart(*pair) for pair in zip(staged, given, strict=True)])
    return staged


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return None for the usual order: then tensors of one shape share one envelope."""
    return None if tensor.is_contiguous() else tensor.stride()


def _require_torch_format(given: Any) -> None:
    if given is None or getattr(given, "value", given) == "torch_save":
        return
    raise InvalidArgumentError(
        f"serialization_format={given} was given; wanted TORCH_SAVE, the one that torch's "
        "FileSystemReader and this package's reader can load. Leave the argument out."
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("air_lightning", "lightning", "pytorch_lightning"):
        if name in sys.modules:  # importing lightning to ask for its version would take seconds
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found
