"""Saves and resumes under sharded strategies, on real gloo ranks.

The ranks are forked once for many trainings, each with a Trainer of its own.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader as TorchDataLoader

from air_lightning import AirCheckpointIO, list_checkpoints
from air_lightning.checkpoint.names import clean
from conftest import Volume
from integration.test_exact_resume import assert_resumes_exactly
from integration.test_wiring import Samples, saving
from integration.training import FsdpOnCpu, Run, Sharded, assert_same, strategy_of, whole
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FILES = 22


@pytest.fixture
def numbers(volume: Volume) -> str:
    """A volume of small numbered text files."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("2x1", 2), ("1x2", 2), ("2x2", 4), ("fsdp1", 2)],
    ids=["fsdp2", "tp", "fsdp2-tp", "fsdp1"],
)
def test_killed_mid_epoch(numbers: str, tmp_path: Path, strategy: str, ranks: int) -> None:
    """Killed in the middle of an epoch, a sharded run goes on bit for bit."""
    run = Run(numbers, "", strategy=strategy, world_size=ranks, every_n_steps=2)
    assert_resumes_exactly(replace(run, trainer=(("max_epochs", 2),)), tmp_path, kills=[4])


def test_killed_after_a_save_at_an_epochs_end(numbers: str, tmp_path: Path) -> None:
    """A sharded checkpoint of an epoch's end resumes with the whole next epoch, twice."""
    run = Run(numbers, "", strategy="2x1", world_size=2, save_at_epoch_end=True)
    assert_resumes_exactly(run, tmp_path, kills=[7, 13])


class Holder(torch.nn.Module):
    """Gives a parameter a second name."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Portable(Sharded):
    """Tied weights, and wrappers that show in parameter names: others under each strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].again = Holder(self.layers[3].weight)

    def configure_model(self) -> None:
        if isinstance(self.layers[0].weight, DTensor):
            return
        mesh = self.device_mesh
        if mesh is None and not isinstance(self.trainer.strategy, FsdpOnCpu):
            self.layers[2] = torch.compile(self.layers[2], backend="eager")
        super().configure_model()
        if mesh is not None and mesh["data_parallel"].size() > 1:
            self.layers[2] = checkpoint_wrapper(self.layers[2])


@dataclass(frozen=True)
class Job:
    """One training of two steps, or a resume at its end; what is known then goes to a file."""

    strategy: str
    directory: str
    resume: str | None = None
    ours: bool = True
    model: Callable[[], Sharded] = Portable
    options: tuple[tuple[str, Any], ...] = ()


def strategy_for(job: Job) -> Any:
    """As of the harness, with options."""
    if not job.options:
        return strategy_of(Run("", "", strategy=job.strategy, world_size=dist_world()))
    if job.strategy == "fsdp1":
        return FsdpOnCpu(auto_wrap_policy={torch.nn.Linear}, **dict(job.options))
    data, tensor = map(int, job.strategy.split("x"))
    return ModelParallelStrategy(data, tensor, **dict(job.options))


def dist_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def trainer_for(job: Job, *callbacks: Callback, **options: Any) -> Trainer:
    """A quiet Trainer of this job."""
    defaults: dict[str, Any] = {"max_steps": 2, "max_epochs": -1}
    return Trainer(
        accelerator="cpu",
        devices=dist_world(),
        strategy=strategy_for(job),
        plugins=[AirCheckpointIO()] if job.ours else [],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        **{**defaults, **options},
    )


def state_of_run(trainer: Trainer) -> dict[str, Any]:
    """The whole weights by clean name, and the whole moments by id."""
    strategy: Any = trainer.strategy
    model = whole(dict(strategy.lightning_module_state_dict()))
    optimizer = whole(strategy.optimizer_state(trainer.optimizers[0]))
    return {"model": {clean(name): value for name, value in model.items()}, "optimizer": optimizer}


def do(job: Job) -> dict[str, Any]:
    """Train and save, or resume; returns what rank 0 has in the end."""
    torch.manual_seed(3 if job.resume is None else 4)
    callbacks = [] if job.resume else [saving(job.directory, filename="c")]
    trainer = trainer_for(job, *callbacks)
    trainer.fit(job.model(), TorchDataLoader(Samples(), batch_size=2), ckpt_path=job.resume)
    return copy.deepcopy(state_of_run(trainer))


def do_all(jobs: list[Job], results: str) -> None:
    """Run in a rank: the jobs, one after the other; rank 0 writes down what they gave."""
    torch.set_num_threads(1)
    given = [do(job) for job in jobs]
    if dist.get_rank() == 0:
        torch.save(given, results)


def run_jobs(jobs: list[Job], tmp_path: Path, world_size: int) -> list[dict[str, Any]]:
    """The states that jobs on so many ranks end with."""
    results, log = tmp_path / "results.pt", tmp_path / "output.txt"
    statuses = run_ranks(do_all, jobs, str(results), world_size=world_size, log=log)
    assert set(statuses) == {0}, log.read_text()[-6000:]
    loaded: list[dict[str, Any]] = torch.load(results, weights_only=True)
    return loaded


def test_checkpoints_move_between_strategies(tmp_path: Path) -> None:
    """What one strategy saved, every other one resumes with, bit for bit, whatever wraps names."""
    kinds = ["ddp", "2x1", "1x2", "fsdp1"]
    saves = [Job(kind, str(tmp_path / kind)) for kind in kinds]
    loads = [Job(kind, "", resume=f"{save.directory}/c.ckpt") for save in saves for kind in kinds]
    states = run_jobs([*saves, *loads], tmp_path, 2)
    saved, resumed = states[: len(saves)], states[len(saves) :]
    for job, state in zip(loads, resumed, strict=True):
        source = kinds.index(Path(str(job.resume)).parent.name)
        assert len(state["optimizer"]["state"]) == 6
        assert_same(state, saved[source], f"{job.resume} under {job.strategy}")


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Checkpoints of two ranks resume on four, whose resume on two; every bit stays."""
    two, four = ["ddp", "2x1"], ["4x1", "2x2"]
    saves = [Job(kind, str(tmp_path / kind)) for kind in two]
    saved = dict(zip(two, run_jobs(saves, tmp_path, 2), strict=True))
    grown = [Job(kind, "", resume=f"{save.directory}/c.ckpt") for save in saves for kind in four]
    again = [Job(kind, str(tmp_path / kind)) for kind in four]
    states = run_jobs([*grown, *again], tmp_path, 4)
    for job, state in zip(grown, states, strict=False):
        assert_same(state, saved[Path(str(job.resume)).parent.name], str(job))
    saved = dict(zip(four, states[len(grown) :], strict=True))
    shrunk = [Job(kind, "", resume=f"{save.directory}/c.ckpt") for save in again for kind in two]
    for job, state in zip(shrunk, run_jobs(shrunk, tmp_path, 2), strict=True):
        assert_same(state, saved[Path(str(job.resume)).parent.name], str(job))


def test_what_lightning_itself_saved(tmp_path: Path) -> None:
    """A sharded directory or a file that was saved without the plugin resumes with it."""
    file, shards = (("save_distributed_checkpoint", False),), (("state_dict_type", "sharded"),)
    saves = [
        Job("2x1", str(tmp_path / "shards"), ours=False, model=Sharded),
        Job("2x1", str(tmp_path / "file"), ours=False, model=Sharded, options=file),
        Job("fsdp1", str(tmp_path / "fsdp1"), ours=False, model=Sharded, options=shards),
        Job("ddp", str(tmp_path / "ddp"), ours=False, model=Sharded),
    ]
    loads = [replace(save, resume=f"{save.directory}/c.ckpt", ours=True) for save in saves]
    # A file of DDP under FSDP2, too.
    loads.append(replace(loads[0], resume=loads[3].resume))
    states = run_jobs([*saves, *loads], tmp_path, 2)
    for job, state, source in zip(loads, states[4:], [0, 1, 2, 3, 3], strict=True):
        saved = states[source]
        assert_same(state["model"], saved["model"], str(job))
        assert_same(moments(state), moments(saved), str(job))


def moments(state: dict[str, Any]) -> list[Any]:
    """The moments in the order of the parameters, whether by number or by name."""
    optimizer = state["optimizer"]
    order = [key for group in optimizer["param_groups"] for key in group["params"]]
    return [optimizer["state"][key] for key in order]
