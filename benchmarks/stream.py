"""Loading through a slow FUSE mount: air_lightning against what one would write without it.

A folder is mounted through FUSE with a delay per open and a bandwidth, as a volume has. In each
round every contender gets a mount (and a cache) of its own, in turn, and none always comes first.
Sources and caches lie in memory (``--dir``), so that the disk is not what is measured.

Contenders: ``torch`` reads the mount in a map-style dataset; ``copy`` copies each file to a local
cache first, whole and renamed into place, then reads it; ``air`` is ours.

Prints one JSON line per workload, medians over the rounds and ratios to ``torch`` (or to what the
line says):

``small``    many small files: seconds to the first batch (workers started in between), files per
             second of a cold and of a warm pass, opens and stats on the mount per file
``resume``   the same files from the middle of an epoch: first batch to a ``fresh`` start's, files
             that were fetched again
``large``    few large files: seconds to the first batch
``listing``  a tree of many files: seconds, to a ``plain`` scan in 16 threads
``item``     local files, no mount: microseconds an item beyond torch's own loader of names
"""

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data
from common import compared, slow_mount

import air_lightning
from air_lightning.data.listing import take_listing
from air_lightning.volumes.storage import open_storage

LIST_S, ENTRY_S = 0.02, 50e-6
Contender = Callable[[str, int, int], Any]


def read(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


class Files(torch.utils.data.Dataset[int]):
    """The list of paths, each read when asked for."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(entry.path for entry in os.scandir(folder))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return read(self.paths[index])


class CopiedFiles(Files):
    """Each file is copied to a local folder before it is read there."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.cache = tempfile.TemporaryDirectory()

    def __getitem__(self, index: int) -> int:
        path = self.paths[index]
        local = os.path.join(self.cache.name, os.path.basename(path))
        if not os.path.exists(local):
            shutil.copyfile(path, f"{local}.{os.getpid()}")
            os.replace(f"{local}.{os.getpid()}", local)
        return read(local)


class Names(Files):
    """The paths themselves."""

    def __getitem__(self, index: int) -> str:
        return self.paths[index]


def torch_loader(dataset: Any, workers: int, batch_size: int) -> Any:
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        persistent_workers=workers > 0,
    )


def air_loader(folder: str, workers: int, batch_size: int) -> Any:
    files = air_lightning.UCVolumeDataset(f"file://{folder}")
    return air_lightning.DataLoader(files.map(read), batch_size=batch_size, num_workers=workers)


CONTENDERS: dict[str, Contender] = {
    "torch": lambda folder, *rest: torch_loader(Files(folder), *rest),
    "copy": lambda folder, *rest: torch_loader(CopiedFiles(folder), *rest),
    "air": air_loader,
}


@contextmanager
def source(files: int, size: int, folders: int = 0) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="air-bench-") as folder:
        for number in range(folders):
            os.mkdir(f"{folder}/{number:03d}")
        for number in range(files):
            inside = f"{number % folders:03d}/" if folders else ""
            with open(f"{folder}/{inside}{number:06d}.bin", "wb") as file:
                file.write(os.urandom(size))
        yield folder


def mounted(folder: str, args: argparse.Namespace) -> Any:
    return slow_mount(
        folder,
        open_delay_s=args.open_ms / 1000,
        list_delay_s=LIST_S,
        entry_delay_s=ENTRY_S,
        bandwidth=args.mb_per_s * 1e6,
        flush=False,
        attr_timeout_s=1.0,
    )


def one_pass(loader: Any, total: int) -> tuple[float, float]:
    """Seconds until the first batch and until the last; checks that every byte came."""
    began = time.perf_counter()
    first, seen = 0.0, 0
    for batch in loader:
        first = first or time.perf_counter() - began
        seen += int(batch.sum())
    took = time.perf_counter() - began
    if seen != total:
        raise RuntimeError(f"{seen} bytes were delivered, of {total}")
    return first, took


def first_batch(loader: Any) -> float:
    began = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - began


def small(args: argparse.Namespace) -> dict[str, Any]:
    def measure(name: str, folder: str) -> dict[str, float]:
        with mounted(folder, args) as mount:
            loader = CONTENDERS[name](str(mount), args.workers, args.batch_size)
            before = mount.counts()
            first, cold = one_pass(loader, args.files * args.kb * 1000)
            counts = {key: value - before[key] for key, value in mount.counts().items()}
            _, warm = one_pass(loader, args.files * args.kb * 1000)
            del loader  # ends its workers, which keep the mount busy
        return {
            "first_batch_s": first,
            "cold_files_s": args.files / cold,
            "warm_files_s": args.files / warm,
            "opens": counts["open"] / args.files,
            "stats": counts["getattr"] / args.files,
        }

    with source(args.files, args.kb * 1000) as folder:
        return compared(list(CONTENDERS), args.rounds, lambda name: measure(name, folder), "torch")


def resume(args: argparse.Namespace) -> dict[str, Any]:
    half = args.files // args.batch_size // 2

    def measure(name: str, folder: str) -> dict[str, float]:
        with mounted(folder, args) as mount:
            loader = air_loader(str(mount), args.workers, args.batch_size)
            if name == "fresh":
                fresh = first_batch(loader)
                del loader  # ends its workers, before the mount goes
                return {"first_batch_s": fresh, "opened_again": 0.0}
            batches = iter(loader)
            for _ in range(half):
                next(batches)
            state = loader.state_dict()
            del batches, loader
            seen = {path for operation, path in mount.calls() if operation == "open"}
            mark = len(mount.calls())
            loader = air_loader(str(mount), args.workers, args.batch_size)
            loader.load_state_dict(state)
            first = first_batch(loader)
            del loader
            done = args.batch_size * half
            again = {path for operation, path in mount.calls()[mark:] if operation == "open"}
            delivered = sorted(seen)[: done // 2]
        return {"first_batch_s": first, "opened_again": float(len(again & set(delivered)))}

    with source(args.files, args.kb * 1000) as folder:
        names = ["fresh", "resumed"]
        return compared(names, args.rounds, lambda name: measure(name, folder), "fresh")


def large(args: argparse.Namespace) -> dict[str, Any]:
    def measure(name: str, folder: str) -> dict[str, float]:
        with mounted(folder, args) as mount:
            loader = CONTENDERS[name](str(mount), args.workers, 64)
            first = first_batch(loader)
            del loader
        return {"first_batch_s": first}

    with source(args.large_files, 10_000_000) as folder:
        return compared(list(CONTENDERS), args.rounds, lambda name: measure(name, folder), "torch")


def listing(args: argparse.Namespace) -> dict[str, Any]:
    def plain(folder: str) -> int:
        def scan(path: str) -> list[str]:
            return [entry.path for entry in os.scandir(path)]

        with ThreadPoolExecutor(16) as pool:
            return sum(map(len, pool.map(scan, scan(folder))))

    def measure(name: str, folder: str) -> dict[str, float]:
        with mounted(folder, args) as mount:
            began = time.perf_counter()
            if name == "plain":
                count = plain(str(mount))
            else:
                count = len(take_listing(open_storage(f"file://{mount}"), None))
            took = time.perf_counter() - began
        if count != args.listed:
            raise RuntimeError(f"{count} files were listed, of {args.listed}")
        return {"seconds": took}

    with source(args.listed, 1, folders=100) as folder:
        names = ["plain", "air"]
        return compared(names, args.rounds, lambda name: measure(name, folder), "plain")


def item(args: argparse.Namespace) -> dict[str, Any]:
    count = 8000
    with source(count, 1000) as folder:
        names = torch_loader(Names(folder), args.workers, args.batch_size)
        files = air_lightning.UCVolumeDataset(f"file://{folder}")
        ours = air_lightning.DataLoader(files, batch_size=args.batch_size, num_workers=args.workers)
        loaders = {"torch": names, "air": ours}
        for loader in loaders.values():
            for _ in loader:
                pass

        def measure(name: str) -> dict[str, float]:
            began = time.perf_counter()
            for _ in loaders[name]:
                pass
            return {"us_per_item": (time.perf_counter() - began) / count * 1e6}

        return compared(["torch", "air"], 5 * args.rounds, measure, "torch")


WORKLOADS = {f.__name__: f for f in (small, resume, large, listing, item)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--kb", type=int, default=100, help="size of a small file")
    parser.add_argument("--large-files", type=int, default=200)
    parser.add_argument("--listed", type=int, default=100_000)
    parser.add_argument("--open-ms", type=float, default=20, help="latency of each open")
    parser.add_argument("--mb-per-s", type=float, default=200, help="bandwidth of the mount in all")
    parser.add_argument("--workers", type=int, default=8, help="-1 for each loader's own default")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default="/dev/shm", help="where sources and caches lie")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    tempfile.tempdir = args.dir if os.path.isdir(args.dir) else None
    for name in args.workloads:
        found = WORKLOADS[name](args)
        print(json.dumps({"benchmark": f"stream.{name}", **vars(args), **found}), flush=True)


if __name__ == "__main__":
    main()
