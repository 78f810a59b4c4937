"""Writing a DCP checkpoint: AsyncSaver and UCVolumeWriter against the raw bytes and torch's own.

Each round every contender writes the same tensors, in turn (``common.py``), from where staging put
them. With ``--fuse`` they write through a mount of our own, on which each open takes 20 ms.

``raw``        the tensors' bytes in two files and pieces of 8 MB, then fsync
``air``        our writer as the plugin uses it, staging left out: until ``.metadata`` is there
``air_4``      the same with ``thread_count=4``
``dcp``        torch's ``FileSystemWriter``, which syncs as well
``dcp_copy``   the same to the local disk, then copied to the target (with ``--fuse``)

Prints one JSON line: medians in seconds and CPU seconds of this process, and ``ratios``:

``complete``   air / raw, seconds
``cpu``        air / raw, CPU seconds; ours computes checksums, too
``copy``       air / dcp_copy, seconds
``threads``    air_4 / air, seconds

``--flat N`` instead saves N times a state that changes its size now and then, through the saver
with its staging, and prints how much resident memory the saves cost beyond the state.
"""

import argparse
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import in_turns, least, medians, place, ratio, resident, timed

from air_lightning.checkpoint.dcp import UCVolumeWriter
from air_lightning.checkpoint.planner import save
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.staging import Stager

State = dict[str, torch.Tensor]
PIECE = 8 << 20


def write_raw(folder: str, state: State) -> None:
    os.makedirs(folder)
    tensors = list(state.values())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_raw, [f"{folder}/0", f"{folder}/1"], [tensors[::2], tensors[1::2]]))


def _raw(path: str, tensors: list[torch.Tensor]) -> None:
    with open(path, "wb", buffering=PIECE) as file:
        for tensor in tensors:
            view = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(view), PIECE):
                file.write(view[start : start + PIECE])
        file.flush()
        os.fsync(file.fileno())


def write_air(folder: str, state: State, threads: int = 2) -> None:
    writer = UCVolumeWriter(folder, thread_count=threads)
    save(dict(state), writer, process_group=None, no_dist=True)


def write_dcp(folder: str, state: State) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def write_dcp_copy(folder: str, state: State) -> None:
    with tempfile.TemporaryDirectory() as local:
        write_dcp(f"{local}/ckpt", state)
        os.makedirs(folder)
        for name in sorted(os.listdir(f"{local}/ckpt")):
            shutil.copyfile(f"{local}/ckpt/{name}", f"{folder}/{name}")


CONTENDERS: dict[str, Callable[[str, State], None]] = {
    "raw": write_raw,
    "air": write_air,
    "air_4": lambda folder, state: write_air(folder, state, 4),
    "dcp": write_dcp,
    "dcp_copy": write_dcp_copy,
}


def measure(name: str, where: str, state: State) -> dict[str, float]:
    target = f"{where}/{name}"
    record = timed(lambda: CONTENDERS[name](target, state))
    shutil.rmtree(target)
    return record


def compare(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    size = int(args.mb * 250_000 / args.tensors)
    state = Stager().stage({f"state_dict.t{i}": torch.randn(size) for i in range(args.tensors)})
    names = [name for name in CONTENDERS if args.fuse or name != "dcp_copy"]
    with place(folder, args.fuse) as where:
        found = in_turns(names, args.rounds, lambda name: measure(name, where, state))
    ratios = {
        "complete": ratio(found, "air", "raw"),
        "cpu": ratio(found, "air", "raw", "cpu_s"),
        "threads": ratio(found, "air_4", "air"),
    }
    if args.fuse:
        ratios["copy"] = ratio(found, "air", "dcp_copy")
    best = {"complete": least(found, "air", "raw"), "cpu": least(found, "air", "raw", "cpu_s")}
    return {"contenders": medians(found), "ratios": ratios, "least": best}


def flat(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Save again and again; a tenth of the saves have a state of a quarter less."""
    size = int(args.mb * 250_000 / args.tensors)
    full = {f"state_dict.t{i}": torch.ones(size) for i in range(args.tensors)}
    less = dict(list(full.items())[: args.tensors * 3 // 4])
    saver = AsyncSaver(no_dist=True)
    before, grown = resident(), []
    for number in range(args.flat):
        state = less if number % 10 == 5 else full
        target = f"{folder}/{number % 2}"
        saver.save(dict(state), lambda target=target: UCVolumeWriter(target))
        saver.wait()
        grown.append(resident() - before)
    state_bytes = args.mb * 1e6
    return {
        "saves": args.flat,
        "extra_after_2": round(grown[min(1, len(grown) - 1)] / state_bytes, 3),
        "extra_at_end": round(grown[-1] / state_bytes, 3),
        "extra_at_most": round(max(grown) / state_bytes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=256)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--flat", type=int, metavar="N", help="memory over N saves instead")
    parser.add_argument("--folder", help="where to write; default: the temporary directory")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="air-bench-", dir=args.folder) as folder:
        found = flat(args, folder) if args.flat else compare(args, folder)
    given = {key: getattr(args, key) for key in ("mb", "tensors", "rounds", "fuse")}
    print(json.dumps({"benchmark": "write", **given, "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
