"""Habits of Lightning that an asynchronous, per-rank checkpoint must live with."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader as TorchDataLoader

from air_lightning import (
    AirCheckpointIO,
    AirResume,
    InvalidArgumentError,
    find_latest_valid,
    list_checkpoints,
)
from conftest import Volume
from integration.test_wiring import Samples, fit, saving, trainer_with
from integration.training import Data, Model, Run, Validated, train
from ranks import KILLED, free_port, run_ranks

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("elsewhere")]


@pytest.fixture
def numbers(volume: Volume) -> str:
    """Twenty-two numbered files."""
    for number in range(22):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


class KillInSave(Callback):
    """SIGKILLs the process when the save of a given step has written its first shard."""

    def __init__(self, step: int, directory: str) -> None:
        self.step, self.directory = step, directory

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            trainer.strategy.checkpoint_io.wait()  # otherwise the save before is the one killed

            def kill(event: str, args: tuple[Any, ...]) -> None:
                if event == "open" and isinstance(args[0], str) and ".distcp" in args[0]:
                    os.kill(os.getpid(), 9)

            sys.addaudithook(kill)


def train_into_one_place(directory: str, kill_at: int) -> None:
    checkpoint = ModelCheckpoint(
        dirpath=directory, save_top_k=0, save_last=True, every_n_train_steps=2
    )
    fit(trainer_with(checkpoint, KillInSave(kill_at, directory), max_epochs=2))


@pytest.mark.slow
def test_overwriting_the_only_checkpoint_never_loses_it(tmp_path: Path) -> None:
    """Killed while last.ckpt is saved anew, the run still has the last.ckpt of before."""
    directory = str(tmp_path / "only")
    (status,) = run_ranks(train_into_one_place, directory, 4, log=tmp_path / "log")
    assert status == KILLED, (tmp_path / "log").read_text()[-2000:]
    (record,) = [r for r in list_checkpoints(directory) if r.valid]
    assert record.step == 2


def killed_while_replacing(path: str, step: int) -> None:
    """Publishes a second save, and is killed when the first one is about to be deleted."""
    io = AirCheckpointIO()
    io.save_checkpoint({"global_step": 3, "state_dict": {"w": torch.tensor([1])}}, path)
    io.wait()

    def kill(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.remove" and str(args[0]).endswith("last.ckpt/.metadata"):
            os.kill(os.getpid(), 9)

    sys.addaudithook(kill)
    io.save_checkpoint({"global_step": step, "state_dict": {"w": torch.tensor([2])}}, path)
    io.wait()


@pytest.mark.parametrize("step", [3, 1])
def test_killed_before_the_old_one_is_deleted_the_new_one_counts(tmp_path: Path, step: int) -> None:
    """Also at the same step or a lower one, the save that was published last is what loads."""
    path, log = str(tmp_path / "c" / "last.ckpt"), tmp_path / "log"
    assert run_ranks(killed_while_replacing, path, step, log=log) == [KILLED], log.read_text()
    assert sorted(os.listdir(tmp_path / "c")) == ["last.ckpt", "last.ckpt.alt"]
    io = AirCheckpointIO()
    assert io.load_checkpoint(path)["state_dict"]["w"].item() == 2
    found = find_latest_valid(str(tmp_path / "c"))
    assert found is not None
    assert io.load_checkpoint(found)["state_dict"]["w"].item() == 2
    io.save_checkpoint({"global_step": 2, "state_dict": {"w": torch.tensor([3])}}, path)
    io.wait()
    assert os.listdir(tmp_path / "c") == ["last.ckpt"]
    assert io.load_checkpoint(path)["state_dict"]["w"].item() == 3


def test_overwriting_leaves_one_checkpoint_under_its_own_name(tmp_path: Path) -> None:
    """After saves of several steps to one name, that name holds the newest and nothing else is."""
    fit(trainer_with(saving(tmp_path / "c", save_top_k=0, save_last=True), max_epochs=2))
    assert os.listdir(tmp_path / "c") == ["last.ckpt"]
    (record,) = list_checkpoints(str(tmp_path / "c"))
    assert record.valid
    assert record.step == 8


def test_a_volume_that_refuses_to_rename_keeps_the_second_name(tmp_path: Path) -> None:
    """Where directories cannot be renamed, the newest is found and loaded under its other name."""
    io = AirCheckpointIO()
    target = "memory://renames/last.ckpt"
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step, "state_dict": {"w": torch.tensor([step])}}, target)
        io.wait()
        assert io.load_checkpoint(target)["state_dict"]["w"].item() == step
    assert len(list_checkpoints("memory://renames")) == 1
    io.remove_checkpoint(target)
    assert find_latest_valid("memory://renames") is None


def launched_by_fork(directory: str, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)  # Lightning would take one that is free for a moment
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        plugins=[AirCheckpointIO()],
        max_epochs=1,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=directory, every_n_train_steps=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    before = model.layers[0].weight.clone()
    trainer.fit(model, TorchDataLoader(Samples(), batch_size=2))
    assert not torch.equal(before, model.layers[0].weight)


@pytest.mark.slow
def test_ranks_forked_by_the_trainer(tmp_path: Path) -> None:
    """Under ddp_fork the parent process gets the trained weights, as with Lightning's own IO."""
    log = tmp_path / "log"
    directory = str(tmp_path / "c")
    assert run_ranks(launched_by_fork, directory, free_port(), log=log) == [0], log.read_text()[
        -3000:
    ]
    assert find_latest_valid(directory) is not None


def test_the_learning_rate_finder(numbers: str) -> None:
    """The finder saves before there are loaders, restores, and training goes on."""

    class Tunable(Model):
        def __init__(self) -> None:
            super().__init__()
            self.learning_rate = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    trainer = trainer_with(LearningRateFinder(num_training_steps=5))
    trainer.fit(Tunable(), datamodule=Data(train=numbers, num_workers=0, batch_size=2))
    assert trainer.global_step == 11


@pytest.mark.parametrize("spelling", ["dbfs:{volume}/c", "file://{local}/c"])
def test_a_directory_spelt_as_a_url(volume: Volume, spelling: str, tmp_path: Path) -> None:
    """dbfs:/Volumes and file:// as ModelCheckpoint's dirpath mean what they say."""
    given = spelling.format(volume=volume.path, local=volume.directory)
    fit(trainer_with(ModelCheckpoint(dirpath=given, every_n_train_steps=2, save_top_k=-1)))
    assert len(list_checkpoints(str(volume.directory / "c"))) == 2
    assert os.listdir(tmp_path / "cwd") == []


def test_save_last_as_a_link(tmp_path: Path) -> None:
    """save_last="link" works in a directory that does not exist yet, and leads to the newest."""
    fit(trainer_with(saving(tmp_path / "new", save_last="link", save_top_k=1), max_epochs=2))
    link = tmp_path / "new" / "last.ckpt"
    assert link.is_symlink()
    assert os.path.basename(os.path.realpath(link)) == "epoch=1-step=8.ckpt"
    assert sorted(os.listdir(tmp_path / "new")) == ["epoch=1-step=8.ckpt", "last.ckpt"]


def test_weights_alone_are_not_resumed_from(tmp_path: Path) -> None:
    """A newer checkpoint of weights alone in the same directory is left out."""
    weights = saving(tmp_path / "c", every_n_train_steps=4, save_weights_only=True, filename="w")
    fit(trainer_with(saving(tmp_path / "c", every_n_train_steps=3), weights))
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    fit(trainer_with(AirResume(str(tmp_path / "c")), Start()))
    assert seen == [3]


def test_weights_saved_later_to_the_same_path_are_not_resumed_from(tmp_path: Path) -> None:
    """Of a path's two names the one with the state is resumed from, also if that is the older."""
    root = tmp_path / "c"
    trainer = trainer_with(saving(root, every_n_train_steps=3, filename="last"))
    fit(trainer)
    io = AirCheckpointIO()
    weights = {"global_step": 1, "state_dict": trainer.lightning_module.state_dict()}
    io.save_checkpoint(weights, tmp_path / "weights")
    io.wait()
    # As on a volume that refuses to rename, by a process that was killed before it deleted the old.
    os.rename(tmp_path / "weights", root / "last.ckpt.alt")
    assert find_latest_valid(root) == f"{root}/last.ckpt.alt"
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    fit(trainer_with(AirResume(str(root)), Start()))
    fit(trainer_with(Start()), ckpt_path=str(root / "last.ckpt"))
    assert seen == [3, 3]


def test_wrapped_in_another_io() -> None:
    """Inside Lightning's AsyncCheckpointIO only rank 0 would save: refused at set-up."""
    trainer = trainer_with(plugins=[AsyncCheckpointIO(AirCheckpointIO())])
    with pytest.raises(InvalidArgumentError, match="AsyncCheckpointIO"):
        fit(trainer)
    trainer.strategy.checkpoint_io.teardown()


@pytest.mark.parametrize("every", [2, 100])
def test_a_failed_save_masks_nothing(tmp_path: Path, every: int) -> None:
    """save_on_exception after or in a failed save lets the user's own exception through."""

    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise ZeroDivisionError("the user's own")
            return super().training_step(batch, batch_idx)

    class BreakTheTarget(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if every > 3:  # the save on exception fails at its call
                (tmp_path / "taken").write_text("in the way")

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            if every < 3:  # the saves fail in the background
                name = f"epoch=0-step={trainer.global_step}.ckpt"
                (tmp_path / "taken" / name / "__0_0.distcp").mkdir(parents=True)

    checkpoint = saving(tmp_path / "taken", every_n_train_steps=every, save_on_exception=True)
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        fit(trainer_with(BreakTheTarget(), checkpoint), Broken())


class Orders(Callback):
    """What each epoch was trained on."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[str]] = {}

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.epochs.setdefault(trainer.current_epoch, []).extend(batch[0])


@pytest.mark.parametrize("plugins", [[], None])
def test_limited_epochs_see_new_files(numbers: str, plugins: Any) -> None:
    """limit_train_batches goes on to new shuffles, whichever IO the Trainer saves through."""
    orders = Orders()
    options = {} if plugins is None else {"plugins": plugins}
    trainer = trainer_with(orders, max_epochs=3, limit_train_batches=2, **options)
    trainer.fit(Model(), datamodule=Data(train=numbers, num_workers=0, batch_size=2))
    assert len({tuple(files) for files in orders.epochs.values()}) == 3


def test_reloaded_loaders_see_new_orders(numbers: str) -> None:
    """reload_dataloaders_every_n_epochs=1 does not begin with epoch 0's shuffle each time."""
    orders = Orders()
    trainer = trainer_with(orders, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Model(), datamodule=Data(train=numbers, num_workers=0, batch_size=2))
    assert len({tuple(files) for files in orders.epochs.values()}) == 3
    assert all(len(set(files)) == 22 for files in orders.epochs.values())


def test_overfitting_repeats_the_same_files(numbers: str) -> None:
    """overfit_batches trains on the same batches in each epoch."""
    orders = Orders()
    trainer = trainer_with(orders, max_epochs=3, overfit_batches=2)
    trainer.fit(Model(), datamodule=Data(train=numbers, num_workers=0, batch_size=2))
    assert len({tuple(files) for files in orders.epochs.values()}) == 1


@dataclass(frozen=True)
class FailingRun(Run):
    """A run whose model raises at a given batch, and saves on the exception."""

    fail_at: int | None = None


def train_and_fail(run: FailingRun) -> None:
    """Like ``train``; with ``fail_at``, training_step raises and a checkpoint is made of that."""

    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == run.fail_at:
                torch.rand(3)  # drawn by the batch that will be done again
                raise ZeroDivisionError

    train(run, extra=[Failing()], save_on_exception=True)


@pytest.mark.slow
@pytest.mark.parametrize("has_length", [True, False])
def test_a_checkpoint_on_exception_loses_no_batch(
    numbers: str, tmp_path: Path, has_length: bool
) -> None:
    """The batch in which training raised is trained on after the resume, with the same draws."""
    run = FailingRun(numbers, "", has_length=has_length, every_n_steps=100)
    whole = replace(run, directory=str(tmp_path / "whole"))
    assert run_ranks(train_and_fail, whole, log=tmp_path / "log") == [0]
    broken = replace(run, directory=str(tmp_path / "broken"))
    assert run_ranks(train_and_fail, replace(broken, fail_at=5), log=tmp_path / "log") == [1]
    assert run_ranks(train_and_fail, broken, log=tmp_path / "log") == [0]
    # Not by batch number: Lightning counts the batch that raised twice in its total.
    assert _trained(broken) == _trained(whole)


def _trained(run: Run) -> list[dict[str, Any]]:
    lines = Path(f"{run.directory}/diary-0.jsonl").read_text().splitlines()
    return [{**json.loads(line), "batch": None} for line in lines]


def train_and_validate(run: Run) -> None:
    """Like ``train``, with the results of each validation written down."""
    train(run, extra=[Validated(run)])


@pytest.mark.slow
def test_validation_draws_go_on(numbers: str, tmp_path: Path) -> None:
    """Random draws in validation after a resume are those of the uninterrupted run."""
    run = Run(numbers, "", validate=True, trainer=(("max_epochs", 3), ("num_sanity_val_steps", 0)))
    whole = replace(run, directory=str(tmp_path / "whole"))
    assert run_ranks(train_and_validate, whole, log=tmp_path / "log") == [0]
    broken = replace(run, directory=str(tmp_path / "broken"))
    killed = replace(broken, kill_at=15)
    assert run_ranks(train_and_validate, killed, log=tmp_path / "log") == [KILLED]
    assert run_ranks(train_and_validate, broken, log=tmp_path / "log") == [0]
    results = [Path(f"{r.directory}/validated.jsonl").read_text() for r in (whole, broken)]
    assert results[0] == results[1]
    assert len(set(results[0].splitlines())) == 3


def validate_and_fail(run: FailingRun) -> None:
    """Like ``train_and_validate``; with ``fail_at``, the validation after that batch raises."""

    class Failing(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == run.fail_at:
                raise ZeroDivisionError

    train(run, extra=[Failing(), Validated(run)], save_on_exception=True)


@pytest.mark.slow
def test_a_checkpoint_on_an_exception_in_validation(numbers: str, tmp_path: Path) -> None:
    """A validation that raised is run again after the resume, not taken for one that is over."""
    options = (("max_epochs", 2), ("num_sanity_val_steps", 0))
    run = FailingRun(numbers, "", every_n_steps=100, validate=True, trainer=options)
    whole = replace(run, directory=str(tmp_path / "whole"))
    assert run_ranks(validate_and_fail, whole, log=tmp_path / "log") == [0]
    broken = replace(run, directory=str(tmp_path / "broken"))
    failing = replace(broken, fail_at=len(_trained(whole)) // 2 - 1)
    assert run_ranks(validate_and_fail, failing, log=tmp_path / "log") == [1]
    assert run_ranks(validate_and_fail, broken, log=tmp_path / "log") == [0]
    assert _trained(broken) == _trained(whole)
    results = [Path(f"{r.directory}/validated.jsonl").read_text() for r in (whole, broken)]
    assert results[0] == results[1]
    assert len(results[0].splitlines()) == 2
