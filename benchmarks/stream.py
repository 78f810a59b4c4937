"""Files per second from a slow mount: air_lightning's loader against torch's, same workers.

A folder of random files is mounted through FUSE with a delay per open, as a volume has. In each
round every contender makes two passes over a mount of its own, in turn: the first reads the mount,
the second may read a cache.

Prints one JSON line. Per contender, medians over the rounds:

``first_batch_s``  from ``iter(loader)`` to the first batch, workers started in between
``cold_files_s``   files per second of the first pass, that start included
``warm_files_s``   files per second of the second pass

and ``ratios`` of air's to torch's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.utils.data

import air_lightning

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests", "fuse"))


def read(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


class Files(torch.utils.data.Dataset[int]):
    """What one would write without air_lightning: the list of paths, each read when asked for."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(entry.path for entry in os.scandir(folder))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return read(self.paths[index])


def torch_loader(folder: str, args: argparse.Namespace) -> Any:
    return torch.utils.data.DataLoader(
        Files(folder),
        batch_size=args.batch_size,
        num_workers=args.workers,
        prefetch_factor=4,
        persistent_workers=True,
    )


def air_loader(folder: str, args: argparse.Namespace) -> Any:
    files = air_lightning.UCVolumeDataset(f"file://{folder}")
    return air_lightning.DataLoader(
        files.map(read), batch_size=args.batch_size, num_workers=args.workers
    )


CONTENDERS: dict[str, Callable[[str, argparse.Namespace], Any]] = {
    "torch": torch_loader,
    "air": air_loader,
}


def write_files(folder: str, count: int, size: int) -> None:
    for number in range(count):
        with open(os.path.join(folder, f"{number:06d}.bin"), "wb") as file:
            file.write(os.urandom(size))


def one_pass(loader: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds until the first batch and until the last; checks that every byte came."""
    began = time.perf_counter()
    first, seen = 0.0, 0
    for batch in loader:
        first = first or time.perf_counter() - began
        seen += int(batch.sum())
    took = time.perf_counter() - began
    if seen != args.files * args.kb * 1000:
        raise RuntimeError(f"{seen} bytes were delivered, of {args.files * args.kb * 1000}")
    return first, took


def measure(name: str, source: str, args: argparse.Namespace) -> dict[str, float]:
    from slow_mount import slow_mount

    with slow_mount(source, open_delay_s=args.open_ms / 1000) as folder:
        loader = CONTENDERS[name](folder, args)
        first, cold = one_pass(loader, args)
        _, warm = one_pass(loader, args)
        del loader  # ends its workers, which keep the mount busy
    return {
        "first_batch_s": first,
        "cold_files_s": args.files / cold,
        "warm_files_s": args.files / warm,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--kb", type=int, default=100, help="size of a file")
    parser.add_argument("--open-ms", type=float, default=20, help="delay of each open")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    names = list(CONTENDERS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="air-bench-") as source:
        write_files(source, args.files, args.kb * 1000)
        for number in range(args.rounds):
            # Each round begins with another contender: none always comes first.
            for name in names if number % 2 == 0 else names[::-1]:
                found[name].append(measure(name, source, args))
    medians = {
        name: {key: round(median(r[key] for r in rounds), 4) for key in rounds[0]}
        for name, rounds in found.items()
    }
    ratios = {k: round(medians["air"][k] / medians["torch"][k], 3) for k in medians["air"]}
    sizes = vars(args)
    print(json.dumps({"benchmark": "stream", **sizes, "contenders": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
