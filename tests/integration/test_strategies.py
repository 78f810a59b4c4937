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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader as TorchDataLoader

from air_lightning import AirCheckpointIO, CheckpointError, UnsafeCheckpointError, list_checkpoints
from air_lightning.checkpoint.names import clean
from conftest import Volume
from integration.test_exact_resume import assert_resumes_exactly
from integration.test_wiring import Samples, saving
from integration.training import FsdpOnCpu, Run, Sharded, assert_same, diary, strategy_of, whole
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("elsewhere")]

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
    lines = diary(replace(run, directory=str(tmp_path / "broken")))
    for (rank, batch), line in lines.items():
        # Ranks that hold parts of one layer were given the same batch.
        reader = max(other for other in run.readers if other <= rank)
        assert {**line, "rank": reader} == lines[reader, batch]


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


@pytest.mark.parametrize("kind", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_kinds_of_fsdp1(tmp_path: Path, kind: str) -> None:
    """FSDP1 that shards less than all saves the same, and its checkpoints move likewise."""
    save = Job("fsdp1", str(tmp_path), options=(("sharding_strategy", kind),))
    loads = [replace(save, resume=f"{tmp_path}/c.ckpt", strategy=s) for s in ("fsdp1", "ddp")]
    loads[1] = replace(loads[1], options=())
    saved, *resumed = run_jobs([save, *loads], tmp_path, 2)
    for state in resumed:
        assert_same(state, saved)


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


def check_all(checks: list[Callable[[str], None]], directory: str) -> None:
    """Run in a rank: each check in a directory of its own."""
    torch.set_num_threads(1)
    for check in checks:
        where = f"{directory}/{check.__name__}"
        os.makedirs(where, exist_ok=True)
        check(where)


def run_checks(checks: list[Callable[[str], None]], tmp_path: Path, world_size: int = 2) -> None:
    log = tmp_path / "output.txt"
    statuses = run_ranks(check_all, checks, str(tmp_path), world_size=world_size, log=log)
    assert set(statuses) == {0}, log.read_text()[-6000:]


SHARDED = Job("2x1", "")


def fitted(trainer: Trainer, model: Sharded | None = None, **options: Any) -> Sharded:
    """Train on the eight samples; each rank has two batches an epoch."""
    model = model or Sharded()
    trainer.fit(model, TorchDataLoader(Samples(), batch_size=2), **options)
    return model


def the_best_and_the_last_are_kept(directory: str) -> None:
    """Top-k deletion, the link of save_last, and a test with the best weights."""
    best = ModelCheckpoint(
        directory, "{step}", monitor="loss", save_top_k=1, every_n_train_steps=1, save_last="link"
    )
    weights: dict[int, Any] = {}

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            weights[trainer.global_step] = copy.deepcopy(whole(dict(module.state_dict())))

    trainer = trainer_for(SHARDED, best, Note(), max_steps=4)
    fitted(trainer)
    dist.barrier()
    names = sorted(name for name in os.listdir(directory))
    assert names == sorted({"last.ckpt", os.path.basename(best.best_model_path)}), names
    assert os.path.islink(f"{directory}/last.ckpt")

    seen: list[str] = []

    class Tested(Sharded):
        test_step = Sharded.validation_step

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.extend(checkpoint)

    tested = Tested()
    loader = TorchDataLoader(Samples(), batch_size=2)
    trainer_for(SHARDED).test(tested, loader, ckpt_path=best.best_model_path, verbose=False)
    step = int(Path(best.best_model_path).stem.split("=")[1])
    assert_same(whole(dict(tested.state_dict())), weights[step])
    assert "callbacks" in seen
    assert "optimizer_states" not in seen  # not read where they have no use


class Opaque:
    """An object that does not load with weights_only=True."""


class Saving(Sharded):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opaque"] = Opaque()


def fit_honours_weights_only(directory: str) -> None:
    """Lightning drops fit(weights_only=...) on its way to these strategies; it arrives here."""
    fitted(trainer_for(SHARDED, saving(directory, filename="c")), Saving())
    path = f"{directory}/c.ckpt"
    with pytest.raises(UnsafeCheckpointError):
        fitted(trainer_for(SHARDED), ckpt_path=path)
    trainer = trainer_for(SHARDED, max_steps=3)
    fitted(trainer, ckpt_path=path, weights_only=False)
    assert trainer.global_step == 3


def weights_alone(directory: str) -> None:
    """A checkpoint of weights alone loads for testing, and says so when it is to be resumed."""
    trainer = trainer_for(SHARDED)
    model = fitted(trainer)
    trainer.save_checkpoint(f"{directory}/w", weights_only=True)
    other = Sharded()
    other.test_step = other.validation_step
    loader = TorchDataLoader(Samples(), batch_size=2)
    trainer_for(SHARDED).test(other, loader, ckpt_path=f"{directory}/w", verbose=False)
    assert_same(whole(dict(other.state_dict())), whole(dict(model.state_dict())))
    with pytest.raises(KeyError, match="only the model"):
        fitted(trainer_for(SHARDED), ckpt_path=f"{directory}/w")


def asked_for_one_file(directory: str) -> None:
    """save_distributed_checkpoint=False makes no difference: the checkpoint is a directory."""
    job = replace(SHARDED, options=(("save_distributed_checkpoint", False),))
    fitted(trainer_for(job, saving(directory)))
    dist.barrier()
    (record,) = list_checkpoints(directory)
    assert record.valid
    assert record.world_size == 2


def saving_before_the_first_step(directory: str) -> None:
    """Asking a fresh optimizer for its state leaves it fresh, and so does loading that."""

    class SaveAtStart(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if not os.path.exists(f"{directory}/fresh"):
                trainer.save_checkpoint(f"{directory}/fresh")
                trainer.strategy.checkpoint_io.wait()
            assert not trainer.optimizers[0].state

    dist.barrier()
    fitted(trainer_for(SHARDED, SaveAtStart()))
    dist.barrier()
    fitted(trainer_for(SHARDED, SaveAtStart()), ckpt_path=f"{directory}/fresh")


def nothing_is_copied_before_staging(directory: str) -> None:
    """What the strategy collects is the live memory, and a rank stages its own shards alone."""
    trainer = trainer_for(SHARDED, saving(directory))
    model = fitted(trainer)
    state = trainer.strategy.lightning_module_state_dict()
    moments = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    live = dict(model.named_parameters())
    for number, (name, parameter) in enumerate(live.items()):
        assert pointer(state[name]) == pointer(parameter)
        wanted = trainer.optimizers[0].state[parameter]["exp_avg"]
        assert pointer(moments[number]["exp_avg"]) == pointer(wanted)
    entries = sum(parameter.to_local().nbytes for parameter in live.values()) * 3 + 3 * 4
    staged = trainer.strategy.checkpoint_io._saver._stager
    assert staged.nbytes < entries + 64 * (3 * len(live) + 1)


def pointer(tensor: Any) -> int:
    return tensor.to_local().data_ptr()


def a_model_may_change_what_it_loads(directory: str) -> None:
    """Whole tensors that on_load_checkpoint puts in the place of shards are cut to shards."""
    job = Job("2x2", "") if dist_world() == 4 else SHARDED
    fitted(trainer_for(job, saving(directory, filename="c")))
    wanted = {name: torch.randn(shape) for name, shape in shapes().items()}

    class Migrating(Sharded):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].update(copy.deepcopy(wanted))

    model = fitted(trainer_for(job), Migrating(), ckpt_path=f"{directory}/c.ckpt")
    assert_same(whole(dict(model.state_dict())), {**wanted, "unit": torch.ones(3)})


def shapes() -> dict[str, torch.Size]:
    torch.manual_seed(5)  # the same values on every rank
    return {name: value.shape for name, value in Sharded().named_parameters()}


def a_shard_that_one_rank_misses_fails_all(directory: str) -> None:
    """Only one rank reads the short file; the other learns of it, instead of waiting."""
    fitted(trainer_for(SHARDED, saving(directory, filename="c")))
    dist.barrier()
    if dist.get_rank() == 0:
        for name in os.listdir(f"{directory}/c.ckpt"):
            if name.startswith("__1_"):
                os.truncate(f"{directory}/c.ckpt/{name}", 10)
    dist.barrier()
    with pytest.raises(CheckpointError):
        fitted(trainer_for(SHARDED), ckpt_path=f"{directory}/c.ckpt")


class RowMeans(torch.optim.Optimizer):
    """Keeps one number per row, and one per parameter: a sum over the ranks that is still open."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = parameter.grad.detach().sum().reshape(1)
            if parameter.dim() == 1:
                continue
            means = parameter.grad.abs().mean(-1, keepdim=True)
            state["means"] = state.get("means", means) * 0.5 + means * 0.5
            with torch.no_grad():
                # By parts: newer torch replicates the means of one row, and then takes no sub_.
                means = state["means"].redistribute(placements=parameter.placements)
                parameter.to_local().sub_(means.to_local() * 0.01)
        return loss


class Factored(Sharded):
    def configure_optimizers(self) -> Any:
        return RowMeans(self.parameters(), {})


def moments_of_another_shape(directory: str) -> None:
    """Factored moments, whose shape is not the parameter's, go on from a checkpoint."""
    first = trainer_for(SHARDED, saving(directory, filename="c"))
    fitted(first, Factored())
    saved = whole(first.optimizers[0].state_dict())
    second = trainer_for(SHARDED)
    fitted(second, Factored(), ckpt_path=f"{directory}/c.ckpt")
    assert_same(whole(second.optimizers[0].state_dict()), saved)
    fitted(trainer_for(SHARDED, max_steps=3), Factored(), ckpt_path=f"{directory}/c.ckpt")


def test_habits_of_the_host(tmp_path: Path) -> None:
    """What works under DDP works under FSDP2; the checks' own sentences say what."""
    checks = [
        the_best_and_the_last_are_kept,
        fit_honours_weights_only,
        weights_alone,
        asked_for_one_file,
        saving_before_the_first_step,
        nothing_is_copied_before_staging,
        a_model_may_change_what_it_loads,
        a_shard_that_one_rank_misses_fails_all,
        moments_of_another_shape,
    ]
    run_checks(checks, tmp_path)


def test_two_dimensions_of_shards(tmp_path: Path) -> None:
    """On a mesh of data and tensor parallel ranks whole tensors are cut as that mesh has it."""
    run_checks([a_model_may_change_what_it_loads], tmp_path, world_size=4)


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """dcp.load into whole tensors, and dcp_to_torch_save; what is not sharded is there once."""
    (state,) = run_jobs([Job("2x1", str(tmp_path), model=Sharded)], tmp_path, 2)
    path = tmp_path / "c.ckpt"
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    chunks = {
        key: len(entry.chunks)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert chunks["state_dict.layers.0.weight"] == 2
    assert chunks["state_dict.unit"] == 1
    assert {index.fqn for index in metadata.storage_data} >= chunks.keys()
    loaded = {f"state_dict.{k}": torch.zeros_like(v) for k, v in state["model"].items()}
    loaded["optimizer_states.0.state.layers.2.weight.exp_avg"] = torch.zeros(7, 10)
    dcp.load(loaded, storage_reader=reader)
    for name, value in state["model"].items():
        assert torch.equal(loaded[f"state_dict.{name}"], value), name
    moment = state["optimizer"]["state"][2]["exp_avg"]
    assert torch.equal(loaded["optimizer_states.0.state.layers.2.weight.exp_avg"], moment)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    converted = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert_same(converted["state_dict"], state["model"])
