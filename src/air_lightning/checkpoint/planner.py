"""One DCP save or load of flat entries: the planners, and who takes part in the collectives.

``entries`` are a flat dict from key to tensor, DTensor or :class:`SerializedBlob`. Blobs go to
storage as the bytes that they are, so plain DCP tools read an object that ``torch.save`` wrote.
With a process group, an error of any rank is raised on every rank. Without one, the steps of
torch's documented writer and reader protocols are taken here: ``dcp.save(no_dist=True)`` warns at
every call, from the background thread.
"""

import io
import os
import pickle
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from air_lightning.checkpoint.blobs import SerializedBlob, warn_of_unsafe
from air_lightning.checkpoint.harmless import harmless_allowed
from air_lightning.checkpoint.places import RESERVED
from air_lightning.checkpoint.suspended import no_collections
from air_lightning.checkpoint.unpickle import load_blob
from air_lightning.errors import SaveFailedError

_FLAT = (RESERVED.rstrip("."), "optimizer_states")


class SavePlanner(DefaultSavePlanner):
    """Plans flat entries, and hands blobs to the writer as they are.

    ``Metadata.planner_data`` nests the model's keys under ``state_dict``, or under what the saver
    called it, so that torch's ``dcp_to_torch_save`` makes a file of which a module loads that part.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See the base class; additionally raises the error of a blob that has one."""
        for value in state_dict.values():
            if isinstance(value, SerializedBlob) and value.error is not None:
                raise value.error
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = {key: _nested(key) for key in self.state_dict}

    def create_local_plan(self) -> SavePlan:
        """See the base class."""
        with no_collections():
            plan: SavePlan = super().create_local_plan()
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See the base class."""
        with no_collections():
            made: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return made

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 (torch's name)
        """See the base class; a blob's bytes pass unchanged."""
        if isinstance(object, SerializedBlob):
            warn_of_unsafe(write_item.index.fqn, object)
            return io.BytesIO(object.data)
        return super().transform_object(write_item, object)


class LoadPlanner(DefaultLoadPlanner):
    """Loads flat entries; objects load with ``weights_only`` (torch's own planner runs pickles).

    Args:
        weights_only: As of ``torch.load``; None means True.
        allow_partial_load: Leave entries alone that the checkpoint does not have.
    """

    def __init__(self, *, weights_only: bool | None, allow_partial_load: bool = False) -> None:
        super().__init__(flatten_state_dict=False, allow_partial_load=allow_partial_load)
        self.weights_only = weights_only is not False
        self.metadata: Metadata | None = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one object into the dict given to ``load``."""
        key = read_item.dest_index.fqn
        with harmless_allowed():
            loaded = load_blob(value, weights_only=self.weights_only, path=f"The entry {key}")
        self.original_state_dict[key] = loaded


class FailedWriter(StorageWriter):
    """Takes a rank's failure into the collectives of the save, so that every rank learns of it."""

    def __init__(self, failure: BaseException) -> None:
        self._failure = _portable(failure)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: torch calls this before the collectives begin."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise self._failure

    # The first is where the failure comes out; the others are abstract in the base class.
    storage_meta = _fail
    set_up_storage_writer = prepare_local_plan = prepare_global_plan = _fail
    write_data = finish = _fail

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Accept nothing."""
        return False


def _portable(failure: BaseException) -> BaseException:
    """Return an exception that other ranks can unpickle: else the gathering rank fails alone."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001 - runs the exception class's own code
        return SaveFailedError(f"{type(failure).__name__}: {failure}")
    return failure


def save(
    entries: dict[str, Any],
    writer: StorageWriter,
    *,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> None:
    """Save ``entries``; blocks until the checkpoint is published or failed on every rank.

    Args:
        entries: Flat; the same key on several ranks holds the same value, and one of them writes
            it. Best is to give each rank its own share of these (:mod:`.sharing`).
        writer: A storage writer that was not used before.
        process_group: The ranks that take part; its collectives run on the calling thread.
        no_dist: This process saves alone, whether or not there are others.

    Raises:
        CheckpointException: A rank failed (torch's class: a ``BaseException``).
    """
    planner = SavePlanner()
    if not no_dist:
        dcp_save(entries, storage_writer=writer, planner=planner, process_group=process_group)
        return
    writer.reset()
    planner.set_up_planner(entries, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writes = writer.write_data(plan, planner)
    writes.wait()
    writer.finish(metadata, [writes.value()])


def load(
    entries: dict[str, Any],
    reader: StorageReader,
    planner: LoadPlanner,
    *,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    metadata: Metadata | None = None,
) -> Metadata:
    """Load into ``entries`` in place: tensors are filled, objects replaced.

    Args:
        entries: By their names.
        reader: Of the checkpoint.
        planner: A new one.
        process_group: The ranks that load together.
        no_dist: Load alone.
        metadata: What the load before this one by the same reader returned, so that nothing is read
            twice; heeded with ``no_dist`` alone.

    Returns:
        The checkpoint's metadata.

    Raises:
        BaseException: Whatever failed on a rank, this rank's failure first.
    """
    if no_dist:
        if metadata is None:
            reader.reset()
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, True)
        planner.set_up_planner(entries, metadata, True)
        local = reader.prepare_local_plan(planner.create_local_plan())
        plans = reader.prepare_global_plan(planner.create_global_plan([local]))
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()
        return metadata
    try:
        dcp_load(entries, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as failure:
        raise first_failure(failure, process_group)[1] from failure
    assert planner.metadata is not None
    return planner.metadata


def first_failure(
    failure: CheckpointException, process_group: dist.ProcessGroup | None = None
) -> tuple[int, BaseException]:
    """Return the rank and the exception that a failed DCP step is best explained by.

    Args:
        failure: What DCP raised; the same on every rank.
        process_group: Where this process's rank is looked up: its own failure comes first.
    """
    failures = failure.failures
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    chosen = rank if rank in failures else min(failures)
    return chosen, failures[chosen][0]


def _nested(key: str) -> tuple[str, ...]:
    head, dot, rest = key.partition(".")
    return (head, rest) if dot and head not in _FLAT else (key,)
