"""A save of many ranks: each entry written once, shares alike, collectives that do not grow."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor.debug import CommDebugMode

from air_lightning.checkpoint.dcp import UCVolumeWriter
from air_lightning.checkpoint.planner import SavePlanner, save
from ranks import run_ranks


def _whole(name: str, rows: int) -> WriteItem:
    size = torch.Size([rows, 64])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    data = TensorWriteData(chunk, TensorProperties(torch.float32), size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def test_what_all_ranks_hold_is_shared_out_evenly(tmp_path: Path) -> None:
    """Of 300 tensors on 64 ranks each is written by one rank, and no rank has a tensor too many."""
    items = [_whole(f"state_dict.t{i}", 1 + i % 7) for i in range(300)]
    paths = {item.index.fqn: (item.index.fqn,) for item in items}
    planner, writer = SavePlanner(), UCVolumeWriter(tmp_path)
    planner.set_up_planner({}, None, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([SavePlan(items, planner_data=paths)] * 64)
    plans = writer.prepare_global_plan(plans)
    written = Counter(item.index.fqn for plan in plans for item in plan.items)
    assert written == Counter({item.index.fqn: 1 for item in items})
    assert len(metadata.state_dict_metadata) == 300
    shares = [sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in plans]
    assert max(shares) <= sum(shares) / len(shares) + 7 * 64 * 4


def _count_collectives(folder: str) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    counts: list[Any] = []
    for tensors in (2, 200):
        entries = {f"state_dict.t{i}": torch.ones(3) for i in range(tensors)}
        writer = UCVolumeWriter(f"{folder}/{tensors}")
        with CommDebugMode() as mode:
            save(entries, writer, process_group=group, no_dist=False)
        counts.append(dict(mode.get_comm_counts()))
    assert counts[0], "no collective was seen"
    assert counts[0] == counts[1]
    dist.destroy_process_group()


def test_the_number_of_collectives_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """Two ranks saving 2 and 200 tensors take part in the same collectives, as often."""
    log = tmp_path / "log"
    status = run_ranks(_count_collectives, str(tmp_path), world_size=2, log=log)
    assert status == [0, 0], log.read_text()
