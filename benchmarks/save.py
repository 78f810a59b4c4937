"""How long a save stops the training: AirCheckpointIO against Lightning's own and torch's.

Each round trains the same model once per contender, in turn, so that whatever else the machine
does meets all of them. Within a training, some steps without a save give the quiet step time;
then each save is followed by steps until it is complete.

Prints one JSON line. Per contender, medians over all saves, in seconds:

``first_stall_s``  the call of the first save of a training: buffers are made here
``stall_s``        the call of a later save
``slowdown_s``     that call, and what the steps took longer than quiet ones until completion
``complete_s``     from the call to completion: ``.metadata`` is published, or Lightning's executor
                   is idle (Lightning does not fsync)

and ``ratios`` of ours to each other contender's. Beside what can save, ``copy`` copies the tensors
into buffers that it keeps, by torch's ``copy_``, and does no more: the least that a call takes.
"""

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from air_lightning import AirCheckpointIO

MB = 1_000_000
Check = Callable[[], bool]
LAYER_STATE_MB = 3 * 512 * 512 * 4 / MB  # weights and two moments


class Model(LightningModule):
    """Linear layers without bias, 1 MB of weights each, trained by AdamW."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(Callback):
    """Saves every time the last save is complete, and times the calls and the steps."""

    def __init__(self, folder: str, saves: int, quiet_steps: int, complete: Any) -> None:
        self._folder = folder
        self._saves_left = saves
        self._quiet_left = quiet_steps
        self._completion = complete
        self._complete: Check = bool
        self._began = 0.0
        self._quiet: list[float] = []
        self._since: list[float] = []
        self._path = ""
        self._called = 0.0
        self._stall = 0.0
        self.records: list[dict[str, float]] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        took = time.perf_counter() - self._began
        if self._quiet_left:
            self._quiet_left -= 1
            if batch_idx >= 2:  # the first steps make the optimizer's state
                self._quiet.append(took)
            return
        if self._path:
            self._since.append(took)
            if not self._complete():
                return
            self._record()
        if self._saves_left:
            self._saves_left -= 1
            self._save(trainer, batch_idx)
        else:
            trainer.should_stop = True

    def _save(self, trainer: Any, batch_idx: int) -> None:
        self._path = os.path.join(self._folder, f"step={batch_idx}.ckpt")
        self._since = []
        self._called = time.perf_counter()
        trainer.save_checkpoint(self._path)
        self._stall = time.perf_counter() - self._called
        self._complete = self._completion(trainer, self._path)

    def _record(self) -> None:
        slower = sum(self._since) - len(self._since) * median(self._quiet)
        self.records.append(
            {
                "stall_s": self._stall,
                "slowdown_s": self._stall + max(slower, 0.0),
                "complete_s": time.perf_counter() - self._called,
            }
        )
        remove = shutil.rmtree if os.path.isdir(self._path) else os.remove
        remove(self._path)


class CopyIO(TorchCheckpointIO):
    """Copies tensors into buffers that it keeps, and makes the directory that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []

    @override
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor)]
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        os.mkdir(path)


class DcpIO(TorchCheckpointIO):
    """torch's own asynchronous save, from a thread."""

    last: Any = None

    @override
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.last is not None:
            self.last.result()
        self.last = dcp.async_save(checkpoint, checkpoint_id=path, no_dist=True)


def published(_trainer: Any, path: str) -> Check:
    return lambda: os.path.exists(os.path.join(path, ".metadata"))


def executor_idle(trainer: Any, _path: str) -> Check:
    # AsyncCheckpointIO says nowhere that a save is done; its executor works in order.
    after: Check = trainer.strategy.checkpoint_io._executor.submit(int).done
    return after


def at_once(_trainer: Any, _path: str) -> Check:
    return lambda: True


CONTENDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, str], Check]]] = {
    "air": (AirCheckpointIO, published),
    "lightning_async": (lambda: AsyncCheckpointIO(TorchCheckpointIO()), executor_idle),
    "lightning_sync": (TorchCheckpointIO, at_once),
    "dcp_async": (DcpIO, published),
    "copy": (CopyIO, at_once),
}


def measure(name: str, args: argparse.Namespace) -> list[dict[str, float]]:
    make_io, complete = CONTENDERS[name]
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory(prefix="air-bench-", dir=args.folder) as folder:
        saves = Saves(folder, args.saves, args.quiet_steps, complete)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            plugins=[make_io()],
            callbacks=[saves],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        batches = [torch.randn(4, 512)] * 100_000
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        trainer.fit(Model(max(1, round(args.mb / LAYER_STATE_MB))), loader)
        return saves.records


def summary(rounds: list[list[dict[str, float]]]) -> dict[str, float]:
    later = [record for records in rounds for record in records[1:]]
    found = {"first_stall_s": median(records[0]["stall_s"] for records in rounds)}
    found |= {key: median(record[key] for record in later) for key in later[0]}
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=300, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="per training")
    parser.add_argument("--quiet-steps", type=int, default=12)
    parser.add_argument("--folder", help="where to write; default: the temporary directory")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rounds: dict[str, list[Any]] = {name: [] for name in args.contenders}
    for number in range(args.rounds):
        # Each round begins with another contender: none always comes first.
        turn = number % len(args.contenders)
        for name in args.contenders[turn:] + args.contenders[:turn]:
            rounds[name].append(measure(name, args))
    found = {name: summary(records) for name, records in rounds.items()}
    line: dict[str, Any] = {
        "benchmark": "save",
        "state_mb": args.mb,
        "rounds": args.rounds,
        "saves": args.saves,
        "torch": torch.__version__,
        "contenders": found,
    }
    if "air" in found:
        line["ratios"] = {
            name: {key: round(found["air"][key] / value, 3) for key, value in other.items()}
            for name, other in found.items()
            if name != "air"
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
