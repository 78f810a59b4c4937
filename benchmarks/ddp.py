"""A save of two ranks under DDP against that of one, where each writer has its own bandwidth.

Ranks are processes with gloo between them, and a Trainer each. They save through a file system of
this benchmark's own that takes ``--writer-mb-s`` of each process: so the target is not what limits,
as on object stores and volumes, and sharing the writing out is what can be seen. Each round trains
with one rank and with two, in turn. The training stands still until a save is complete.

Prints one JSON line: per number of ranks, medians over all saves of rank 0, in seconds:

``first_s``     the call of the first save of a training
``stall_s``     the call of a later one: shared out, each rank copies its part
``complete_s``  from the call until ``.metadata`` is there, by its own time
``staged_mb``   what rank 0 staged and wrote

and ``ratios`` of two ranks to one. ``--frozen`` freezes all weights but the last layer's.
"""

import argparse
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from functools import partial
from typing import Any

import fsspec
import torch
from common import in_turns, medians, ratio
from fsspec.implementations.local import LocalFileSystem
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from save import LAYER_STATE_MB, MB, Model

from air_lightning import AirCheckpointIO
from ranks import run_ranks

QUIET_STEPS = 12  # in the first the optimizer's state is made, and memory to stage it


class Throttled(LocalFileSystem):
    """The local disk, as if each process had a line of its own to it."""

    protocol = "throttled"
    bytes_per_s = 0.0
    lock = threading.Lock()
    free_at = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol(path.removeprefix("throttled://"))

    def _pass(self, size: int) -> None:
        with self.lock:
            cls = type(self)
            cls.free_at = max(time.monotonic(), cls.free_at) + size / self.bytes_per_s
            until = cls.free_at
        time.sleep(max(0.0, until - time.monotonic()))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with open(lpath, "rb") as source, open(self._strip_protocol(rpath), "wb") as target:
            while piece := source.read(4 << 20):
                target.write(piece)
                self._pass(len(piece))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._pass(len(value))
        with open(self._strip_protocol(path), "wb") as target:
            target.write(value)


class Saves(Callback):
    """Saves after every step that is not quiet, and waits until it is complete."""

    def __init__(self, folder: str, io: AirCheckpointIO) -> None:
        self._folder = folder
        self._io = io
        self.records: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step <= QUIET_STEPS:
            return
        path = f"{self._folder}/step={trainer.global_step}"
        trainer.strategy.barrier()
        began, wall = time.perf_counter(), time.time()
        trainer.save_checkpoint(f"throttled://{path}")
        stall = time.perf_counter() - began
        self._io.wait()
        self.records.append(
            {
                "stall_s": stall,
                "complete_s": os.stat(f"{path}/.metadata").st_mtime - wall,
                "staged_mb": self._io.stats[-1].bytes / MB,
            }
        )
        trainer.strategy.barrier()


def train(args: argparse.Namespace, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    Throttled.bytes_per_s = args.writer_mb_s * MB
    fsspec.register_implementation("throttled", Throttled, clobber=True)
    seed_everything(1, verbose=False)
    io = AirCheckpointIO()
    saves = Saves(folder, io)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=QUIET_STEPS + args.saves,
        plugins=[io],
        callbacks=[saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    layers = max(1, round(args.mb / (LAYER_STATE_MB / 3 if args.frozen else LAYER_STATE_MB)))
    model = Model(layers)
    if args.frozen:
        model.layers[:-1].requires_grad_(False)
    loader = torch.utils.data.DataLoader([torch.randn(1, 512)] * 1000, batch_size=None)
    trainer.fit(model, loader)
    if trainer.global_rank == 0:
        with open(f"{folder}/records", "w") as file:
            first, *later = saves.records
            json.dump([{"first_s": first["stall_s"], **record} for record in later], file)


def measure(args: argparse.Namespace, name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="air-bench-", dir=args.folder) as folder:
        status = run_ranks(
            train, args, int(name), folder, world_size=int(name), log=f"{folder}/log", timeout_s=300
        )
        with open(f"{folder}/log") as log:
            assert not any(status), log.read()[-3000:]
        with open(f"{folder}/records") as file:
            return medians({name: json.load(file)})[name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=300, help="size of the state")
    parser.add_argument("--writer-mb-s", type=float, default=100, help="bandwidth of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="per training, the first not counted")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--folder", help="where to write; default: the temporary directory")
    args = parser.parse_args()
    found = in_turns(["1", "2"], args.rounds, partial(measure, args))
    given = {key: getattr(args, key) for key in ("mb", "writer_mb_s", "rounds", "saves", "frozen")}
    line = {
        "benchmark": "ddp",
        **given,
        "torch": torch.__version__,
        "ranks": medians(found),
        "ratios": {key: ratio(found, "2", "1", key) for key in found["1"][0]},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
