"""Planning a save of many ranks, in one process: what the coordinator does, and how it grows.

For each simulated rank a local plan is made by our planner from tensors of which a share is held
by all ranks alike (as under DDP) and the rest is sharded (as under FSDP2). Then the coordinator's
steps are taken with the real planner and writer: the global plan with its sharing-out, the
``.metadata`` and the manifest from as many results as ranks would send, their bytes, and reading
them back through the allow-list. No tensor bytes are written.

``local_plan_s`` is what each rank does by itself: the plan of as many whole tensors.

Prints one JSON line with seconds per step for each size, bytes of the two files, and ``growth``:
seconds per entry (a tensor's part on a rank) of the larger size / those of the smaller one, for our
steps together and for torch's. 1.0 is linear.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common  # noqa: F401 - finds the tests' modules
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from air_lightning.checkpoint.dcp import ShardResult, UCVolumeWriter
from air_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest
from air_lightning.checkpoint.planner import SavePlanner
from air_lightning.checkpoint.reader import UCVolumeReader
from plans import item

OURS = ("prepare", "finish", "read")


def local_plans(ranks: int, tensors: int, per_rank: int) -> list[SavePlan]:
    """Each rank holds ``per_rank`` tensors whole, as the others do, and shards of its own."""
    shards = max(1, tensors // ranks)
    plans = []
    for rank in range(ranks):
        whole = [item(f"state_dict.all.{i}", 64, 0, 64) for i in range(per_rank)]
        own = [
            item(f"state_dict.part.{i}", 64, 64 * (rank % 8), 512)
            for i in range(rank // 8 * shards, (rank // 8 + 1) * shards)
        ]
        paths = {entry.index.fqn: ("state_dict", entry.index.fqn[11:]) for entry in whole + own}
        plans.append(SavePlan(whole + own, planner_data=paths))
    return plans


def results_of(plans: list[SavePlan]) -> list[list[Any]]:
    found = []
    for rank, plan in enumerate(plans):
        of_rank = []
        for number, entry in enumerate(plan.items):
            name = f"__{rank}_{number % 2}.distcp"
            place = _StorageInfo(name, number * 20_000, 18_000)
            of_rank.append(
                ShardResult(entry.index, 18_000, place, name, FileRecord(1 << 30, "crc32:0"))
            )
        found.append(of_rank)
    return found


def timed(steps: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = action()
    steps[name] = round(time.perf_counter() - began, 4)
    return result


def measure(ranks: int, tensors: int, per_rank: int) -> dict[str, Any]:
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="air-bench-") as folder:
        planner, writer = SavePlanner(), UCVolumeWriter(folder)
        planner.set_up_planner({}, None, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans = local_plans(ranks, tensors, per_rank)
        entries = sum(len(plan.items) for plan in plans)
        plans, metadata = timed(steps, "torch_plan", lambda: planner.create_global_plan(plans))
        plans = timed(steps, "prepare", lambda: writer.prepare_global_plan(plans))
        results = results_of(plans)
        timed(steps, "finish", lambda: writer.finish(metadata, results))
        reader = UCVolumeReader(folder)
        read = timed(
            steps, "read", lambda: reader.set_up_storage_reader(reader.read_metadata(), True)
        )
        assert read is None
        written = sum(len(plan.items) for plan in plans)
        assert len(metadata.storage_data) == written
        with open(f"{folder}/{METADATA}", "rb") as file:
            metadata_bytes = len(file.read())
        with open(f"{folder}/{MANIFEST}", "rb") as file:
            manifest = file.read()
        assert len(Manifest.from_bytes(manifest, folder).files) == 2 * ranks + 1
    shares = [len(plan.items) for plan in plans]
    return {
        "ranks": ranks,
        "entries": entries,
        "written": written,
        "largest_share": round(max(shares) * ranks / written, 3),
        "metadata_bytes": metadata_bytes,
        "manifest_bytes": len(manifest),
        "seconds": steps,
    }


def local_plan_s(tensors: int) -> float:
    state = {f"state_dict.{i}": torch.ones(1) for i in range(tensors)}
    planner = SavePlanner()
    began = time.perf_counter()
    planner.set_up_planner(state, None, is_coordinator=False)
    plan = planner.create_local_plan()
    assert len(plan.items) == tensors
    return round(time.perf_counter() - began, 4)


def growth(small: dict[str, Any], large: dict[str, Any], steps: tuple[str, ...]) -> float:
    per_entry = [
        sum(size["seconds"][step] for step in steps) / size["entries"] for size in (small, large)
    ]
    return round(per_entry[1] / per_entry[0], 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs=2, default=(256, 1024))
    parser.add_argument("--tensors", type=int, default=10_000, help="sharded ones")
    parser.add_argument("--shared", type=int, default=100, help="whole ones, on each rank")
    args = parser.parse_args()
    small, large = (
        measure(ranks, args.tensors * ranks // max(args.ranks), args.shared) for ranks in args.ranks
    )
    line = {
        "benchmark": "scale",
        "torch": torch.__version__,
        "sizes": [small, large],
        "local_plan_s": {n: local_plan_s(n) for n in (args.tensors // 10, args.tensors)},
        "growth": {
            "ours": growth(small, large, OURS),
            "torch": growth(small, large, ("torch_plan",)),
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
