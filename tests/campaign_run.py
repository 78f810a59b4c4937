"""What the kill campaign trains: two ranks, workers, validation, top-k, ``last``, and deletion.

Each attempt adds to one diary per rank: a line where it goes on from, and one for each batch. What
a later attempt did again takes the place of what was done before it::

    diary    start 0 | 0 1 2 3 4 5 6        killed
             start 4 |         4 5 6 7 8    killed before 6 was saved
             start 6 |             6 7 ...
    timeline           0 1 2 3 4 5 6 7 ...
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from air_lightning import AirCheckpointIO, AirResume
from integration.training import Data, Model, Sharded, strategy_of, whole
from integration.training import Run as Strategy

WORLD_SIZE = 2
NUM_WORKERS = 2
FILES, VALIDATION_FILES = 45, 9  # of which the first needs three of padding
BATCH = 2
EPOCHS = 4
SAVE_EVERY = 2
VALIDATE_EVERY = 6  # of twelve batches: each follows a save
STEPS = EPOCHS * -(-FILES // (WORLD_SIZE * NUM_WORKERS * BATCH)) * NUM_WORKERS
TRAIN, VALIDATE = "/Volumes/main/default/train", "/Volumes/main/default/val"


@dataclass(frozen=True)
class Life:
    """One training, however often it is killed.

    Attributes:
        directory: Everything it writes is below this one, but for checkpoints on the volume.
        checkpoints: Where ``ModelCheckpoint`` saves.
        strategy: As in ``integration.training``.
        shares_cache: Whether restarts share a cache; each has a private one otherwise.
    """

    directory: str
    checkpoints: str
    strategy: str = "ddp"
    shares_cache: bool = False

    @property
    def scratch(self) -> str:
        """The temporary directory of its processes."""
        return f"{self.directory}/tmp"

    @property
    def cache(self) -> str | None:
        """The directory of the shared cache."""
        return f"{self.directory}/cache" if self.shares_cache else None

    def diary(self, rank: int) -> str:
        """The file that a rank writes its batches to."""
        return f"{self.directory}/diary-{rank}.jsonl"


class Monitored(Model):
    """Model with a metric that is the same on all ranks: what to keep must be."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, sync_dist=True)
        return loss


class MonitoredSharded(Monitored, Sharded):
    """The same, sharded."""


class Watched(Callback):
    """Writes down where an attempt begins, each batch, and each whole validation."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def _write(self, rank: int, line: dict[str, Any]) -> None:
        with open(self._life.diary(rank), "a") as diary:
            diary.write(json.dumps(line) + "\n")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._write(
            trainer.global_rank,
            {
                "start": loop.total_batch_idx + 1,
                "step": trainer.global_step,
                "from": trainer.ckpt_path,
            },
        )

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {
            "batch": trainer.fit_loop.epoch_loop.total_batch_idx,
            "epoch": trainer.current_epoch,
            "files": list(batch[0]),
            "inputs": batch[1].double().sum().item().hex(),
            "loss": outputs["loss"].item().hex(),
        }
        self._write(trainer.global_rank, line)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            metric = float(trainer.callback_metrics["inputs"]).hex()
            self._write(trainer.global_rank, {"validated": [trainer.global_step, metric]})


def train(life: Life) -> None:
    """One attempt of one rank: resumes by itself, and trains to the end if it may."""
    tempfile.tempdir = life.scratch
    torch.set_num_threads(1)
    seed_everything(7, workers=True, verbose=False)
    data = Data(
        train=TRAIN,
        val=VALIDATE,
        batch_size=BATCH,
        num_workers=NUM_WORKERS,
        pattern="*.txt",
        cache_dir=life.cache,
        min_free_bytes=0,
    )
    model = Monitored() if life.strategy == "ddp" else MonitoredSharded()
    checkpoint = ModelCheckpoint(
        dirpath=life.checkpoints,
        every_n_train_steps=SAVE_EVERY,
        monitor="mean_loss",
        save_top_k=2,
        save_last=True,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=strategy_of(Strategy("", "", world_size=WORLD_SIZE, strategy=life.strategy)),
        max_epochs=EPOCHS,
        val_check_interval=VALIDATE_EVERY,
        plugins=[AirCheckpointIO(timeout_s=60)],
        callbacks=[AirResume(), checkpoint, Watched(life)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    _write_result(life, trainer, model, checkpoint)


def _write_result(life: Life, trainer: Any, model: Any, checkpoint: ModelCheckpoint) -> None:
    def names(paths: Any) -> list[str]:
        return sorted(os.path.basename(str(path)) for path in paths)

    result = {
        "model": whole(dict(model.state_dict())),
        "optimizer": whole(trainer.optimizers[0].state_dict()),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": {name: float(x).hex() for name, x in trainer.callback_metrics.items()},
        "best": names(checkpoint.best_k_models),
        "best_score": float(checkpoint.best_model_score or 0).hex(),
        "last": names([checkpoint.best_model_path, checkpoint.last_model_path]),
        "steps": [trainer.global_step, trainer.current_epoch],
        "generator": torch.get_rng_state(),
    }
    torch.save(result, f"{life.directory}/result-{trainer.global_rank}.pt")


def result(life: Life, rank: int) -> dict[str, Any]:
    """What one rank came to."""
    return torch.load(f"{life.directory}/result-{rank}.pt", weights_only=True)


def lines(life: Life, rank: int) -> Iterator[dict[str, Any]]:
    """A rank's diary."""
    path = Path(life.diary(rank))
    for text in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(text)


def starts(life: Life, rank: int) -> list[dict[str, Any]]:
    """Where the attempts that came to train began."""
    return [line for line in lines(life, rank) if "start" in line]


def timeline(life: Life, rank: int) -> tuple[list[dict[str, Any]], int]:
    """The batches that count, in order, and how many were done again.

    Raises:
        AssertionError: One is missing, or was another one when it was done again.
    """
    counted: list[dict[str, Any]] = []
    dropped: dict[int, dict[str, Any]] = {}
    again = 0
    for line in lines(life, rank):
        if "start" in line:
            begin = line["start"]
            assert begin <= len(counted), f"rank {rank} lost batches {len(counted)} to {begin - 1}"
            dropped |= {old["batch"]: old for old in counted[begin:]}
            again += len(counted) - begin
            del counted[begin:]
        elif "batch" in line:
            number = line["batch"]
            assert number == len(counted), f"rank {rank} trained {number} after {len(counted) - 1}"
            before = dropped.pop(number, line)
            assert before == line, f"rank {rank} did again, differently: {before} then {line}"
            counted.append(line)
    return counted, again


def validations(life: Life, rank: int) -> list[Any]:
    """What the validations came to, by step; one that was run again counts once."""
    return sorted({tuple(line["validated"]) for line in lines(life, rank) if "validated" in line})
