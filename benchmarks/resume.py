"""What it costs to go on: choosing and restoring a checkpoint, and the first batch after it.

A folder is mounted through FUSE with a delay per operation, as a volume has. In each round every
contender gets a mount of its own, in turn, and none always comes first. Sources and caches lie in
memory (``--dir``), so that the disk is not what is measured.

Prints one JSON line per workload, medians over the rounds and ratios:

``select``  a root of many checkpoints, of which the newest is real: seconds that choosing and
            loading it takes (``air``) beyond a ``raw`` read of its files in as many threads, and
            the requests of both. Every operation is delayed, reads too.
``start``   seconds from the start of a process to the first batch of ``Trainer.fit``: ``resumed``
            in the middle of an epoch of many files, from a root of many checkpoints on the same
            mount, to a ``fresh`` one; and from the call of ``fit`` alone. Both list the files.
            ``opened_again`` counts files of batches before the checkpoint that were opened.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from common import compared, slow_mount  # first: it says where the next one is found
from slow_mount import Mount

VOLUME = "/Volumes/main/default/bench"
OPERATIONS = ("getattr", "readdir", "open", "read")
ENTRY_S = 50e-6
THREADS = 4  # of our reader


def make_like(folder: str, step: int) -> None:
    """A directory that looks like a whole checkpoint of that step."""
    from air_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest

    path = f"{folder}/epoch={step // 100}-step={step}.ckpt"
    os.mkdir(path)
    manifest = Manifest({"__0_0.distcp": FileRecord(1, None)}, global_step=step)
    for name, data in (
        ("__0_0.distcp", b"x"),
        (MANIFEST, manifest.to_bytes()),
        (METADATA, b"m"),
    ):
        with open(f"{path}/{name}", "wb") as file:
            file.write(data)


def save_real(folder: str, step: int, mb: float) -> str:
    """A checkpoint that AirCheckpointIO saved; returns its path."""
    import torch

    from air_lightning import AirCheckpointIO

    count = 64
    weights = {f"layer{i}.weight": torch.randn(int(mb * 250_000 / count)) for i in range(count)}
    io = AirCheckpointIO()
    path = f"{folder}/epoch={step // 100}-step={step}.ckpt"
    checkpoint = {"global_step": step, "state_dict": weights, "optimizer_states": []}
    io.save_checkpoint(checkpoint, path)
    io.wait()
    io.teardown()
    return path


def load_raw(root: str, name: str) -> int:
    """Read every file of a known checkpoint."""
    folder = f"{root}/{name}"
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(_read, [f"{folder}/{entry}" for entry in os.listdir(folder)]))


def _read(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        total = 0
        while piece := file.read(4 << 20):
            total += len(piece)
    return total


def load_air(root: str, name: str) -> int:
    """Choose the newest and load it, as one rank of a run does that resumes."""
    from air_lightning import AirCheckpointIO, find_latest_valid
    from air_lightning.integrations.located import whole

    chosen = find_latest_valid(root, resumable=True)
    if chosen != f"{root}/{name}":
        raise RuntimeError(f"{chosen} was chosen, and {name} is the newest")
    checkpoint, _ = AirCheckpointIO().load(whole(chosen), None)
    return len(checkpoint["state_dict"])


def select(args: argparse.Namespace) -> dict[str, Any]:
    contenders: dict[str, Callable[[str, str], int]] = {"raw": load_raw, "air": load_air}

    def measure(name: str, folder: str, newest: str) -> dict[str, float]:
        with slow_mount(folder, attr_timeout_s=1.0, entry_delay_s=ENTRY_S, flush=False) as mount:
            mount.delay(**dict.fromkeys(OPERATIONS, args.ms / 1000))
            before = mount.counts()
            began = time.perf_counter()
            contenders[name](str(mount), newest)
            took = time.perf_counter() - began
            counts = {key: count - before[key] for key, count in mount.counts().items()}
        return {"seconds": took, **{key: float(counts[key]) for key in OPERATIONS}}

    with tempfile.TemporaryDirectory(prefix="air-bench-") as folder:
        for step in range(1, args.checkpoints):
            make_like(folder, step)
        newest = os.path.basename(save_real(folder, args.checkpoints, args.mb))
        found = compared(
            list(contenders), args.rounds, lambda name: measure(name, folder, newest), "raw"
        )
    medians = found["contenders"]
    added = medians["air"]["seconds"] - medians["raw"]["seconds"]
    return {**found, "added_s": round(added, 3)}


@contextmanager
def volume(args: argparse.Namespace) -> Iterator[str]:
    """What stands in for /Volumes: files, and runs of which the newest stopped in mid-epoch."""
    with tempfile.TemporaryDirectory(prefix="air-bench-") as root:
        folder = root + VOLUME.removeprefix("/Volumes")
        for number in range(100):
            os.makedirs(f"{folder}/data/{number:03d}")
        for number in range(args.files):
            with open(f"{folder}/data/{number % 100:03d}/{number:06d}.bin", "wb") as file:
                file.write(b"%06d" % number)
        os.makedirs(f"{folder}/runs")
        for step in range(1, min(args.checkpoints, half_of(args))):
            make_like(f"{folder}/runs", step)
        run_child(root, "make", args)
        yield root


def half_of(args: argparse.Namespace) -> int:
    """Batches of half an epoch."""
    half: int = args.files // args.batch_size // 2
    return half


def run_child(root: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run this script once more as one process of training; what it says about its first batch."""
    command = [sys.executable, os.path.abspath(__file__), "--child", name]
    for option in ("files", "workers", "batch_size", "checkpoints", "dir"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    with tempfile.TemporaryDirectory(prefix="air-bench-") as cache:
        environment = {**os.environ, "AIR_VOLUMES_ROOT": root, "TMPDIR": cache}
        environment["AIR_BENCH_BEGAN"] = str(time.time())
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        told = process.stdout.readline()
        if name != "make":  # it has done what is measured, and would train the whole epoch
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not told:
        raise RuntimeError(f"the process {name!r} ended without its first batch")
    found: dict[str, Any] = json.loads(told)
    return found


def child(args: argparse.Namespace) -> None:
    """One process of training, up to its first batch or, to make the checkpoint, half an epoch."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    from air_lightning import AirCheckpointIO, AirDataModule, AirResume

    for noisy in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    half = half_of(args)

    class Data(AirDataModule):
        def decode(self, path: str) -> int:
            with open(path) as file:
                return int(file.read())

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[:1].float().expand(256)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class First(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if args.child == "make":
                return
            now = time.time()
            told = {"process_s": now - float(os.environ["AIR_BENCH_BEGAN"]), "fit_s": now - began}
            print(json.dumps({**told, "step": trainer.global_step}), flush=True)
            signal.pause()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(f"{VOLUME}/runs/epoch={half // 100}-step={half}.ckpt")
            print("{}", flush=True)

    runs = f"{VOLUME}/runs" if args.child == "resumed" else f"{VOLUME}/none"
    data = Data(
        f"{VOLUME}/data", batch_size=args.batch_size, num_workers=args.workers, shuffle=False
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=half if args.child == "make" else -1,
        plugins=[AirCheckpointIO()],
        callbacks=[AirResume(runs), First()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.time()
    trainer.fit(Model(), datamodule=data)


def start(args: argparse.Namespace) -> dict[str, Any]:
    half = half_of(args)

    def measure(name: str, root: str) -> dict[str, float]:
        with slow_mount(
            root,
            open_delay_s=args.ms / 1000,
            list_delay_s=args.ms / 1000,
            entry_delay_s=ENTRY_S,
            flush=False,
            attr_timeout_s=1.0,
        ) as mount:
            told = run_child(str(mount), name, args)
            if told.pop("step") != (half if name == "resumed" else 0):
                raise RuntimeError(f"the {name} process did not begin where it should")
            again = opened(mount) & delivered if name == "resumed" else set()
        return {**told, "opened_again": float(len(again))}

    with volume(args) as root:
        data = root + VOLUME.removeprefix("/Volumes") + "/data"
        names = (f"{part.name}/{e.name}" for part in os.scandir(data) for e in os.scandir(part))
        delivered = set(sorted(names)[: half * args.batch_size])
        return compared(
            ["fresh", "resumed"], args.rounds, lambda name: measure(name, root), "fresh"
        )


def opened(mount: Mount) -> set[str]:
    inside = f"{VOLUME.removeprefix('/Volumes')}/data/"
    return {path.removeprefix(inside) for done, path in mount.calls() if done == "open"}


WORKLOADS = {f.__name__: f for f in (select, start)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--mb", type=float, default=20, help="of the checkpoint that is loaded")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--ms", type=float, default=20, help="latency of each operation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm", help="where sources and caches lie")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.child:
        child(args)
        return
    tempfile.tempdir = args.dir if os.path.isdir(args.dir) else None
    options = {key: value for key, value in vars(args).items() if key != "child"}
    for name in args.workloads:
        found = WORKLOADS[name](args)
        print(json.dumps({"benchmark": f"resume.{name}", **options, **found}), flush=True)


if __name__ == "__main__":
    main()
