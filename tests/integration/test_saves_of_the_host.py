"""What ModelCheckpoint, loggers and exceptions make of saves that take a while and all ranks."""

import contextlib
import gc
import logging
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from air_lightning import (
    AirCheckpointIO,
    AirResume,
    SaveFailedError,
    find_latest_valid,
    list_checkpoints,
)
from air_lightning.integrations import entrance
from air_lightning.integrations.attach import bound
from conftest import Volume
from integration.test_wiring import fit, saving, trainer_with
from ranks import run_ranks

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("elsewhere")]
sys.path.insert(0, str(Path(__file__).parents[1] / "fuse"))


def shard_of(path: str) -> os.stat_result:
    return os.stat(f"{path}/__0_0.distcp")


def test_save_last_gives_a_step_a_second_name_and_writes_it_once(tmp_path: Path) -> None:
    """The last checkpoint shares the files of the one of its step, and outlives it."""
    root = str(tmp_path / "c")
    trainer = trainer_with(saving(root, save_last=True), max_epochs=2)
    fit(trainer)
    assert len(trainer.strategy.checkpoint_io.stats) == 4  # and not eight
    newest, last = f"{root}/epoch=1-step=8.ckpt", f"{root}/last.ckpt"
    assert shard_of(newest).st_ino == shard_of(last).st_ino
    assert not os.path.islink(last)
    shutil.rmtree(newest)
    record = next(r for r in list_checkpoints(root) if r.path == last)
    assert record.valid
    assert record.step == 8
    trainer = trainer_with(max_epochs=3)
    fit(trainer, ckpt_path=last)
    assert trainer.global_step == 12


def test_save_last_saves_for_itself_what_no_other_save_of_the_step_holds(tmp_path: Path) -> None:
    """With save_top_k=0 there is nothing to share."""
    root = str(tmp_path / "c")
    trainer = trainer_with(saving(root, save_last=True, save_top_k=0))
    fit(trainer)
    assert len(trainer.strategy.checkpoint_io.stats) == 2
    assert os.listdir(root) == ["last.ckpt"]


@pytest.mark.fuse
@pytest.mark.slow
def test_save_last_saves_twice_where_files_cannot_be_linked(tmp_path: Path) -> None:
    """On a mount without hard links, both names are there and whole."""
    from slow_mount import slow_mount

    (tmp_path / "beneath").mkdir()
    with slow_mount(tmp_path / "beneath") as mount:
        trainer = trainer_with(saving(str(mount), save_last=True))
        fit(trainer)
        assert len(trainer.strategy.checkpoint_io.stats) == 4
        found = {os.path.basename(r.path): r.step for r in list_checkpoints(str(mount)) if r.valid}
        assert found == {"epoch=0-step=2.ckpt": 2, "epoch=0-step=4.ckpt": 4, "last.ckpt": 4}


def test_save_last_makes_no_link_on_a_volume(volume: Volume) -> None:
    """A volume is not asked for links, also where a directory that has them stands in for it."""
    root = f"{volume.path}/c"
    fit(trainer_with(saving(root, save_last=True)))
    assert sum(record.valid for record in list_checkpoints(root)) == 3
    shards = list((volume.directory / "c").rglob("*.distcp"))
    assert shards
    assert all(os.stat(shard).st_nlink == 1 for shard in shards)


def test_a_save_that_was_cut_short_is_made_again_under_its_name(tmp_path: Path) -> None:
    """A resumed run saves over what a kill left: no ``-v1``, and no torn directory stays."""
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    fit(trainer_with(saving(whole, save_last=True), max_epochs=2))
    fit(trainer_with(saving(broken, save_last=True)))
    # As if killed in the save of step 6, in this run's name and in the last one's.
    shutil.copytree(f"{broken}/last.ckpt", f"{broken}/epoch=1-step=6.ckpt")
    for name in ("epoch=1-step=6.ckpt", "last.ckpt"):
        os.remove(f"{broken}/{name}/.metadata")
    fit(trainer_with(AirResume(), saving(broken, save_last=True), max_epochs=2))
    assert sorted(os.listdir(broken)) == sorted(os.listdir(whole))
    assert all(record.valid for record in list_checkpoints(broken))


def test_without_air_resume_a_torn_directory_may_be_another_runs(tmp_path: Path) -> None:
    """A run that resumes nothing leaves it alone, and saves beside it as Lightning does."""
    torn = tmp_path / "c" / "epoch=0-step=2.ckpt"
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"in the writing")
    fit(trainer_with(saving(str(tmp_path / "c"))))
    assert [path.name for path in torn.iterdir()] == ["__0_0.distcp"]
    assert (tmp_path / "c" / "epoch=0-step=2-v1.ckpt").is_dir()


def test_names_that_are_taken_on_a_volume_that_a_directory_stands_in_for(volume: Volume) -> None:
    """A second run from the start saves beside the checkpoints of the first, as Lightning does."""
    for _ in range(2):
        fit(trainer_with(saving(f"{volume.path}/c")))
    names = {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"}
    versions = {name.replace(".ckpt", "-v1.ckpt") for name in names}
    assert set(os.listdir(volume.directory / "c")) == names | versions


class Uploading(CSVLogger):
    """Notes how many checkpoints a logger that uploads them would find."""

    def __init__(self, directory: str, root: str) -> None:
        super().__init__(directory)
        self.root = root
        self.found: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.found.append(sum(record.valid for record in list_checkpoints(self.root)))


def test_loggers_hear_of_checkpoints_that_are_there(tmp_path: Path) -> None:
    """One notice for each save, none before it is published, the last one by the end of fit."""
    logger = Uploading(str(tmp_path / "logs"), str(tmp_path / "c"))
    fit(trainer_with(saving(tmp_path / "c"), logger=logger, max_epochs=2))
    assert len(logger.found) == 4
    assert all(found > told for told, found in enumerate(logger.found))


@contextlib.contextmanager
def waiting_in_vain(trainer: Any) -> Iterator[None]:
    """A save waits a second for the other ranks, who will not come.

    Not by ``timeout_s=1``: ranks have to meet in as many seconds then, wherever they come together.
    """
    own = bound(trainer).entrance
    usual, own._timeout_s = own._timeout_s, 1.0
    try:
        yield
    finally:
        own._timeout_s = usual


class SavesOnRank0(Callback):
    """The mistake: a save that only one rank calls."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            with waiting_in_vain(trainer):
                trainer.save_checkpoint("/tmp/never.ckpt")


def save_on_rank_0(directory: str) -> None:
    trainer = trainer_with(SavesOnRank0(), devices=2, strategy="ddp")
    with pytest.raises(SaveFailedError, match=r"of 2 ranks these have not come .*: 1\. Call"):
        fit(trainer)
    os._exit(7)


def test_a_save_that_only_one_rank_calls_is_an_error_that_says_so(tmp_path: Path) -> None:
    """It names the rank that did not come, instead of waiting for it for ever."""
    statuses = run_ranks(save_on_rank_0, str(tmp_path), world_size=2, log=tmp_path / "log")
    assert statuses[0] == 7, (tmp_path / "log").read_text()[-2000:]


class FailsOnRank1(Callback):
    """An exception that one rank has alone; neither has to wait long for the other then."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            bound(trainer).entrance._timeout_s = 1.0
            if trainer.global_rank == 1:
                raise KeyError("the user's own")


def fail_on_rank_1(directory: str) -> None:
    logging.getLogger("air_lightning").addHandler(logging.StreamHandler(sys.stderr))
    trainer = trainer_with(
        saving(directory, save_on_exception=True),
        FailsOnRank1(),
        devices=2,
        strategy="ddp",
        max_epochs=2,
    )
    with pytest.raises(KeyError, match="the user's own"):
        fit(trainer)
    os._exit(11 + int(os.environ["RANK"]))


def test_an_exception_on_one_rank_is_not_held_up_by_its_checkpoint(tmp_path: Path) -> None:
    """save_on_exception gives up after its wait, says so, and the user's own error comes out."""
    directory = str(tmp_path / "c")
    statuses = run_ranks(fail_on_rank_1, directory, world_size=2, log=tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert statuses[1] == 12, log[-3000:]
    assert "No checkpoint is saved on the exception. A checkpoint is to be saved, and of 2" in log
    newest = find_latest_valid(directory)
    assert newest is not None
    assert newest.endswith("step=2.ckpt")


def test_a_restarted_run_overwrites_its_last_checkpoint(tmp_path: Path) -> None:
    """Five starts of one epoch each leave one last checkpoint, as with Lightning's own files."""
    root = str(tmp_path / "c")
    for start in range(1, 6):
        options = {"ckpt_path": f"{root}/last.ckpt"} if start > 1 else {}
        trainer = trainer_with(saving(root, save_last=True, save_top_k=1), max_epochs=start)
        fit(trainer, **options)
    assert sorted(os.listdir(root)) == ["epoch=4-step=20.ckpt", "last.ckpt"]


class Naming(CSVLogger):
    """Notes whether what it is told of is there, as a logger that uploads the best would."""

    told: list[tuple[str, bool]]

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        best = checkpoint_callback.best_model_path
        self.told.append((os.path.basename(best), os.path.exists(f"{best}/.metadata")))


def test_loggers_are_told_the_paths_of_their_own_moment(tmp_path: Path) -> None:
    """Each notice names the checkpoint that it is about, whatever has been saved since."""
    logger = Naming(str(tmp_path / "logs"))
    logger.told = []
    for _ in range(2):  # a second Trainer with the same logger is heard like the first
        fit(trainer_with(saving(tmp_path / "c", save_top_k=-1), logger=logger, max_epochs=2))
    names = [name for name, _ in logger.told]
    assert [name.split("-v")[0].removesuffix(".ckpt") for name in names] == [
        *(f"epoch={(step - 1) // 4}-step={step}" for step in (2, 4, 6, 8)),
    ] * 2
    assert all(there for _, there in logger.told)


def skip_one_save(directory: str) -> None:
    """Rank 1 comes to no first save, and to every later one."""
    trainer = trainer_with(devices=2, strategy="ddp")
    fit(trainer)
    rank = int(os.environ["RANK"])
    if rank == 0:
        with pytest.raises(SaveFailedError, match="have not come"), waiting_in_vain(trainer):
            trainer.save_checkpoint(f"{directory}/alone.ckpt")
    trainer.strategy.barrier()
    trainer.save_checkpoint(f"{directory}/together.ckpt")
    second = trainer_with(devices=2, strategy="ddp")
    fit(second)
    if rank == 0:
        missing = pytest.raises(SaveFailedError, match=r"these have not come to it in \d+ s: 1")
        with missing, waiting_in_vain(second):
            second.save_checkpoint(f"{directory}/alone.ckpt")
    trainer.strategy.barrier()
    second.save_checkpoint(f"{directory}/again.ckpt")


def test_a_save_that_one_rank_skipped_is_no_burden_for_the_next(tmp_path: Path) -> None:
    """The ranks meet again at the next save, also that of a second Trainer."""
    log = tmp_path / "log"
    statuses = run_ranks(skip_one_save, str(tmp_path), world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()[-3000:]
    assert {os.path.basename(r.path) for r in list_checkpoints(str(tmp_path)) if r.valid} == {
        *("together.ckpt", "again.ckpt")
    }


class Alone(Callback):
    """A user's own callback that saves and tells the logger itself."""

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("own.ckpt")
        for logger in trainer.loggers:
            logger.after_save_checkpoint(self)


class Heard(CSVLogger):
    """Notes whom it hears from."""

    heard: list[Any]

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.heard.append(checkpoint_callback)


def test_a_users_own_callback_may_tell_the_logger(tmp_path: Path) -> None:
    """Of a callback that is no ModelCheckpoint nothing is known, and nothing is asked."""
    logger, alone = Heard(str(tmp_path / "logs")), Alone()
    logger.heard = []
    fit(trainer_with(alone, logger=logger, enable_checkpointing=False))
    assert logger.heard == [alone]


def leave_no_group(directory: str) -> None:
    trainer = trainer_with(plugins=[AirCheckpointIO()], devices=2, strategy="ddp")
    fit(trainer)
    trainer.save_checkpoint(f"{directory}/c.ckpt")
    group = weakref.ref(dist.group.WORLD)
    assert entrance._next_round[0]() is group() is not None
    del trainer
    dist.destroy_process_group()
    for thread in threading.enumerate():
        if thread.name.startswith("air-lightning"):
            thread.join()  # the save's, which may be about to end
    gc.collect()
    assert entrance._next_round[0]() is None


def test_the_count_of_saves_keeps_no_process_group_alive(tmp_path: Path) -> None:
    """A group that was destroyed goes, and the next one counts from the beginning."""
    log = tmp_path / "log"
    statuses = run_ranks(leave_no_group, str(tmp_path), world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()[-3000:]
