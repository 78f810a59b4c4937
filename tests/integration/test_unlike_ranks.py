"""A checkpoint holds one rank's state, where ranks differ in what is no parameter."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from air_lightning import AirCheckpointIO
from air_lightning.checkpoint.dcp import UCVolumeReader
from integration.training import assert_same, whole
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

FEATURES = 9
_STATISTICS = tuple(f"layers.1.{name}" for name in ("running_mean", "running_var"))
# What is each rank's own after the resume: nothing that hangs on parameters that differ, too.
OWN = {
    "ddp": ("at", *_STATISTICS, "layers.3.running_mean"),
    "ddp-manual": ("at", "view", *_STATISTICS, "layers.3.running_mean"),
    "fsdp2": ("at", *_STATISTICS),
}


class Normed(LightningModule):
    """Running statistics, a buffer that tells the rank, and parameters of every standing."""

    _ddp_params_and_buffers_to_ignore = ("ignored",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear, torch.nn.BatchNorm1d
        self.layers = torch.nn.Sequential(linear(FEATURES, 7), norm(7), linear(7, 5), norm(5))
        self.last = linear(5, 1)
        self.ignored = torch.nn.Parameter(torch.ones(40))
        self.frozen = torch.nn.Parameter(torch.ones(30), requires_grad=False)
        still = [torch.nn.Parameter(torch.ones(400), requires_grad=False) for _ in range(4)]
        self.still = torch.nn.ParameterList(still)
        self.register_buffer("at", torch.zeros(50))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rank = self.global_rank
        self.at.add_(rank + 1.0)
        self.frozen.data.add_(rank)
        loss = self.last(self.layers(batch)).pow(2).mean()
        return loss + (self.ignored * (rank + 1)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Normed):
    """Steps by itself: DDP copies no buffers after the first forward pass of a start."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        # Of views, and of no other rank's business.
        self.register_buffer("view", torch.zeros(1000)[:2])
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.view.add_(self.global_rank)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class OneBatch(IterableDataset[torch.Tensor]):
    """The same batch again and again, another on each rank: no resume can be at a wrong one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(self.rank))
        while True:
            yield batch


class Note(Callback):
    """Keeps this rank's whole state after a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            state = {
                "model": dict(module.state_dict()),
                "moments": trainer.optimizers[0].state_dict()["state"],
            }
            # Copies: the training goes on in what these are.
            self.state = copied(whole(state))


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.detach().clone()


def strategy_of(kind: str) -> Any:
    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    hook = noop_hook if kind == "ddp-hook" else None
    return DDPStrategy(process_group_backend="gloo", ddp_comm_hook=hook)


def fit(kind: str, directory: str, steps: int, noted: int, resume: str | None = None) -> Note:
    note = Note(noted)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(kind),
        plugins=[AirCheckpointIO()],
        callbacks=[
            note,
            ModelCheckpoint(directory, "{step}", every_n_train_steps=3, save_top_k=-1),
        ],
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Manual() if kind == "ddp-manual" else Normed()
    trainer.fit(
        module, TorchDataLoader(OneBatch(trainer.global_rank), batch_size=None), ckpt_path=resume
    )
    return note


def save_and_resume(kind: str, directory: str) -> None:
    torch.set_num_threads(1)
    saved = fit(kind, f"{directory}/a", 3, 3).state
    rank, path = int(os.environ["RANK"]), f"{directory}/a/step=3.ckpt"
    states: list[Any] = [None, None]
    dist.all_gather_object(states, saved)
    at = [state["model"]["layers.1.running_mean"] for state in states]
    assert not torch.equal(*at), "the ranks do not differ, and nothing was tested"
    if rank == 0:
        checkpoint, _ = AirCheckpointIO().read(path, None)
        assert_same(dict(checkpoint["state_dict"]), saved["model"], "saved")
        assert_same(checkpoint["optimizer_states"][0]["state"], saved["moments"], "saved")
    dist.barrier()
    wanted = fit(kind, f"{directory}/b", 4, 4).state
    resumed = fit(kind, f"{directory}/c", 4, 4, path).state
    if rank == 0 and kind.startswith("ddp") and kind != "ddp-hook":
        assert_same(resumed, wanted, "resumed")
    for name in OWN.get(kind, ()):
        assert_same(resumed["model"][name], wanted["model"][name], f"{name} on rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ddp-hook", "ddp-manual", "fsdp2"])
def test_a_checkpoint_holds_rank_0s_values(tmp_path: Path, kind: str) -> None:
    """What ranks differ in is rank 0's in the checkpoint; DDP resumes as if uninterrupted.

    Buffers in which a rank differs from rank 0 it gets back, where nothing makes them equal.
    """
    log = tmp_path / "log"
    statuses = run_ranks(partial(save_and_resume, kind), str(tmp_path), world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()[-6000:]


@pytest.mark.slow
def test_ddp_ranks_still_share_the_writing(tmp_path: Path) -> None:
    """Of parameters that DDP reduces, their moments, and frozen ones, rank 1 writes about a half.

    A frozen parameter that ranks changed each in its way is rank 0's.
    """
    log = tmp_path / "log"
    statuses = run_ranks(fit, "ddp", str(tmp_path), 3, 3, world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()[-6000:]
    stored = UCVolumeReader(tmp_path / "step=3.ckpt").read_metadata().storage_data
    of_one = {index.fqn for index, at in stored.items() if at.relative_path.startswith("__1_")}
    names = ("layers.0", "layers.2", "last", "layers.1.weight", "layers.1.bias", "layers.3.weight")
    reduced = [f".{name}" for name in (*names, "layers.3.bias")]
    of_one.remove("air.rank.1")
    still = {key for key in of_one if "still" in key}
    assert len(still) == 2
    of_one -= still
    assert len(of_one) >= 10
    assert all(any(name in key for name in reduced) for key in of_one), of_one
