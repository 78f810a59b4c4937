"""Reading a DCP checkpoint from a volume: nothing in it runs, and damage is named.

A load, in order: ``.metadata`` through an allow-list; the manifest, if there is one, and every
file's size held against it; then the files, by several threads, in few large reads
(:mod:`~air_lightning.checkpoint.sweep`), tensors straight into their targets where they can be
(:mod:`~air_lightning.checkpoint.inplace`), and with ``verify`` through a checksum on the way.
"""

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from air_lightning.checkpoint.delivery import REMEDY, Delivery
from air_lightning.checkpoint.examine import no_checkpoint
from air_lightning.checkpoint.inplace import InPlace
from air_lightning.checkpoint.location import OnVolume, refuse_link_out, require_count
from air_lightning.checkpoint.manifest import (
    METADATA,
    Checksum,
    Manifest,
    is_missing,
    read_manifest,
)
from air_lightning.checkpoint.shards import Countdown, Scratch, ViewStream, run_jobs
from air_lightning.checkpoint.sweep import Piece, Slot, Span, Sweep, runs_of, slots_of, spans_of
from air_lightning.checkpoint.unpickle import load_metadata
from air_lightning.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from air_lightning.volumes.base import RangeReader

_log = logging.getLogger("air_lightning")
LARGE = 128 << 20  # bytes of a tensor that several threads read

_Job: TypeAlias = Callable[[], None]


class UCVolumeReader(OnVolume, FileSystemReader):  # type: ignore[misc] # a Path there, a str here
    """Reads a DCP checkpoint from a volume, and runs nothing that it holds.

    For ``torch.distributed.checkpoint.load``. Reads what :class:`UCVolumeWriter` or torch's
    ``FileSystemWriter`` wrote.

    Args:
        path: The checkpoint's directory: a volume path, an fsspec URL or a local path.
        verify: Hold every file that is read against its checksum, too; reads whole files.
        weights_only: False lets objects through that run code when loaded.
        thread_count: Parts of files that are read at the same time.
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
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, perhaps from another path."""
        super().reset(None)
        self._manifest = self._metadata = None
        if checkpoint_id:
            self.move(checkpoint_id)

    # No **kwargs: torch would take them as leave to fall back on one rank's own metadata file, and
    # then a save that never completed would load.
    def read_metadata(self) -> Metadata:
        """Read ``.metadata``.

        Raises:
            CheckpointError: There is none: the save into this directory never completed, or there
                is no such directory.
            CorruptCheckpointError: It is damaged.
            UnsafeCheckpointError: It names foreign globals, or files outside the directory.
        """
        try:
            data = self._storage.read_bytes(METADATA)
        except OSError as error:
            if not is_missing(error):
                raise
            raise no_checkpoint(
                self._storage,
                f"{self.path} is no checkpoint: it has no {METADATA}, which is written last, so "
                f"the save into it never completed, or it was never one. {REMEDY}",
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
        self._metadata = metadata
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
        files = {name: slots_of(requests) for name, requests in wanted.items()}
        run_jobs(list(files.items()), self._check_size, threads=self.thread_count)
        jobs = self._jobs(files, self._delivery(planner))
        run_jobs(jobs, _call, threads=self.thread_count)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _delivery(self, planner: LoadPlanner) -> Delivery:
        versions = self._manifest.versions if self._manifest else {}
        assert self._metadata is not None
        return Delivery(
            planner,
            self._metadata,
            self.weights_only,
            in_torchs_envelope=versions.get("torch") == str(torch.__version__),
            unwrap=self._untransformed,
        )

    def _jobs(self, files: dict[str, list[Slot]], delivery: Delivery) -> list[_Job]:
        if self._verifying:  # a checksum runs through a whole file
            return [partial(self._read_span, Span(n, s), delivery) for n, s in files.items()]
        jobs: list[_Job] = []
        left: dict[str, list[Slot]] = {}
        for name, slots in files.items():
            for slot in slots:
                placed = delivery.place(slot) if slot.length > LARGE else None
                if placed is None:
                    left.setdefault(name, []).append(slot)
                else:
                    jobs += self._parts_of(name, slot, placed, delivery)
        spans = spans_of(left, self.thread_count)
        return jobs + [partial(self._read_span, span, delivery) for span in spans]

    def _parts_of(
        self, name: str, slot: Slot, placed: InPlace, delivery: Delivery
    ) -> Iterator[_Job]:
        """Split one large tensor over the threads; the last one that ends hands it over."""
        parts = placed.parts(LARGE // 2)
        left = Countdown(len(parts))

        def read(part: list[Piece]) -> None:
            with self._storage.open_ranges(name) as file:
                self._sweep(name, file).fill(part)
                if left.down() and not delivery.accept(placed):
                    self._read_again(name, file, slot, delivery)

        return (partial(read, part) for part in parts)

    def _read_span(self, span: Span, delivery: Delivery) -> None:
        checksum = Checksum() if self._verifying else None
        scratch = Scratch()
        with self._storage.open_ranges(span.name) as file:
            sweep = self._sweep(span.name, file, checksum)
            try:
                for run in runs_of(span.slots):
                    self._read_run(span.name, sweep, run, delivery, scratch)
            except CheckpointError:
                # An item that one flipped bit made look like an attack is damaged, and no more.
                self._check_rest(span.name, sweep, checksum)
                raise
            self._check_rest(span.name, sweep, checksum)

    def _read_run(
        self, name: str, sweep: Sweep, run: list[Slot], delivery: Delivery, scratch: Scratch
    ) -> None:
        places = [delivery.place(slot) for slot in run]
        pairs = list(zip(run, places, strict=True))
        buffers = scratch.cut([slot.length for slot, placed in pairs if placed is None])
        pieces: list[Piece] = []
        buffered: list[tuple[Slot, memoryview]] = []
        for slot, placed in pairs:
            if placed is not None:
                pieces += placed.pieces
                continue
            buffered.append((slot, next(buffers)))
            pieces.append(Piece(slot.offset, buffered[-1][1]))
        sweep.fill(pieces)
        for slot, placed in pairs:
            if placed is not None and not delivery.accept(placed):
                self._read_again(name, sweep.file, slot, delivery)
        for slot, data in buffered:
            delivery.deliver(slot, data, self._at(name, slot))

    def _read_again(self, name: str, file: RangeReader, slot: Slot, delivery: Delivery) -> None:
        """Read an item that is not in torch's envelope after all: the slow way, whole."""
        data = memoryview(bytearray(slot.length))
        self._sweep(name, file).fill([Piece(slot.offset, data)])
        delivery.deliver(slot, data, self._at(name, slot))

    def _sweep(self, name: str, file: RangeReader, checksum: Checksum | None = None) -> Sweep:
        return Sweep(file, partial(self._corrupt, name), checksum)

    @property
    def _verifying(self) -> bool:
        return self.verify and self._manifest is not None

    def _check_size(self, job: tuple[str, list[Slot]]) -> None:
        name, slots = job
        refuse_link_out(self.path, name)
        try:
            size = self._storage.stat(name).size
        except FileNotFoundError as error:
            raise self._corrupt(name, "the file that .metadata speaks of", "none") from error
        least = max(slot.end for slot in slots)
        if size < least:
            raise self._corrupt(name, f"at least {least} bytes", f"{size}")
        if self._manifest is not None:
            record = self._manifest.files.get(name)
            if record is None:
                raise self._corrupt(name, "a file that the manifest lists", "one that it does not")
            if record.size != size:
                raise self._corrupt(name, f"{record.size} bytes", f"{size}")

    def _check_rest(self, name: str, sweep: Sweep, checksum: Checksum | None) -> None:
        if checksum is None:
            return
        assert self._manifest is not None
        record = self._manifest.files[name]
        sweep.skip_to(record.size)
        if record.checksum is not None and record.checksum != str(checksum):
            raise self._corrupt(name, f"checksum {record.checksum}", str(checksum))

    def _untransformed(self, request: ReadItem, data: memoryview) -> memoryview:
        descriptors = getattr(self._info(request), "transform_descriptors", None)
        if not descriptors:
            return data
        raw = cast("IO[bytes]", ViewStream(data))
        stream = self.transforms.transform_load_stream(request, descriptors, raw)
        return memoryview(stream.read(-1))

    def _info(self, request: ReadItem) -> _StorageInfo:
        try:
            return cast("_StorageInfo", self.storage_data[request.storage_index])
        except KeyError as error:
            raise CorruptCheckpointError(
                f"{self._named(METADATA)} does not say where {request.storage_index.fqn} lies. "
                f"{REMEDY}"
            ) from error

    def _at(self, name: str, slot: Slot) -> str:
        return f"{self._named(name)} at offset {slot.offset}"

    def _named(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _corrupt(self, name: str, wanted: str, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._named(name)} is damaged: wanted {wanted}, got {got}. {REMEDY}"
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


def _call(job: _Job) -> None:
    job()
