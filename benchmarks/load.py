"""Loading a DCP checkpoint in place: UCVolumeReader against the raw bytes and torch's own reader.

One state is saved by our writer and by torch's. Each round every contender loads into the same
tensors, in turn; none always comes first, and the page cache is warm. With ``--fuse`` they read
through a mount of our own on which each open takes 20 ms (the kernel's cache of it is dropped by
mounting anew for each load).

Prints one JSON line: medians in seconds, CPU seconds of this process, and ``ratios``:

``load``         ours / reading the same bytes of the same number of files into the same memory
``load_verify``  the same with ``verify=True``: every byte through a checksum
``against_dcp``  ours / torch's ``FileSystemReader`` on what torch's writer wrote
``peak``         memory in use at the most beyond the loaded tensors, in bytes / those tensors
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.planner import LoadPlanner, load, save

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests", "fuse"))

from slow_mount import slow_mount  # noqa: E402 - found by the line above

State = dict[str, torch.Tensor]
PAGE = os.sysconf("SC_PAGE_SIZE")


def write_all(folder: str, state: State) -> None:
    save(dict(state), UCVolumeWriter(f"{folder}/air"), process_group=None, no_dist=True)
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(f"{folder}/dcp"), no_dist=True)


def load_air(folder: str, state: State, *, verify: bool = False) -> None:
    reader = UCVolumeReader(f"{folder}/air", verify=verify)
    planner = LoadPlanner(weights_only=True)
    load(dict(state), reader, planner, process_group=None, no_dist=True)


def load_dcp(folder: str, state: State) -> None:
    reader = dcp.FileSystemReader(f"{folder}/dcp")
    dcp.load(dict(state), storage_reader=reader, no_dist=True)


def load_raw(folder: str, state: State) -> None:
    """Read as many bytes of our shards into the tensors, a thread for each file."""
    names = sorted(name for name in os.listdir(f"{folder}/air") if name.endswith(".distcp"))
    tensors = list(state.values())
    shares = [tensors[i :: len(names)] for i in range(len(names))]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(_raw, [f"{folder}/air/{name}" for name in names], shares))


def _raw(path: str, tensors: list[torch.Tensor]) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.numpy()).cast("B")
            while view and (count := file.readinto(view)):
                view = view[count:]


CONTENDERS: dict[str, Callable[[str, State], None]] = {
    "raw": load_raw,
    "air": load_air,
    "air_verify": lambda folder, state: load_air(folder, state, verify=True),
    "dcp": load_dcp,
}


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Sample the resident memory of this process, and leave its growth in the list."""
    before, grown, done = resident(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            grown[0] = max(grown[0], resident() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield grown
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def place(folder: str, fuse: bool) -> Iterator[str]:
    if not fuse:
        yield folder
        return
    with slow_mount(folder, open_delay_s=0.02) as mount:
        yield str(mount)


def measure(name: str, folder: str, state: State, fuse: bool) -> dict[str, float]:
    with place(folder, fuse) as where:
        began, used = time.perf_counter(), cpu()
        CONTENDERS[name](where, state)
        return {"s": time.perf_counter() - began, "cpu_s": cpu() - used}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=256)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--folder", help="where to write; default: the temporary directory")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    size = int(args.mb * 250_000 / args.tensors)
    saved = {f"state_dict.t{i}": torch.randn(size) for i in range(args.tensors)}
    state = {key: torch.zeros_like(value) for key, value in saved.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="air-bench-", dir=args.folder) as folder:
        write_all(folder, saved)
        names = list(CONTENDERS)
        for number in range(args.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                rounds[name].append(measure(name, folder, state, args.fuse))
        for value in state.values():
            value.zero_()
        with peak() as grown:
            load_air(folder, state)
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    found = {
        name: {key: round(median(r[key] for r in records), 4) for key in records[0]}
        for name, records in rounds.items()
    }
    line: dict[str, Any] = {
        "benchmark": "load",
        **{key: getattr(args, key) for key in ("mb", "tensors", "rounds", "fuse")},
        "torch": torch.__version__,
        "contenders": found,
        "ratios": {
            "load": round(found["air"]["s"] / found["raw"]["s"], 3),
            "load_verify": round(found["air_verify"]["s"] / found["raw"]["s"], 3),
            "against_dcp": round(found["air"]["s"] / found["dcp"]["s"], 3),
            "peak": round(grown[0] / (args.mb * 1e6), 3),
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
