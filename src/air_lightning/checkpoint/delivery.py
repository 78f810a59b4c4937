"""Handing what was read to DCP's planner, from several threads; nothing that was read runs.

Objects are tried with ``weights_only=True`` before a planner sees them: torch's own runs whatever
they hold. A planner with an attribute ``weights_only``, such as ours, sees to that itself.
"""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from air_lightning.checkpoint.harmless import harmless_allowed
from air_lightning.checkpoint.inplace import InPlace, in_place, stored_kind, whole_in
from air_lightning.checkpoint.manifest import METADATA
from air_lightning.checkpoint.shards import ViewStream
from air_lightning.checkpoint.sweep import Slot
from air_lightning.checkpoint.unpickle import load_blob
from air_lightning.errors import CheckpointMismatchError, CorruptCheckpointError

REMEDY = "find_latest_valid(root) names the newest sound checkpoint."


@dataclass
class Delivery:
    """One load's way from bytes to the planner.

    Attributes:
        planner: Knows nothing of threads: one at a time calls it.
        metadata: The checkpoint's.
        weights_only: As of ``torch.load``, for objects.
        in_torchs_envelope: Whether tensors are stored as this torch would store them, as far as
            one can know: reading straight into targets is then worth trying.
        unwrap: Undoes what a stream transform did to an item.
    """

    planner: LoadPlanner
    metadata: Metadata
    weights_only: bool | None
    in_torchs_envelope: bool
    unwrap: Callable[[ReadItem, memoryview], memoryview]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _targets: dict[int, torch.Tensor] = field(default_factory=dict)

    def place(self, slot: Slot) -> InPlace | None:
        """Plan to read an item into its target, where that can be."""
        request = slot.requests[0]
        if not self.in_torchs_envelope or len(slot.requests) > 1:
            return None
        if request.type == LoadItemType.BYTE_IO:
            return None
        return in_place(slot, self._target(request), self.metadata)

    def accept(self, placed: InPlace) -> bool:
        """Take an item that was read into its target; False if it has to be read anew."""
        if not placed.arrived():
            return False
        self._commit(placed.request, placed.target)
        return True

    def deliver(self, slot: Slot, data: memoryview, where: str) -> None:
        """Take an item that was read into a buffer.

        Raises:
            CorruptCheckpointError: It is not what the index of the checkpoint says.
            CheckpointMismatchError: It does not fit its target.
            UnsafeCheckpointError: It is an object that needs code to run.
        """
        tensor: torch.Tensor | None = None
        for request in slot.requests:
            plain = self.unwrap(request, data)
            if request.type == LoadItemType.BYTE_IO:
                self._deliver_object(request, bytes(plain), where)
                continue
            if tensor is None:
                tensor = self._decoded(plain, request, where)
            self._deliver_tensor(request, tensor, where)

    def _decoded(self, data: memoryview, request: ReadItem, where: str) -> torch.Tensor:
        stored = stored_kind(self.metadata, request.storage_index)
        tensor = whole_in(data, *stored) if stored and self.in_torchs_envelope else None
        return _tensor(data, where) if tensor is None else tensor

    def _deliver_object(self, request: ReadItem, data: bytes, where: str) -> None:
        where = f"{request.storage_index.fqn} in {where}"
        with self._lock:  # also for torch's list of classes, of which there is one per process
            if self.weights_only is not False and not hasattr(self.planner, "weights_only"):
                with harmless_allowed():
                    load_blob(data, weights_only=True, path=where)
            self.planner.load_bytes(request, io.BytesIO(data))

    def _deliver_tensor(self, request: ReadItem, tensor: torch.Tensor, where: str) -> None:
        part = _narrow(tensor, request, where)
        target = self._target(request)
        if target.size() != part.size():
            raise CheckpointMismatchError(
                f"{request.storage_index.fqn} has shape {tuple(part.size())} in {where}, and the "
                f"tensor to load it into {tuple(target.size())}. Load it into the model that it "
                "was saved from."
            )
        target.copy_(part)
        self._commit(request, target)

    def _target(self, request: ReadItem) -> torch.Tensor:
        """Ask the planner once, however often an item is read: it may make the target for us."""
        with self._lock:
            found = self._targets.get(id(request))
            if found is None:
                found = self.planner.resolve_tensor(request).detach()
                self._targets[id(request)] = found
            return found

    def _commit(self, request: ReadItem, target: torch.Tensor) -> None:
        with self._lock:
            self._targets.pop(id(request), None)
            self.planner.commit_tensor(request, target)


def _tensor(data: memoryview, where: str) -> torch.Tensor:
    loaded = load_blob(cast("BinaryIO", ViewStream(data)), weights_only=True, path=where)
    if not isinstance(loaded, torch.Tensor):
        raise CorruptCheckpointError(
            f"{where} holds a {type(loaded).__name__}; wanted a tensor. {REMEDY}"
        )
    return loaded


def _narrow(tensor: torch.Tensor, request: ReadItem, where: str) -> torch.Tensor:
    try:
        return narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
    except (RuntimeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{request.storage_index.fqn} has shape {tuple(tensor.size())} in {where}, and "
            f"{METADATA} speaks of {tuple(request.lengths)} at {tuple(request.storage_offsets)} "
            f"in it. {REMEDY}"
        ) from error
