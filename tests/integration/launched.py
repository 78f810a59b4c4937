"""A small training run for any launcher to start: a function for forked ranks, else this script.

``python launched.py '<a Job as JSON>'`` is one process of it. Which rank it is, and of how many,
the launcher says.
"""

import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from air_lightning import (
    AirCheckpointIO,
    AirResume,
    DataLoader,
    UCVolumeReader,
    UCVolumeWriter,
    capture_rng_state,
    find_latest_valid,
    restore_rng_state,
)
from integration.training import Data, Diary, Model, Run

CACHE_VARIABLE = "TEST_NODE_CACHE"  # a node's own local disk
SAVE_EVERY = 3


@dataclass(frozen=True)
class Job:
    """What every process of a job is told.

    Attributes:
        volume: Path of the files.
        directory: Where checkpoints and results go.
        devices: Ranks on each node.
        nodes: How many.
        strategy: Of the Trainer.
        kill_rank: The rank whose process kills itself, in its first start only.
        kill_at: Before it trains on that batch of the run.
        kill_with: The signal.
        loop: ``trainer`` or ``fabric``.
    """

    volume: str
    directory: str
    devices: int = 2
    nodes: int = 1
    strategy: str = "ddp"
    kill_rank: int | None = None
    kill_at: int = 8
    kill_with: int = signal.SIGKILL
    loop: str = "trainer"

    @property
    def run(self) -> Run:
        """For ``training.diary`` and ``training.result``."""
        return Run(self.volume, self.directory, world_size=self.devices * self.nodes)

    @property
    def checkpoints(self) -> str:
        return f"{self.directory}/checkpoints"

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def kill_if_due(self, rank: int, batch: int, published: Any) -> None:
        """Kill this process, once in the job: when a checkpoint is there to go on from."""
        mark = f"{self.directory}/killed"
        if (rank, batch) != (self.kill_rank, self.kill_at) or os.path.exists(mark):
            return
        published()
        with open(mark, "w"):
            pass
        os.kill(os.getpid(), self.kill_with)


class Killer(Callback):
    """Kills one rank's process, and no other."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        self.job.kill_if_due(trainer.global_rank, done, trainer.strategy.checkpoint_io.wait)


class Keeper(Callback):
    """Keeps what a rank ended with: its process may be one that only the launcher knows."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_end(self, trainer: Any, module: Any) -> None:
        keep(self.job, trainer.global_rank, module, trainer.optimizers[0])
        statistics = trainer.train_dataloader.statistics()
        with open(f"{self.job.directory}/statistics-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps({"cache": os.environ.get(CACHE_VARIABLE), **statistics}) + "\n")


def keep(job: Job, rank: int, model: Any, optimizer: Any) -> None:
    """Write the file that ``training.result`` reads."""
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{job.directory}/result-{rank}.pt")


def data_of(job: Job) -> Data:
    return Data(
        train=job.volume,
        batch_size=2,
        num_workers=2,
        pattern="*.txt",
        cache_dir=os.environ.get(CACHE_VARIABLE),
    )


def start(job: Job) -> None:
    """One process of one start of the job."""
    torch.set_num_threads(1)
    os.makedirs(job.directory, exist_ok=True)
    seed_everything(7, workers=True, verbose=False)
    if job.loop == "fabric":
        train_with_fabric(job)
    else:
        train_with_trainer(job)


def train_with_trainer(job: Job) -> None:
    save = ModelCheckpoint(dirpath=job.checkpoints, every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=job.devices,
        num_nodes=job.nodes,
        strategy=job.strategy,
        plugins=[AirCheckpointIO()],
        callbacks=[AirResume(), save, Diary(job.run), Killer(job), Keeper(job)],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, datamodule=data_of(job))
    # In the process that started the ranks, where they were started by the Trainer.
    torch.save(dict(model.state_dict()), f"{job.directory}/parent-{trainer.global_rank}.pt")


class FabricLoop:
    """A loop of one's own under Fabric: asynchronous saves, and per rank loader and generators."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fabric = Fabric()  # what `fabric run` was told; it launches, so this must not
        model = Forward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader = DataLoader(data_of(job).train_dataset(), batch_size=2, num_workers=2)
        self.saves = dist.new_group(backend="gloo")
        self.saving: Any = None
        self.step = 0

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model.module, self.optimizer.optimizer)
        rank = self.fabric.global_rank
        return {
            "model": weights,
            "optim": moments,
            "step": self.step,
            f"loader.{rank}": json.dumps(self.loader.state_dict()),
            f"rng.{rank}": capture_rng_state(),
        }

    def save(self) -> None:
        self.published()
        writer = UCVolumeWriter(f"{self.job.checkpoints}/step_{self.step}", global_step=self.step)
        self.saving = dcp.async_save(self.state(), storage_writer=writer, process_group=self.saves)

    def published(self) -> None:
        if self.saving is not None:
            self.saving.result()

    def resume(self) -> None:
        latest = find_latest_valid(self.job.checkpoints) if self.fabric.is_global_zero else None
        latest = self.fabric.broadcast(latest)
        if latest is None:
            return
        state = self.state()
        dcp.load(state, storage_reader=UCVolumeReader(latest))
        set_state_dict(
            self.model.module,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        self.step = state["step"]
        rank = self.fabric.global_rank
        self.loader.load_state_dict(json.loads(state[f"loader.{rank}"]))
        restore_rng_state(state[f"rng.{rank}"])

    def train(self) -> None:
        rank = self.fabric.global_rank
        while (epoch := self.loader.epoch) < 3:
            for names, inputs in self.loader:
                self.job.kill_if_due(rank, self.step, self.published)
                loss = self.model(inputs).pow(2).mean() + random.random() * 0.01
                self.optimizer.zero_grad()
                self.fabric.backward(loss)
                self.optimizer.step()
                self.step += 1
                note(self.job, rank, self.step, epoch, names, inputs, loss)
                if self.step % SAVE_EVERY == 0:
                    self.save()
        self.published()
        keep(self.job, rank, self.model.module, self.optimizer.optimizer)


def note(
    job: Job, rank: int, step: int, epoch: int, names: Any, inputs: torch.Tensor, loss: Any
) -> None:
    """A line of ``training.diary``."""
    line = {"rank": rank, "batch": step, "epoch": epoch, "files": list(names)}
    line |= {"inputs": inputs.double().sum().item().hex(), "loss": loss.item().hex()}
    with open(f"{job.directory}/diary-{rank}.jsonl", "a") as diary:
        diary.write(json.dumps(line) + "\n")


class Forward(Model):
    """Under Fabric a model is called, not asked for a training step."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def train_with_fabric(job: Job) -> None:
    loop = FabricLoop(job)
    loop.resume()
    loop.train()


if __name__ == "__main__":
    start(Job(**json.loads(sys.argv[1])))
