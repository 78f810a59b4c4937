"""AirCheckpointIO and AirResume in a real Trainer: who saves, what is chosen or refused."""

import os
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader as TorchDataLoader

from air_lightning import (
    AirCheckpointIO,
    AirResume,
    CheckpointError,
    CheckpointMismatchError,
    InvalidArgumentError,
    InvalidPathError,
    SaveFailedError,
    find_latest_valid,
    list_checkpoints,
)
from air_lightning.integrations.binding import state_of
from conftest import Volume
from integration.training import Model, Run, train
from ranks import run_ranks

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("elsewhere")]


class Samples(torch.utils.data.Dataset):
    """Four map-style samples in the shape that Model takes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return str(index), torch.full((4,), float(index))


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    """A quiet CPU Trainer with the plugin."""
    defaults = {"max_epochs": 1, "plugins": [AirCheckpointIO()], "logger": False, "devices": 1}
    options = {**defaults, **options}
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def saving(directory: Path | str, **options: Any) -> ModelCheckpoint:
    """A ModelCheckpoint that saves every two steps."""
    return ModelCheckpoint(
        dirpath=str(directory), **{"every_n_train_steps": 2, "save_top_k": -1, **options}
    )


def fit(trainer: Trainer, model: Any = None, **options: Any) -> Model:
    """Train on the eight samples, two a batch."""
    model = model or Model()
    trainer.fit(model, TorchDataLoader(Samples(), batch_size=2), **options)
    return model


def test_the_plugin_line_alone_saves_dcp_directories(tmp_path: Path) -> None:
    """With nothing but the plugin, each save is a directory that torch's own reader opens."""
    trainer = trainer_with(saving(tmp_path))
    fit(trainer)
    steps = [record.step for record in list_checkpoints(str(tmp_path)) if record.valid]
    assert sorted(steps) == [2, 4]
    newest = find_latest_valid(str(tmp_path))
    assert newest is not None
    keys = FileSystemReader(newest).read_metadata().state_dict_metadata
    assert "state_dict.layers.0.weight" in keys
    assert "optimizer_states.0.state.layers.0.weight.exp_avg" in keys
    assert "air.rank.0" in keys


class Masked(Model):
    """With a buffer that has no memory of its own to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(3).to_sparse())


def test_a_sparse_buffer_does_not_keep_memory_from_being_prepared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is saved as part of a blob is left out when staging memory is allocated ahead."""
    fit(trainer_with(saving(tmp_path, filename="{step}")), Masked())
    assert "allocated ahead" not in caplog.text
    checkpoint, _ = AirCheckpointIO().read(f"{tmp_path}/step=2.ckpt", None)
    assert torch.equal(checkpoint["state_dict"]["mask"].to_dense(), torch.eye(3))


class Wide(Model):
    """With a weight that is large enough to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(100, 100))


class Watching(Callback):
    """Notes, when its state is pickled, whether the copy of the tensors is under way."""

    def __init__(self, io: AirCheckpointIO) -> None:
        self.io = io
        self.noted: list[bool] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.ballast += 1
        checkpoint["watching"] = self

    def __reduce__(self) -> Any:
        saver = self.io._saver
        assert saver is not None
        self.noted.append(saver._stager._begun is not None)
        return OrderedDict, ()


def test_the_copy_begins_before_the_entries_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second save on memory moves while the state is pickled; what is saved is exact."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1)
    monkeypatch.setattr("air_lightning.checkpoint.moving._cores", lambda: 2)
    io = AirCheckpointIO()
    watching = Watching(io)
    model = Wide()
    fit(trainer_with(saving(tmp_path, filename="{step}"), watching, plugins=[io]), model)
    assert watching.noted == [False, True]
    for number, step in enumerate((2, 4)):
        checkpoint, _ = io.read(f"{tmp_path}/step={step}.ckpt", None)
        assert checkpoint["state_dict"]["ballast"].eq(number + 1).all()


class Meddling(TorchDataLoader):
    """A loader that changes the model when it is asked for its state."""

    model: Wide

    def state_dict(self) -> dict[str, Any]:
        self.model.ballast += 1
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Looking(Callback):
    """Notes, when its state is pickled, what the model holds."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.model = module
        checkpoint["looking"] = self

    def __reduce__(self) -> Any:
        self.seen.append(self.model.ballast.max().item())
        return OrderedDict, ()


def test_a_loader_that_changes_the_model_does_so_before_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loader's state_dict does to the model is in the checkpoint whole, as ever."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1)
    monkeypatch.setattr("air_lightning.checkpoint.moving._cores", lambda: 2)
    io, looking, model = AirCheckpointIO(), Looking(), Wide()
    loader = Meddling(Samples(), batch_size=2)
    loader.model = model
    trainer_with(saving(tmp_path, filename="{step}"), looking, plugins=[io]).fit(model, loader)
    for step, seen in zip((2, 4), looking.seen, strict=True):
        checkpoint, _ = io.read(f"{tmp_path}/step={step}.ckpt", None)
        assert seen
        assert checkpoint["state_dict"]["ballast"].eq(seen).all()


def test_a_trainer_with_another_io_is_left_alone(tmp_path: Path) -> None:
    """Where the Trainer's CheckpointIO is not ours, the installed callback changes nothing."""
    trainer = trainer_with(saving(tmp_path / "files"), plugins=[])
    fit(trainer)
    names = os.listdir(tmp_path / "files")
    assert names
    assert all(os.path.isfile(tmp_path / "files" / name) for name in names)


def test_explicit_path_wins(tmp_path: Path) -> None:
    """fit(ckpt_path=...) resumes from that checkpoint although a newer one is there."""
    fit(trainer_with(saving(tmp_path)))
    older = next(r.path for r in list_checkpoints(str(tmp_path)) if r.step == 2)
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    fit(trainer_with(AirResume(str(tmp_path)), Start()), ckpt_path=older)
    assert seen == [2]


@pytest.mark.parametrize("given", [None, "last"])
def test_a_torn_newest_checkpoint_is_passed_over(tmp_path: Path, given: str | None) -> None:
    """Without .metadata, or with a short shard, the one before it is resumed from."""
    fit(trainer_with(saving(tmp_path, save_last=True), max_steps=8, max_epochs=-1))
    by_step = {r.step: r.path for r in list_checkpoints(str(tmp_path)) if "last" not in r.path}
    os.remove(f"{by_step[8]}/.metadata")
    os.remove(f"{tmp_path}/last.ckpt/.metadata")
    shard = next(n for n in os.listdir(by_step[6]) if n.endswith(".distcp"))
    os.truncate(f"{by_step[6]}/{shard}", 10)
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    resuming = trainer_with(AirResume(), saving(tmp_path), Start(), max_steps=9, max_epochs=-1)
    fit(resuming, ckpt_path=given)
    assert seen == [4]


def test_a_fresh_start_when_there_is_nothing(tmp_path: Path) -> None:
    """A root that does not exist yet is a fresh start, not an error."""
    trainer = trainer_with(AirResume(str(tmp_path / "none")))
    fit(trainer)
    assert trainer.global_step == 4


def test_a_second_fit_goes_on_from_memory(tmp_path: Path) -> None:
    """Only a Trainer that has not trained yet looks for a checkpoint."""
    trainer = trainer_with(AirResume(), saving(tmp_path))
    model = fit(trainer)
    trainer.fit_loop.max_epochs = 2
    fit(trainer, model)
    assert trainer.global_step == 8


def test_a_superseded_checkpoint_goes_after_its_successor_is_published(tmp_path: Path) -> None:
    """With save_top_k=1 only the newest stays, and at every moment one was whole."""
    whole_at_each_step: list[bool] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            # The save of step 4 began after that of step 2 was published.
            if trainer.global_step >= 4:
                whole_at_each_step.append(find_latest_valid(str(tmp_path)) is not None)

    fit(trainer_with(saving(tmp_path, save_top_k=1), Watch(), max_epochs=3))
    assert len(whole_at_each_step) == 8
    assert all(whole_at_each_step)
    (left,) = list_checkpoints(str(tmp_path))
    assert left.step == 12


def test_test_and_best_read_what_was_saved(tmp_path: Path) -> None:
    """trainer.test(ckpt_path="best") waits for the save and tests its weights, no live ones."""

    class Tested(Model):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            """Report the weights that are there."""
            self.log("weight", self.layers[0].weight.sum())

    trainer = trainer_with(saving(tmp_path, save_top_k=1))
    model = fit(trainer, Tested())
    trained = model.layers[0].weight.sum().item()
    torch.nn.init.zeros_(model.layers[0].weight)
    loader = TorchDataLoader(Samples(), batch_size=2)
    (result,) = trainer.test(model, loader, ckpt_path="best", verbose=False)
    assert result["weight"] == pytest.approx(trained, rel=1e-6)


class Weighed(Model):
    """Reports the weights that are there."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Their sum."""
        self.log("weight", self.layers[0].weight.double().sum())

    validation_step = test_step


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_last_is_the_newest_valid_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """On a volume that a directory stands in for, and where a later last one is torn.

    Without any, Lightning's warning stands; where all are torn, nothing is evaluated.
    """
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    root, here = "/Volumes/c/s/v/run", tmp_path / "c/s/v/run"
    loader = TorchDataLoader(Samples(), batch_size=2)

    def weight() -> float:
        trainer = trainer_with(saving(root))
        (seen,) = getattr(trainer, stage)(Weighed(), loader, ckpt_path="last", verbose=False)
        return float(seen["weight"])

    with pytest.warns(UserWarning, match="no last checkpoint available"):
        weight()
    fit(trainer_with(saving(root, filename="{step}")))
    fit(trainer_with(saving(root, save_last=True, save_top_k=0)))
    shutil.copytree(here / "last.ckpt", here / "last-v1.ckpt")
    os.remove(here / "last-v1.ckpt/.metadata")
    shutil.copytree(here / "step=2.ckpt", here / "last-v2.ckpt")
    wanted, _ = AirCheckpointIO().read(str(here / "last.ckpt"), None)
    assert weight() == wanted["state_dict"]["layers.0.weight"].double().sum().item()
    shutil.rmtree(here / "last-v2.ckpt")
    os.remove(here / "last.ckpt/.metadata")
    with pytest.raises(CheckpointError, match="none of .*last.ckpt.* is a valid checkpoint"):
        weight()


def test_fit_goes_on_from_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AirResume, "last" is no later one of another name; with it, a path given wins."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    root, here = "/Volumes/c/s/v/run", tmp_path / "c/s/v/run"
    fit(trainer_with(saving(root, filename="{step}")))
    os.rename(here / "step=2.ckpt", here / "last.ckpt")
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    fit(trainer_with(saving(root), Start()), ckpt_path="last")
    fit(trainer_with(AirResume(), saving(root), Start()), ckpt_path=f"{root}/last.ckpt")
    assert seen == [2, 2]


def test_an_old_checkpoint_on_exception_is_not_gone_back_to(tmp_path: Path) -> None:
    """What Lightning chooses by itself is one of many; a path set on the Trainer is meant."""
    fit(trainer_with(saving(tmp_path, filename="{step}")))
    old = tmp_path / "elsewhere" / "on_exception.ckpt"
    shutil.copytree(tmp_path / "step=2.ckpt", tmp_path / "elsewhere" / "source")
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    def again() -> Trainer:
        shutil.copytree(old.parent / "source", old)  # Lightning deletes it after each fit
        failing = OnExceptionCheckpoint(old.parent)
        return trainer_with(AirResume(), saving(tmp_path), failing, Start())

    fit(again())
    trainer = again()
    trainer.ckpt_path = old
    fit(trainer)
    for left in tmp_path.glob("*.ckpt"):
        shutil.rmtree(left)
    fit(again())
    assert seen == [4, 2, 2]


class Swapping(Callback):
    """Has a method of the name that Lightning's WeightAveraging has."""

    def _swap_models(self) -> None: ...

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._swap_models()


def test_a_callback_that_swaps_in_its_own_way_is_left_alone(tmp_path: Path) -> None:
    """A method that is only called like one of Lightning's is called as its class has it."""
    loader = TorchDataLoader(Samples(), batch_size=2)
    trainer = trainer_with(saving(tmp_path), Swapping(), max_steps=2)
    trainer.fit(Model(), loader, loader)
    assert find_latest_valid(str(tmp_path)) is not None


def test_garbage_of_the_right_size_is_passed_over(tmp_path: Path) -> None:
    """AirResume goes on from the checkpoint before one whose .metadata was overwritten."""
    fit(trainer_with(saving(tmp_path, filename="{step}")))
    marker = tmp_path / "step=4.ckpt/.metadata"
    marker.write_bytes(b"x" * marker.stat().st_size)
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    fit(trainer_with(AirResume(), saving(tmp_path), Start()))
    assert seen == [2]


def test_lightnings_own_file_resumes(tmp_path: Path) -> None:
    """A single file that Lightning's default IO wrote is resumed from as before."""
    fit(trainer_with(saving(tmp_path / "file"), plugins=[]))
    (file,) = (tmp_path / "file").glob("*step=2*")
    trainer = trainer_with()
    fit(trainer, ckpt_path=str(file))
    assert trainer.global_step == 4


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    """The error names the missing and the unexpected keys, and differing shapes."""
    fit(trainer_with(saving(tmp_path)))

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0] = torch.nn.Linear(4, 9)
            self.layers[2] = torch.nn.Identity()
            self.head = torch.nn.Linear(9, 1)

    with pytest.raises(CheckpointMismatchError) as caught:
        fit(trainer_with(AirResume(str(tmp_path))), Other())
    message = str(caught.value)
    assert "head.weight" in message
    assert "layers.2.weight" in message
    assert "(8, 4)" in message
    assert "(9, 4)" in message


def test_a_checkpoint_of_other_optimizer_groups(tmp_path: Path) -> None:
    """An optimizer with other parameter groups is named with its sizes."""
    fit(trainer_with(saving(tmp_path)))

    class TwoGroups(Model):
        def configure_optimizers(self) -> Any:
            first, last = self.layers[0].parameters(), self.layers[2].parameters()
            return torch.optim.AdamW([{"params": first}, {"params": last}])

    with pytest.raises(CheckpointMismatchError, match=r"\[4\].*\[2, 2\]"):
        fit(trainer_with(AirResume(str(tmp_path))), TwoGroups())


def test_a_checkpoint_path_that_is_a_file(tmp_path: Path) -> None:
    """A save onto an existing file fails with the path, and leaves the file alone."""
    target = tmp_path / "taken"
    target.write_text("something else")
    trainer = trainer_with(enable_checkpointing=False)
    fit(trainer)
    with pytest.raises(SaveFailedError, match="taken"):
        trainer.save_checkpoint(str(target))
    assert target.read_text() == "something else"


def test_a_background_error_reaches_the_end_of_fit(tmp_path: Path) -> None:
    """A save that fails in the background is an error of fit, not silence."""

    class BreakTheTarget(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            # After the name was chosen: a directory where the shard is to be.
            name = f"epoch=0-step={trainer.global_step}.ckpt"
            (tmp_path / "taken" / name / "__0_0.distcp").mkdir(parents=True)

    with pytest.raises(SaveFailedError, match="taken"):
        fit(trainer_with(BreakTheTarget(), saving(tmp_path / "taken", every_n_train_steps=4)))


def test_a_place_that_cannot_be_written_fails_the_first_save(tmp_path: Path) -> None:
    """A file where the checkpoints' directory is to be fails the first save, not a later one."""

    class BreakTheTarget(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            tmp_path.joinpath("taken").write_text("in the way")

    trainer = trainer_with(BreakTheTarget(), saving(tmp_path / "taken", every_n_train_steps=1))
    with pytest.raises(SaveFailedError, match="nothing was staged"):
        fit(trainer)
    assert trainer.global_step == 1


def test_the_users_own_exception_is_not_masked(tmp_path: Path) -> None:
    """When training raises while a save fails, the training's error is what is seen."""

    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                shutil.rmtree(tmp_path, ignore_errors=True)
                raise ZeroDivisionError("the user's own")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        fit(trainer_with(saving(tmp_path)), Broken())


@pytest.mark.parametrize("path", ["/Volumes/a", "", "a\0b", "/Volumes/a/b/c/../d"])
def test_a_checkpoint_path_that_is_none(path: str) -> None:
    """AirResume checks its path when it is made."""
    with pytest.raises(InvalidPathError):
        AirResume(path)


def test_a_checkpoint_that_never_completed(tmp_path: Path) -> None:
    """An explicit path without .metadata says that the save did not complete."""
    (tmp_path / "torn").mkdir()
    with pytest.raises(CheckpointError, match="torn"):
        fit(trainer_with(), ckpt_path=str(tmp_path / "torn"))


def test_a_timeout_that_is_none() -> None:
    """timeout_s must be positive."""
    with pytest.raises(InvalidArgumentError, match="timeout_s=0"):
        AirCheckpointIO(timeout_s=0)


def test_resume_without_the_plugin() -> None:
    """AirResume in a Trainer without AirCheckpointIO says which plugin it needs."""
    with pytest.raises(InvalidArgumentError, match="AirCheckpointIO"):
        fit(trainer_with(AirResume(), plugins=[]))


class Elsewhere(Strategy):
    """A strategy of somebody's own, which keeps its state who knows where."""

    root_device = torch.device("cpu")
    is_global_zero = True

    def model_to_device(self) -> None: ...

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def barrier(self, *_: Any, **__: Any) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def all_gather(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor


def every_rank_wrote(run: Run) -> list[str]:
    """The shards of the newest checkpoint."""
    newest = find_latest_valid(run.checkpoints)
    assert newest is not None
    return sorted(name for name in os.listdir(newest) if name.endswith(".distcp"))


@pytest.fixture
def numbers(volume: Volume) -> str:
    """Eight numbered files."""
    for number in range(8):
        (volume.directory / f"{number}.txt").write_text(str(number))
    return volume.path


@pytest.mark.slow
def test_every_rank_takes_part(numbers: str, tmp_path: Path) -> None:
    """Under DDP each rank writes shards of the same checkpoint, and other grids are refused."""
    log = tmp_path / "output.txt"
    run = Run(numbers, str(tmp_path), world_size=2, trainer=(("max_epochs", 2),))
    assert run_ranks(train, run, world_size=2, log=log) == [0, 0], log.read_text()[-3000:]
    names = every_rank_wrote(run)
    assert {name.split("_")[2] for name in names} == {"0", "1"}, names
    alone = replace(run, world_size=1, trainer=(("max_epochs", 3),))
    (status,) = run_ranks(train, alone, log=log)
    assert status == 1
    grids = "taken with 2 ranks (num_workers=0), and this run has 1 ranks (num_workers=0)"
    assert f"GridMismatchError: The checkpoint was {grids}" in log.read_text()
    assert "elastic=True" in log.read_text()


def save_to_no_path(directory: str) -> None:
    """Run in a rank: a save to an impossible path fails on this rank, whichever it is."""

    class SaveThere(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with pytest.raises(InvalidPathError, match="/Volumes/a/b"):
                trainer.save_checkpoint("/Volumes/a/b")

    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "default_root_dir": directory}
    fit(trainer_with(SaveThere(), enable_checkpointing=False, **options))


@pytest.mark.slow
def test_a_path_that_rank_0_refuses_is_refused_on_every_rank(tmp_path: Path) -> None:
    """A save that cannot begin raises on all ranks, and training goes on."""
    log = tmp_path / "output.txt"
    statuses = run_ranks(save_to_no_path, str(tmp_path), world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()[-3000:]


@pytest.mark.slow
def test_a_world_that_grew_is_refused_on_every_rank(numbers: str, tmp_path: Path) -> None:
    """A rank that the checkpoint does not know fails like the others, instead of waiting."""
    log = tmp_path / "output.txt"
    run = Run(numbers, str(tmp_path), trainer=(("max_epochs", 1),))
    assert run_ranks(train, run, log=log) == [0], log.read_text()[-3000:]
    grown = replace(run, world_size=2, trainer=(("max_epochs", 2),))
    assert run_ranks(train, grown, world_size=2, log=log) == [1, 1]
    grids = "taken with 1 ranks (num_workers=0), and this run has 2 ranks (num_workers=0)"
    assert log.read_text().count(f"GridMismatchError: The checkpoint was {grids}") == 2


def test_another_strategy_is_refused_at_setup() -> None:
    """A strategy that this release cannot save under is named before training starts."""
    trainer = trainer_with(strategy=Elsewhere())
    with pytest.raises(InvalidArgumentError, match=r"Elsewhere.*ModelParallelStrategy"):
        fit(trainer)


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy])
def test_strategies_that_derive_from_a_supported_one(kind: type) -> None:
    """DeepSpeed and XLA are refused, although their classes derive from DDP and single device."""
    with pytest.raises(InvalidArgumentError, match=kind.__name__):
        state_of(kind.__new__(kind))  # their packages are not needed to ask for them
