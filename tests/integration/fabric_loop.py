"""A small Fabric loop whose every batch is written down, for the tests of exact resume."""

import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from air_lightning import AirCheckpointIO, DataLoader, UCVolumeDataset
from integration.training import whole

FEATURES = 4


@dataclass(frozen=True)
class Loop:
    """What one run is told; the same for every attempt but for the kill."""

    volume: str
    directory: str
    world_size: int = 1
    strategy: str = "auto"  # see ``fabric_of``
    num_workers: int = 0
    epochs: int = 2
    save_every: int = 2
    kill_at: int | None = None
    elastic: bool = False
    registered: bool = False  # the loader is registered instead of being in the state

    @property
    def checkpoints(self) -> str:
        return f"{self.directory}/checkpoints"


class FsdpOnCpu(FSDPStrategy):
    """FSDP1 on gloo ranks: Fabric refuses FSDPStrategy itself without GPUs, not a subclass."""

    def setup_module(self, module: Any) -> Any:
        policy = {"auto_wrap_policy": self._fsdp_kwargs["auto_wrap_policy"]}
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), use_orig_params=True, **policy
        )


def build() -> torch.nn.Module:
    """Rows that do not divide, dropout, running statistics."""
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 10),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(10, 7),
        torch.nn.Linear(7, 1),
    )


def parallelize(module: Any, mesh: Any) -> Any:
    """Shard in the way that the mesh says."""
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        parallelize_module(module, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if data.size() > 1:
        fully_shard(module[0], mesh=data)
        fully_shard(module, mesh=data)
    return module


def fabric_of(strategy: str, world_size: int, **options: Any) -> Fabric:
    """``auto``, ``ddp``, ``fsdp1``, or ``<data parallel>x<tensor parallel>``."""
    chosen: Any = strategy
    if strategy == "fsdp1":
        chosen = FsdpOnCpu(auto_wrap_policy={torch.nn.Linear})
    elif "x" in strategy:
        chosen = ModelParallelStrategy(parallelize, *map(int, strategy.split("x")))
    return Fabric(accelerator="cpu", devices=world_size, strategy=chosen, **options)


def decode(path: str) -> Any:
    """The file's name, its number, and noise from all three generators."""
    number = float(Path(path).read_text())
    noise = [random.random(), float(np.random.rand()), *torch.rand(FEATURES - 2).tolist()]
    return os.path.basename(path), torch.tensor(noise) + number / 100


def loader_of(loop: Loop) -> Any:
    """The loop's own loader, before Fabric wraps it."""
    uneven: Any = "keep" if loop.elastic else "pad"
    files = UCVolumeDataset(loop.volume, shuffle=True, pattern="*.txt", uneven=uneven)
    return DataLoader(
        files.map(decode), batch_size=2, num_workers=loop.num_workers, elastic=loop.elastic
    )


def train(loop: Loop) -> None:
    """One attempt: resumes by itself, trains to the end or to its kill."""
    os.makedirs(loop.directory, exist_ok=True)
    torch.set_num_threads(1)
    fabric = fabric_of(loop.strategy, loop.world_size)
    plugin = AirCheckpointIO().attach(fabric)
    fabric.launch()
    fabric.seed_everything(7, workers=True, verbose=False)  # ranks of one layer begin alike
    module = build()
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = loader_of(loop)
    batches = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if loop.registered:
        plugin.register(train=batches)
    else:
        state["loader"] = batches
    plugin.resume(loop.checkpoints, state)
    while (epoch := loader.epoch) < loop.epochs:
        for names, inputs in batches:
            if state["step"] == loop.kill_at:
                plugin.wait()
                os.killpg(0, signal.SIGKILL)
            loss = model(inputs).pow(2).mean() + random.random() * 0.01 + np.random.rand() * 0.01
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            note(loop, fabric.global_rank, state["step"], epoch, names, inputs, loss)
            if state["step"] % loop.save_every == 0:
                fabric.save(f"{loop.checkpoints}/step={state['step']}", state)
    plugin.wait()
    weights, moments = weights_and_moments(fabric, model, optimizer)
    result = {"model": weights, "optimizer": moments, "draws": torch.rand(3)}
    torch.save(result, f"{loop.directory}/result-{fabric.global_rank}.pt")


def weights_and_moments(fabric: Fabric, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Whole tensors by name and id; what this package itself collects under FSDP1."""
    if isinstance(fabric.strategy, FSDPStrategy):
        from air_lightning.integrations.fsdp import FlatParameters

        flat = FlatParameters(model._forward_module, fabric.device)
        return whole(flat.weights()), whole(flat.moments(optimizer.optimizer)[0])
    return whole(dict(model.state_dict())), whole(optimizer.optimizer.state_dict())


def note(loop: Loop, rank: int, step: int, epoch: int, names: Any, inputs: Any, loss: Any) -> None:
    line = {
        "rank": rank,
        "batch": step,
        "epoch": epoch,
        "files": list(names),
        "inputs": inputs.double().sum().item().hex(),
        "loss": loss.item().hex(),
    }
    with open(f"{loop.directory}/diary-{rank}.jsonl", "a") as diary:
        diary.write(json.dumps(line) + "\n")
