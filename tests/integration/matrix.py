"""Many ways to train, each interrupted at many moments, by a few processes.

One uninterrupted run of a case is the reference. It writes a record of everything that a resume
must repeat, and saves at each moment of the case; a fresh Trainer goes on from each of these saves,
in the same process, and what it records must be the rest of the reference's record, bit for bit.
"""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor import DTensor

from air_lightning import AirCheckpointIO, AirDataModule, AirResume
from integration.training import Data, Run, Sharded, strategy_of

Moment = tuple[str, int]  # a hook, and the number of the batch that is the last one then

BATCHES = 5  # of an epoch, on each grid
IN_AN_EPOCH: tuple[Moment, ...] = (
    ("on_train_epoch_start", -1),
    ("on_train_batch_start", 0),
    ("on_train_batch_end", 0),
    ("on_train_batch_end", 2),
    ("on_train_batch_start", 3),
    ("on_train_batch_end", BATCHES - 1),
    ("on_train_epoch_end", BATCHES - 1),
    ("on_train_epoch_start", BATCHES - 1),
    ("on_train_batch_end", BATCHES),
    ("on_train_batch_end", 2 * BATCHES - 1),
    ("on_train_epoch_end", 2 * BATCHES - 1),
)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        trainer: Arguments of the Trainer; three epochs where they say nothing else.
        moments: Where it is interrupted.
        validate: Whether there are validation files.
    """

    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    moments: tuple[Moment, ...] = IN_AN_EPOCH
    model: Callable[[], LightningModule] = Sharded
    data: Callable[..., AirDataModule] = Data
    validate: bool = False
    callbacks: Callable[[], Sequence[Callback]] = tuple
    has_length: bool = True


def digest(value: Any) -> str:
    """A short name for a nest of tensors, shards of this rank, and plain values."""
    found = hashlib.sha1(usedforsecurity=False)
    _feed(found, value)
    return found.hexdigest()[:12]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        found.update(value.tobytes())
    elif isinstance(value, dict):
        for key in value:
            found.update(str(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())


def generators() -> str:
    """Where the three random generators of this process are."""
    return digest([random.getstate(), np.random.get_state(), torch.get_rng_state()])


def state_of(trainer: Any) -> list[Any]:
    """What training has come to."""
    module = trainer.lightning_module
    return [
        trainer.global_step,
        digest(module.state_dict()),
        [digest(_state(optimizer)) for optimizer in trainer.optimizers],
        [digest(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        digest(trainer.precision_plugin.state_dict()),
        digest(getattr(module, "own", None)),
        [digest(average.state_dict()) for average in _averages(trainer)],
    ]


def _state(optimizer: Any) -> Any:
    state = optimizer.state_dict()
    return {**state, "state": dict(sorted(state["state"].items()))}


def _averages(trainer: Any) -> list[Any]:
    found = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    return [average for average in found if average is not None]


def numbers_of(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: float(metrics[name]).hex() for name in sorted(metrics)}


class Record(Callback):
    """Lists what a resume must repeat."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        epoch = trainer.fit_loop.epoch_loop
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        place = ["batch", trainer.current_epoch, batch_idx, epoch.total_batch_idx]
        known = [digest(batch), None if loss is None else loss.item().hex(), generators()]
        metrics = numbers_of(trainer.callback_metrics)
        self.lines.append([*place, *known, *state_of(trainer), metrics])

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.validated.append(digest(batch))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validated = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            metrics = numbers_of(trainer.callback_metrics)
            place = ["validated", trainer.current_epoch, trainer.global_step]
            self.lines.append([*place, self.validated, generators(), metrics])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        metrics = numbers_of(trainer.callback_metrics)
        self.lines.append(["ended", trainer.current_epoch, *state_of(trainer), metrics])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.lines.append(["done", trainer.current_epoch, *state_of(trainer)])


class Lines(Logger):
    """What a logger is told, in the same list."""

    name, version = "lines", 0

    def __init__(self, record: Record) -> None:
        self._record = record

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._record.lines.append(["logged", step, numbers_of(metrics)])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to note."""


class Saves(Callback):
    """Saves at moments, and notes how long the record was then."""

    def __init__(
        self, directory: str, moments: Sequence[Moment], record: Record, *, kill: bool = False
    ) -> None:
        self.directory, self.record, self.kill = directory, record, kill
        self.due = list(moments)
        self.lengths: dict[Moment, int] = {}

    def reach(self, trainer: Any, hook: str) -> None:
        moment = (hook, trainer.fit_loop.epoch_loop.total_batch_idx)
        if moment in self.due and not trainer.sanity_checking:
            self.due.remove(moment)
            self.lengths[moment] = len(self.record.lines)
            trainer.save_checkpoint(path_of(self.directory, moment))
            if self.kill:
                trainer.strategy.checkpoint_io.wait()
                os.killpg(0, signal.SIGKILL)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_train_epoch_start")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_validation_start")

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_validation_batch_start")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_validation_batch_end")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer, "on_train_epoch_end")


def path_of(directory: str, moment: Moment) -> str:
    """Where the save of a moment is."""
    return f"{directory}/{moment[0]}-{moment[1]}.ckpt"


def train(
    case: Case,
    run: Run,
    resume: str | AirResume | None = None,
    moments: Sequence[Moment] = (),
    *,
    kill: bool = False,
) -> tuple[Record, Saves]:
    """One attempt, to its end; saves at moments, and ends the process group at the first."""
    torch.set_num_threads(1)
    seed_everything(7, workers=True, verbose=False)
    if any(name.endswith(".ckpt") for name in os.listdir(run.directory)):
        torch.manual_seed(8)  # what a resume is not given, it must not have by chance
    record = Record()
    saves = Saves(run.directory, moments, record, kill=kill)
    chooses = resume if isinstance(resume, AirResume) else AirResume(f"{run.directory}/none")
    data = case.data(
        train=run.volume,
        val=run.volume if case.validate else None,
        batch_size=2,
        num_workers=run.num_workers,
        pattern="*.txt",
    )
    data.has_length = case.has_length
    trainer = Trainer(
        accelerator="cpu",
        devices=run.world_size,
        strategy=strategy_of(run),
        plugins=[AirCheckpointIO()],
        callbacks=[chooses, *case.callbacks(), record, saves],
        logger=[Lines(record)],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **case.trainer},
    )
    path = resume if isinstance(resume, str) else None
    trainer.fit(case.model(), datamodule=data, ckpt_path=path)
    return record, saves


def compare(case: Case, run: Run) -> list[str]:
    """Run one case, whole and from each of its saves; returns what was not the same."""
    os.makedirs(run.directory, exist_ok=True)
    whole, saves = train(case, run, moments=case.moments)
    faults = [f"{case.name}: no such moment: {moment}" for moment in saves.due]
    for moment, length in saves.lengths.items():
        where = f"{case.name} saved at {moment}"
        try:
            got, _ = train(case, run, path_of(run.directory, moment))
        except Exception as error:
            faults.append(f"{where}: {type(error).__name__}: {error}")
            if run.world_size > 1:
                raise RuntimeError("\n".join(faults)) from error
            continue
        faults += [f"{where}: {fault}" for fault in differences(got.lines, whole.lines[length:])]
    return faults


def differences(got: list[Any], wanted: list[Any]) -> list[str]:
    # What loggers were told of the batch or epoch that was just over came after the save.
    got, wanted = (_without_first_logged(lines) for lines in (got, wanted))
    for index, (left, right) in enumerate(zip(got, wanted, strict=False)):
        if left != right:
            return [f"line {index} of {len(wanted)}:\n   got    {left}\n   wanted {right}"]
    if len(got) != len(wanted):
        rest = got[len(wanted) :] or wanted[len(got) :]
        return [f"{len(got)} lines, {len(wanted)} wanted: {[line[:4] for line in rest]}"]
    return []


def _without_first_logged(lines: list[Any]) -> list[Any]:
    start = next((i for i, line in enumerate(lines) if line[0] != "logged"), len(lines))
    return lines[start:]
