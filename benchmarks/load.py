"""Loading a DCP checkpoint in place: UCVolumeReader against the raw bytes and torch's own reader.

One state is saved by our writer and by torch's. Each round every contender loads into the same
tensors, in turn (``common.py``), and the page cache is warm. With ``--fuse`` they read
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
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import in_turns, least, medians, place, ratio, resident, timed

from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.planner import LoadPlanner, load, save

State = dict[str, torch.Tensor]


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


def measure(name: str, folder: str, state: State, fuse: bool) -> dict[str, float]:
    with place(folder, fuse) as where:
        return timed(lambda: CONTENDERS[name](where, state))


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
    with tempfile.TemporaryDirectory(prefix="air-bench-", dir=args.folder) as folder:
        write_all(folder, saved)
        for name in CONTENDERS:  # whose first load would pay for what is made once
            measure(name, folder, state, args.fuse)
        found = in_turns(
            list(CONTENDERS), args.rounds, lambda name: measure(name, folder, state, args.fuse)
        )
        for value in state.values():
            value.zero_()
        with peak() as grown:
            load_air(folder, state)
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    line: dict[str, Any] = {
        "benchmark": "load",
        **{key: getattr(args, key) for key in ("mb", "tensors", "rounds", "fuse")},
        "torch": torch.__version__,
        "contenders": medians(found),
        "least": {
            "load": least(found, "air", "raw"),
            "load_verify": least(found, "air_verify", "raw"),
        },
        "ratios": {
            "load": ratio(found, "air", "raw"),
            "load_verify": ratio(found, "air_verify", "raw"),
            "against_dcp": ratio(found, "air", "dcp"),
            "peak": round(grown[0] / (args.mb * 1e6), 3),
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
