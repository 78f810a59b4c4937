"""Reading a DCP checkpoint from a volume: nothing in it runs, and damage is named.

A load, in order: ``.metadata`` through an allow-list; the manifest, if there is one; then each
file in few large reads, held against the manifest's size, and its checksum on request. Objects are
tried with ``weights_only=True`` before a planner sees them: torch's own runs whatever they hold. A
planner with an attribute ``weights_only``, such as ours, sees to that itself.
"""

import io
import logging
import os
import threading
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from air_lightning.checkpoint.harmless import harmless_allowed
from air_lightning.checkpoint.location import OnVolume, refuse_link_out, require_count
from air_lightning.checkpoint.manifest import (
    METADATA,
    Checksum,
    Manifest,
    is_missing,
    read_manifest,
)
from air_lightning.checkpoint.shards import (
    PIECE,
    READ,
    Range,
    Slot,
    ViewStream,
    plan_ranges,
    run_jobs,
)
from air_lightning.checkpoint.unpickle import load_blob, load_metadata
from air_lightning.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)

_log = logging.getLogger("air_lightning")
_REMEDY = "find_latest_valid(root) names the newest sound checkpoint."


class UCVolumeReader(OnVolume, FileSystemReader):  # type: ignore[misc] # a Path there, a str here
    """Reads a DCP checkpoint from a volume, and runs nothing that it holds.

    For ``torch.distributed.checkpoint.load``. Reads what :class:`UCVolumeWriter` or torch's
    ``FileSystemWriter`` wrote.

    Args:
        path: The checkpoint's directory: a volume path, an fsspec URL or a local path.
        verify: Hold every file that is read against its checksum, too; reads whole files.
        weights_only: False lets objects through that run code when loaded.
        thread_count: Files read at the same time.
        storage_options: Passed to fsspec.
        **kwargs: Of torch's ``FileSystemReader``.

    Raises:
        InvalidArgumentError: An argument cannot work.
        InvalidPathError: ``path`` is none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = False,
        weights_only: bool | None = True,
        thread_count: int = 4,
        storage_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        require_count("thread_count", thread_count, least=1)
        super().__init__(path=".", **kwargs)
        self.place(path, storage_options)
        self.verify = verify
        self.weights_only = weights_only
        self.thread_count = thread_count
        self._manifest: Manifest | None = None
        self._planner_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_planner_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _planner_lock=threading.Lock())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, perhaps from another path."""
        super().reset(None)
        self._manifest = None
        if checkpoint_id:
            self.move(checkpoint_id)

    # No **kwargs: torch would take them as leave to fall back on one rank's own metadata file, and
    # then a save that never completed would load.
    def read_metadata(self) -> Metadata:
        """Read ``.metadata``.

        Raises:
            CheckpointError: There is none: the save into this directory never completed.
            CorruptCheckpointError: It is damaged.
            UnsafeCheckpointError: It names foreign globals, or files outside the directory.
        """
        try:
            data = self._storage.read_bytes(METADATA)
        except OSError as error:
            if not is_missing(error):
                raise
            raise CheckpointError(
                f"{self.path} is no checkpoint: it has no {METADATA}, which is written last, so "
                f"the save into it never completed, or it was never one. {_REMEDY}"
            ) from error
        metadata = load_metadata(data, path=self._named(METADATA))
        refuse_foreign_files(metadata, self.path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_manifest(self) -> Manifest | None:
        """Read the manifest; None where there is none: plain DCP.

        Raises:
            CorruptCheckpointError: It is damaged.
        """
        return read_manifest(self._storage)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the places of all items, and read the manifest if there is one."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        refuse_foreign_files(metadata, self.path)
        self._manifest = self.read_manifest()
        if self.verify and self._manifest is None:
            _log.warning(
                "%s has no manifest, so verify=True can check sizes only; checkpoints written "
                "with UCVolumeWriter have one.",
                self.path,
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs; the first failure of any thread is raised.

        Raises:
            CorruptCheckpointError: A file is missing, has another size or other contents.
            CheckpointMismatchError: A stored tensor does not fit the one it is loaded into.
            UnsafeCheckpointError: An object needs code to run; see ``weights_only``.
        """
        wanted: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for request in plan.items:
            info = self._info(request)
            entry = (info.offset, info.length, request)
            wanted.setdefault(info.relative_path, []).append(entry)
        jobs = [(name, plan_ranges(requests), planner) for name, requests in wanted.items()]
        run_jobs(jobs, self._read_file, threads=self.thread_count)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, job: tuple[str, list[Range], LoadPlanner]) -> None:
        name, ranges, planner = job
        size = self._checked_size(name, ranges)
        checksum = Checksum() if self.verify and self._manifest else None
        # One for all ranges: fresh memory for each would cost more than the reading.
        buffer = memoryview(bytearray(max(part.length for part in ranges)))
        position = 0
        for part in ranges:
            data = buffer[: part.length]
            if checksum:
                self._hash(checksum, name, position, part.offset)
            self._read(name, part.offset, data)
            if checksum:
                checksum.update(data[max(position - part.offset, 0) :])
            position = max(position, part.offset + part.length)
            for slot in part.slots:
                self._deliver(name, slot, _cut(data, part, slot), planner)
        if checksum:
            self._hash(checksum, name, position, size)
            self._check_checksum(name, str(checksum))

    def _checked_size(self, name: str, ranges: list[Range]) -> int:
        refuse_link_out(self.path, name)
        try:
            size = self._storage.stat(name).size
        except FileNotFoundError as error:
            raise self._corrupt(name, "the file that .metadata speaks of", "none") from error
        least = max(part.offset + part.length for part in ranges)
        if size < least:
            raise self._corrupt(name, f"at least {least} bytes", f"{size}")
        if self._manifest is not None:
            record = self._manifest.files.get(name)
            if record is None:
                raise self._corrupt(name, "a file that the manifest lists", "one that it does not")
            if record.size != size:
                raise self._corrupt(name, f"{record.size} bytes", f"{size}")
        return size

    def _read(self, name: str, offset: int, into: memoryview) -> None:
        for start in range(0, len(into), READ):
            piece = into[start : start + READ]
            data = self._storage.read_bytes(name, offset + start, len(piece))
            if len(data) != len(piece):
                raise self._corrupt(
                    name, f"{len(piece)} bytes at offset {offset + start}", f"{len(data)}"
                )
            piece[:] = data

    def _hash(self, checksum: Checksum, name: str, start: int, end: int) -> None:
        buffer = memoryview(bytearray(min(PIECE, max(end - start, 0))))
        for offset in range(start, end, PIECE):
            piece = buffer[: min(PIECE, end - offset)]
            self._read(name, offset, piece)
            checksum.update(piece)

    def _check_checksum(self, name: str, got: str) -> None:
        assert self._manifest is not None
        wanted = self._manifest.files[name].checksum
        if wanted is not None and wanted != got:
            raise self._corrupt(name, f"checksum {wanted}", got)

    def _deliver(self, name: str, slot: Slot, data: memoryview, planner: LoadPlanner) -> None:
        where = f"{self._named(name)} at offset {slot.offset}"
        tensor: torch.Tensor | None = None
        for request in slot.requests:
            plain = self._untransformed(request, data)
            if request.type == LoadItemType.BYTE_IO:
                self._deliver_object(request, bytes(plain), planner, where)
                continue
            if tensor is None:
                tensor = _tensor(plain, where)
            self._deliver_tensor(request, tensor, planner, where)

    def _untransformed(self, request: ReadItem, data: memoryview) -> memoryview:
        descriptors = getattr(self._info(request), "transform_descriptors", None)
        if not descriptors:
            return data
        raw = cast("IO[bytes]", ViewStream(data))
        stream = self.transforms.transform_load_stream(request, descriptors, raw)
        return memoryview(stream.read(-1))

    def _deliver_object(
        self, request: ReadItem, data: bytes, planner: LoadPlanner, where: str
    ) -> None:
        where = f"{request.storage_index.fqn} in {where}"
        with self._planner_lock:  # planners know nothing of threads, nor does the list of classes
            if self.weights_only is not False and not hasattr(planner, "weights_only"):
                with harmless_allowed():
                    load_blob(data, weights_only=True, path=where)
            planner.load_bytes(request, io.BytesIO(data))

    def _deliver_tensor(
        self, request: ReadItem, tensor: torch.Tensor, planner: LoadPlanner, where: str
    ) -> None:
        part = _narrow(tensor, request, where)
        with self._planner_lock:
            target = planner.resolve_tensor(request).detach()
        if target.size() != part.size():
            raise CheckpointMismatchError(
                f"{request.storage_index.fqn} has shape {tuple(part.size())} in {where}, and the "
                f"tensor to load it into {tuple(target.size())}. Load it into the model that it "
                "was saved from."
            )
        target.copy_(part)
        with self._planner_lock:
            planner.commit_tensor(request, target)

    def _info(self, request: ReadItem) -> _StorageInfo:
        try:
            return cast("_StorageInfo", self.storage_data[request.storage_index])
        except KeyError as error:
            raise CorruptCheckpointError(
                f"{self._named(METADATA)} does not say where {request.storage_index.fqn} lies. "
                f"{_REMEDY}"
            ) from error

    def _named(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _corrupt(self, name: str, wanted: str, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._named(name)} is damaged: wanted {wanted}, got {got}. {_REMEDY}"
        )


def refuse_foreign_files(metadata: Metadata, path: str) -> None:
    """Refuse names of files that would lead out of the checkpoint's directory.

    Raises:
        UnsafeCheckpointError: Names the file.
    """
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        parts = name.replace("\\", "/").split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in name or ":" in parts[0]:
            raise UnsafeCheckpointError(
                f"{path}/{METADATA} points to {name!r}; wanted a file inside the directory. "
                "Nothing was read. Do not use this checkpoint unless you know who made it."
            )


def _cut(data: memoryview, part: Range, slot: Slot) -> memoryview:
    start = slot.offset - part.offset
    return data[start : start + slot.length]


def _tensor(data: memoryview, where: str) -> torch.Tensor:
    loaded = load_blob(cast("BinaryIO", ViewStream(data)), weights_only=True, path=where)
    if not isinstance(loaded, torch.Tensor):
        raise CorruptCheckpointError(
            f"{where} holds a {type(loaded).__name__}; wanted a tensor. {_REMEDY}"
        )
    return loaded


def _narrow(tensor: torch.Tensor, request: ReadItem, where: str) -> torch.Tensor:
    try:
        return narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
    except (RuntimeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{request.storage_index.fqn} has shape {tuple(tensor.size())} in {where}, and "
            f"{METADATA} speaks of {tuple(request.lengths)} at {tuple(request.storage_offsets)} "
            f"in it. {_REMEDY}"
        ) from error
