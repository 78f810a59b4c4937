"""A small training run whose every batch is written down, for the tests of exact resume."""

import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import IterableDataset

from air_lightning import AirCheckpointIO, AirDataModule, AirResume
from air_lightning.checkpoint.rng import capture_rng_state

FEATURES = 4


@dataclass(frozen=True)
class Run:
    """What one run is told; the same for every attempt but for the kill."""

    volume: str
    directory: str
    world_size: int = 1
    num_workers: int = 0
    batch_size: int = 2
    has_length: bool = True
    every_n_steps: int = 3
    trainer: tuple[tuple[str, Any], ...] = (("max_epochs", 3),)
    kill_at: int | None = None
    save_at_epoch_end: bool = False
    ckpt_path: str | None = None
    validate: bool = False
    strategy: str = "ddp"  # see ``strategy_of``
    accelerator: str = "cpu"
    elastic: bool = False  # of the data module
    resume_elastic: bool = False  # of AirResume

    @property
    def readers(self) -> list[int]:
        """The ranks that read different files; others read what one of these does."""
        tensor = int(self.strategy.partition("x")[2] or 1) if "x" in self.strategy else 1
        return list(range(0, self.world_size, tensor))

    @property
    def checkpoints(self) -> str:
        return f"{self.directory}/checkpoints"


class WithoutLength(IterableDataset):
    """A Checkpointable that is not ours: it hides everything but its two methods."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Any:
        return iter(self._dataset)

    def state_dict(self) -> dict[str, Any]:
        return self._dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state_dict)


class Data(AirDataModule):
    """Each sample: the file's name, its number, and noise from all three generators."""

    has_length = True

    def decode(self, path: str) -> Any:
        name = os.path.basename(path)
        number = float(Path(path).read_text())
        noise = [random.random(), float(np.random.rand()), *torch.rand(FEATURES - 2).tolist()]
        return name, torch.tensor(noise) + number / 100

    def train_dataset(self) -> Any:
        dataset = super().train_dataset()
        return dataset if self.has_length else WithoutLength(dataset)


class Model(LightningModule):
    """Dropout draws from the training process's generator at every step."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(features, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        _, inputs = batch
        loss = self.layers(inputs).pow(2).mean() + random.random() * 0.01 + np.random.rand() * 0.01
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("inputs", batch[1].double().sum(), on_epoch=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)}]


class Sharded(Model):
    """Parallel in the way that the strategy's mesh says; rows that do not divide.

    Under tensor parallel the last layer is whole on every rank, and the buffer always is.
    """

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(features, 10),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(10, 7),
            torch.nn.Linear(7, 1),
        )
        self.register_buffer("unit", torch.ones(3))

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.layers[0].weight, DTensor):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(
                self.layers, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
        if data.size() > 1:
            fully_shard(self.layers[0], mesh=data)
            fully_shard(self.layers, mesh=data)


class FsdpOnCpu(FSDPStrategy):
    """FSDP1 on gloo ranks: Lightning refuses FSDPStrategy itself without GPUs, not a subclass."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Diary(Callback):
    """Writes a line for each batch that was trained on, and kills the run at a given batch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.run.kill_at:
            trainer.strategy.checkpoint_io.wait()
            os.killpg(0, signal.SIGKILL)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {
            "rank": trainer.global_rank,
            "batch": trainer.fit_loop.epoch_loop.total_batch_idx,
            "epoch": trainer.current_epoch,
            "files": list(batch[0]),
            "inputs": batch[1].double().sum().item().hex(),
            "loss": outputs["loss"].item().hex(),
        }
        with open(f"{self.run.directory}/diary-{trainer.global_rank}.jsonl", "a") as diary:
            diary.write(json.dumps(line) + "\n")


class Validated(Callback):
    """Writes a line for each validation: the epoch, and the sum of what was validated on."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        line = [trainer.current_epoch, float(trainer.callback_metrics["inputs"]).hex()]
        with open(f"{self.run.directory}/validated.jsonl", "a") as validated:
            validated.write(json.dumps(line) + "\n")


def strategy_of(run: Run) -> Any:
    """``ddp``, ``fsdp1``, or ``<data parallel>x<tensor parallel>`` for ModelParallelStrategy."""
    if run.strategy == "ddp":
        return "ddp" if run.world_size > 1 else "auto"
    if run.strategy == "fsdp1":
        kind = FsdpOnCpu if run.accelerator == "cpu" else FSDPStrategy
        return kind(auto_wrap_policy={torch.nn.Linear})
    data, tensor = map(int, run.strategy.split("x"))
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


def whole(state: Any) -> Any:
    """Each sharded tensor as the whole one, through dicts and lists; some on rank 0 alone."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, ShardedTensor):
        gathered = torch.zeros(state.size())
        state.gather(0, gathered if torch.distributed.get_rank() == 0 else None)
        return gathered
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(item) for item in state] if isinstance(state, list) else state


def train(run: Run, *, extra: Sequence[Callback] = (), save_on_exception: bool = False) -> None:
    """One attempt: resumes by itself, trains to the end or to its kill."""
    os.makedirs(run.directory, exist_ok=True)
    torch.set_num_threads(1)
    seed_everything(7, workers=True, verbose=False)
    data = Data(
        train=run.volume,
        val=run.volume if run.validate else None,
        batch_size=run.batch_size,
        num_workers=run.num_workers,
        pattern="*.txt",
        elastic=run.elastic,
    )
    data.has_length = run.has_length
    model = Sharded() if run.strategy != "ddp" else Model()
    checkpoint = ModelCheckpoint(
        dirpath=run.checkpoints,
        every_n_train_steps=None if run.save_at_epoch_end else run.every_n_steps,
        every_n_epochs=1 if run.save_at_epoch_end else None,
        save_top_k=-1,
        # Lightning 2.5 has no such option.
        **({"save_on_exception": True} if save_on_exception else {}),
    )
    trainer = Trainer(
        accelerator=run.accelerator,
        devices=run.world_size,
        strategy=strategy_of(run),
        plugins=[AirCheckpointIO()],
        callbacks=[AirResume(elastic=run.resume_elastic), checkpoint, Diary(run), *extra],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **dict(run.trainer)},
    )
    trainer.fit(model, datamodule=data, ckpt_path=run.ckpt_path)
    optimizer = trainer.optimizers[0].state_dict()
    if run.strategy == "fsdp1":  # what the parameters of the module are now is FSDP1's own affair
        model_state = whole(trainer.strategy.lightning_module_state_dict())
        optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    else:
        model_state = whole(dict(model.state_dict()))
    result = {"model": model_state, "optimizer": whole(optimizer)}
    torch.save(result, f"{run.directory}/result-{trainer.global_rank}.pt")
    torch.save(capture_rng_state(), f"{run.directory}/generators-{trainer.global_rank}.pt")


def diary(run: Run) -> dict[tuple[int, int], dict[str, Any]]:
    """What was trained on, by (rank, batch); what was done again must have been the same."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in range(run.world_size):
        for text in Path(f"{run.directory}/diary-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            known = lines.setdefault((line["rank"], line["batch"]), line)
            assert known == line, f"done again, differently: {known} then {line}"
    return lines


def result(run: Run, rank: int = 0) -> dict[str, Any]:
    """The final weights and optimizer state of one rank."""
    return torch.load(f"{run.directory}/result-{rank}.pt", weights_only=True)


def generators(run: Run, rank: int = 0) -> dict[str, Any]:
    """Where the random generators of one rank stood in the end."""
    return torch.load(f"{run.directory}/generators-{rank}.pt", weights_only=True)


def assert_same(got: Any, wanted: Any, where: str = "") -> None:
    """Bit for bit, through nested dicts and lists."""
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, where
        assert torch.equal(got, wanted), f"{where}: {got} is not {wanted}"
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(got[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for index, (left, right) in enumerate(zip(got, wanted, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert got == wanted, where
