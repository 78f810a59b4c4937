"""A run that is asked to end by a signal saves once, ends, and goes on as if nothing had been."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from air_lightning import DataLoader, UCVolumeDataset, list_checkpoints
from air_lightning.integrations import entrance, halt
from conftest import Volume
from integration.training import Run, Validated, assert_same, diary, result, train
from ranks import KILLED, TERMINATED, run_ranks, start_ranks, wait_for_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILES = 22
PER_EPOCH = 6  # batches of each of two ranks with two workers
# In these a rank does wait in vain: for one that waits elsewhere, or for one that was killed.
WAITS, KILLS = "test_in_validation", "test_after_another_rank_was_killed"


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes late, on a busy machine, is waited for: else a later step is the last."""
    if request.node.originalname != KILLS:
        monkeypatch.setattr(entrance, "_ENDING_WAIT_S", 60.0)
        monkeypatch.setattr(halt, "_ENDING_PATIENCE", 12)
    if request.node.originalname not in (KILLS, WAITS):
        monkeypatch.setattr(halt, "_PATIENCE_S", 20.0)


@pytest.fixture
def numbers(volume: Volume) -> str:
    """A volume of small numbered text files."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


@dataclass
class Sender(Callback):
    """Sends signals at a moment of the run, from a process of its own, as a scheduler does.

    Args:
        moment: A hook's name.
        at: Which of its calls.
        to: Ranks whose processes get it; or the whole process group, workers included.
        number: The signal.
        sender: The rank that is at that moment; the first of ``to`` by default.
    """

    moment: str
    at: int = 1
    to: Sequence[int] | None = None
    number: int = signal.SIGTERM
    sender: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        sender = (self.to or [0])[0] if self.sender is None else self.sender
        self._calls, self._sends = 0, trainer.global_rank == sender
        self._pids: list[int] = [0] * trainer.world_size
        if trainer.world_size > 1:
            import torch.distributed as dist

            dist.all_gather_object(self._pids, os.getpid())
        else:
            self._pids = [os.getpid()]

    def _pass(self, moment: str) -> None:
        if moment != self.moment:
            return
        self._calls += 1
        if self._calls == self.at and self._sends:
            self.send()

    def send(self) -> None:
        child = os.fork()
        if child == 0:
            # Not from the rank itself: its workers obey it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self.to is None:
                os.killpg(0, self.number)
            for rank in self.to or ():
                os.kill(self._pids[rank], self.number)
            os._exit(0)
        os.waitpid(child, 0)

    def on_train_batch_start(self, *args: Any) -> None:
        self._pass("on_train_batch_start")

    def on_after_backward(self, *args: Any) -> None:
        self._pass("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self._pass("on_train_batch_end")

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self._pass("on_sanity_batch" if trainer.sanity_checking else "on_validation_batch_start")

    def on_train_epoch_end(self, *args: Any) -> None:
        self._pass("on_train_epoch_end")

    def on_train_epoch_start(self, *args: Any) -> None:
        self._pass("on_train_epoch_start")

    def on_fit_start(self, *args: Any) -> None:
        self._pass("on_fit_start")


class Insisting(Sender):
    """Sends again when the checkpoint is being put together, and when the run has ended."""

    def on_save_checkpoint(self, *args: Any) -> None:
        self.send()

    def on_exception(self, *args: Any) -> None:
        self.send()


def attempt(run: Run, tmp_path: Path, *extra: Callback) -> list[int]:
    """Run every rank once, to its end; returns their exit statuses."""
    log = tmp_path / "output.txt"
    statuses = run_ranks(_train, run, extra, world_size=run.world_size, log=log)
    assert set(statuses) <= {0, TERMINATED}, f"{statuses} {log.read_text()[-6000:]}"
    return statuses


def _train(run: Run, extra: Sequence[Callback]) -> None:
    train(run, extra=[*extra, Validated(run)] if run.validate else extra)


def preempted(run: Run) -> list[Any]:
    """The checkpoints that were saved on a signal."""
    records = list_checkpoints(run.checkpoints)
    return [record for record in records if "preempted" in record.path]


def validated(run: Run) -> list[str]:
    """What each whole validation of each rank came to."""
    return sorted(Path(f"{run.directory}/validated.jsonl").read_text().splitlines())


_undisturbed: dict[Run, Run] = {}


def undisturbed(run: Run, tmp_path: Path) -> Run:
    """The same without a signal, to its end; one in each process: the files are the same."""
    wanted = replace(run, directory="")
    if wanted not in _undisturbed:
        whole = replace(run, directory=str(tmp_path / "whole"))
        assert set(attempt(whole, tmp_path)) == {0}
        _undisturbed[wanted] = whole
    return _undisturbed[wanted]


def compare(run: Run, tmp_path: Path, sender: Sender, *, saves: int | None = 1) -> Run:
    """Interrupt a run by signals, restart it, and compare it with one that was not."""
    whole = undisturbed(run, tmp_path)
    broken = replace(run, directory=str(tmp_path / "broken"))
    assert set(attempt(broken, tmp_path, sender)) == {TERMINATED}
    found = preempted(broken)
    assert len(found) == saves if saves is not None else len(found) <= 1, found
    assert all(record.valid for record in found)
    assert set(attempt(broken, tmp_path)) == {0}
    assert diary(broken) == diary(whole)
    if run.validate:
        assert validated(broken) == validated(whole)
    for rank in range(run.world_size):
        assert_same(result(broken, rank), result(whole, rank))
    return broken


def two_ranks(numbers: str, **options: Any) -> Run:
    """Two DDP ranks with two workers each; no save but on a signal, unless told."""
    return Run(numbers, "", **{"world_size": 2, "num_workers": 2, "every_n_steps": 1000, **options})


@pytest.mark.parametrize("to", [[0], [1], [0, 1], None], ids=["first", "second", "all", "group"])
def test_in_a_step(numbers: str, tmp_path: Path, to: Sequence[int] | None) -> None:
    """Whoever gets the signal in a step, all ranks stop at one step, and one save is published."""
    run = compare(two_ranks(numbers), tmp_path, Sender("on_train_batch_start", 3, to))
    assert [record.step for record in preempted(run)] in ([3], [4])


def test_between_steps(numbers: str, tmp_path: Path) -> None:
    """A signal to one rank between its steps, when others may be ahead, is as exact."""
    compare(two_ranks(numbers), tmp_path, Sender("on_train_batch_end", 3, [1]))


def test_on_the_last_step_of_an_epoch(numbers: str, tmp_path: Path) -> None:
    """A run that is to stop at an epoch's last step goes on with the next epoch."""
    run = two_ranks(numbers)
    run = compare(run, tmp_path, Sender("on_train_batch_start", PER_EPOCH, [1]))
    assert [record.step for record in preempted(run)] == [PER_EPOCH]


@pytest.mark.parametrize("to", [[1], None], ids=["second", "group"])
@pytest.mark.parametrize("moment", ["on_train_epoch_end", "on_train_epoch_start"])
def test_between_epochs(
    numbers: str, tmp_path: Path, moment: str, to: Sequence[int] | None
) -> None:
    """A signal between two epochs stops all ranks at one point."""
    compare(two_ranks(numbers), tmp_path, Sender(moment, 2, to))


@pytest.mark.parametrize("to", [[1], None], ids=["second", "group"])
@pytest.mark.parametrize("interval", [4, 1.0], ids=["inside", "at the end"])
def test_in_validation(
    numbers: str, tmp_path: Path, interval: float, to: Sequence[int] | None
) -> None:
    """A validation that is broken off is run again, whole, by the restart."""
    trainer = (("max_epochs", 3), ("val_check_interval", interval), ("num_sanity_val_steps", 0))
    run = two_ranks(numbers, validate=True, trainer=trainer)
    sender = Sender("on_validation_batch_start", 8, to)
    run = compare(run, tmp_path, sender)
    step = 10 if interval == 4 else 12
    # The other rank may have had its last batch of the validation.
    assert [record.step for record in preempted(run)] in ([step], [step + 1])


def test_a_save_that_was_put_off_until_the_validation(numbers: str, tmp_path: Path) -> None:
    """A ModelCheckpoint that waits for a metric of the validation saves after that is run again."""
    trainer = (("max_epochs", 1), ("val_check_interval", 4), ("num_sanity_val_steps", 0))
    run = Run(numbers, str(tmp_path / "run"), every_n_steps=1000, validate=True, trainer=trainer)
    best = f"{run.directory}/best"

    def monitored() -> ModelCheckpoint:
        return ModelCheckpoint(best, monitor="inputs", every_n_train_steps=4, save_top_k=-1)

    sender = Sender("on_validation_batch_start", 2)
    assert attempt(run, tmp_path, monitored(), sender) == [TERMINATED]
    assert [record.step for record in preempted(run)] == [4]
    assert list_checkpoints(best) == []
    assert attempt(run, tmp_path, monitored()) == [0]
    assert {record.step for record in list_checkpoints(best) if record.valid} == {4, 8}


def test_at_a_step_with_a_validation_after_it(numbers: str, tmp_path: Path) -> None:
    """A run that is to stop where a validation is due validates first thing when restarted."""
    trainer = (("max_epochs", 2), ("val_check_interval", 4), ("num_sanity_val_steps", 0))
    run = two_ranks(numbers, validate=True, trainer=trainer)
    run = compare(run, tmp_path, Sender("on_train_batch_start", 4, [1]))
    assert [record.step for record in preempted(run)] == [4]


def test_in_the_sanity_check(numbers: str, tmp_path: Path) -> None:
    """In the sanity check there is nothing to save; a rank that is past it trains one step."""
    run = two_ranks(numbers, validate=True, trainer=(("max_epochs", 1),))
    compare(run, tmp_path, Sender("on_sanity_batch", 1), saves=None)


def test_before_the_first_step(numbers: str, tmp_path: Path) -> None:
    """A signal while the run is set up ends it after its first step."""
    run = compare(two_ranks(numbers), tmp_path, Sender("on_fit_start"))
    assert [record.step for record in preempted(run)] == [1]


@pytest.mark.parametrize("every", [3, 4], ids=["of the step before", "of the same step"])
def test_while_a_save_is_in_flight(numbers: str, tmp_path: Path, every: int) -> None:
    """A save in flight is published, and none is made of a step that is in one already."""
    run = two_ranks(numbers, every_n_steps=every)
    sender = Sender("on_train_batch_start", 4)
    run = compare(run, tmp_path, sender, saves=1 if every == 3 else 0)
    steps = [record.step for record in list_checkpoints(run.checkpoints) if record.valid]
    assert {every, 4} <= set(steps)
    assert len(steps) == len(set(steps))


def test_once_more_while_it_saves(numbers: str, tmp_path: Path) -> None:
    """Further signals change nothing about the save, nor about how the run ends."""
    compare(two_ranks(numbers), tmp_path, Insisting("on_train_batch_start", 3))


def test_accumulated_gradients(numbers: str, tmp_path: Path) -> None:
    """A run stops where no gradients are accumulated, for no checkpoint holds these."""
    run = two_ranks(numbers, trainer=(("max_epochs", 2), ("accumulate_grad_batches", 3)))
    compare(run, tmp_path, Sender("on_train_batch_start", 4, [0]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_rank(numbers: str, tmp_path: Path, number: int) -> None:
    """A lone process ends the step in progress, on SIGUSR1 as on SIGTERM."""
    run = Run(numbers, "", num_workers=2, every_n_steps=1000)
    run = compare(run, tmp_path, Sender("on_after_backward", 5, None, number))
    assert [record.step for record in preempted(run)] == [5]


def test_twice(numbers: str, tmp_path: Path) -> None:
    """A run that is preempted again after its restart is still the run that was not."""
    run = replace(two_ranks(numbers), directory=str(tmp_path / "broken"))
    for _ in range(2):
        assert set(attempt(run, tmp_path, Sender("on_train_batch_start", 5))) == {TERMINATED}
    assert len(preempted(run)) == 2
    assert set(attempt(run, tmp_path)) == {0}
    whole = undisturbed(run, tmp_path)
    assert diary(run) == diary(whole)
    for rank in range(run.world_size):
        assert_same(result(run, rank), result(whole, rank))


def test_handlers_of_the_user(numbers: str, tmp_path: Path) -> None:
    """A handler that exits is called once the checkpoint is there, and is there again after fit."""
    run = Run(numbers, str(tmp_path / "run"), every_n_steps=1000)
    log = tmp_path / "output.txt"
    assert run_ranks(_train_with_handler, run, [Sender("on_train_batch_start", 3)], log=log) == [7]
    assert [record.step for record in preempted(run)] == [3]
    assert run_ranks(_train_with_handler, run, [], log=log) == [0], log.read_text()[-4000:]


def _train_with_handler(run: Run, extra: Sequence[Callback]) -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, leave)
    train(run, extra=extra)
    assert signal.getsignal(signal.SIGTERM) is leave
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


class Told(Logger):
    """Writes down the steps that it is told of."""

    name, version = "told", 0

    def __init__(self, path: str) -> None:
        self._path = path

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self._path, "a") as told:
            told.write(f"{step}\n")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to note."""


def test_loggers_are_told_of_the_last_step(numbers: str, tmp_path: Path) -> None:
    """Loggers are told of each step once, of the one that a signal made the last one too."""
    told = tmp_path / "told"
    options = (("max_epochs", 1), ("log_every_n_steps", 1), ("logger", Told(str(told))))
    run = Run(numbers, str(tmp_path / "run"), every_n_steps=1000, trainer=options)
    assert attempt(run, tmp_path, Sender("on_train_batch_start", 3)) == [TERMINATED]
    assert attempt(run, tmp_path) == [0]
    steps = [int(line) for line in told.read_text().splitlines()]
    assert steps == list(range(len(steps)))


@dataclass
class Killer(Callback):
    """One rank dies by SIGKILL when all others are about to wait for it at a save.

    Args:
        rank: Which one.
        at: The step that is saved.
        directory: Where the others tell that they are there.
    """

    rank: int
    at: int
    directory: Path

    def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step != self.at or (self.directory / "killed").exists():
            return
        if trainer.global_rank != self.rank:
            (self.directory / f"here-{trainer.global_rank}").touch()
            return
        trainer.strategy.checkpoint_io.wait()
        while len(list(self.directory.glob("here-*"))) < trainer.world_size - 1:
            time.sleep(0.005)
        (self.directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed", [0, 1])
def test_after_another_rank_was_killed(numbers: str, tmp_path: Path, killed: int) -> None:
    """Who waits at a save for a killed rank ends by itself within torchrun's half minute."""
    run = replace(two_ranks(numbers, every_n_steps=2), directory=str(tmp_path / "broken"))
    log = tmp_path / "output.txt"
    pids = start_ranks(_train, run, [Killer(killed, 4, tmp_path)], world_size=2, log=log)
    left = pids[1 - killed]
    assert os.waitstatus_to_exitcode(os.waitpid(pids[killed], 0)[1]) == KILLED
    os.kill(left, signal.SIGTERM)
    # Not half an hour, as for one that is only slow. How long all of it takes is up to the machine.
    assert entrance._ENDING_WAIT_S <= 15
    assert wait_for_ranks([left], pids[0], timeout_s=100) == [1]
    told = log.read_text()
    assert "SaveFailedError" in told
    assert ("these have not come to it" if killed == 1 else "rank 0, which keeps") in told
    assert {record.step for record in list_checkpoints(run.checkpoints)} == {2}
    assert all(record.valid for record in list_checkpoints(run.checkpoints))


def test_workers_of_a_killed_process_end(numbers: str, tmp_path: Path) -> None:
    """Busy workers end soon after their process was killed, and with them its open sockets."""
    pids = start_ranks(_load_for_ever, numbers, tmp_path, world_size=1)
    while len(list(tmp_path.glob("worker-*"))) < 2:
        time.sleep(0.01)
    workers = [psutil.Process(int(path.suffix[1:])) for path in tmp_path.glob("worker-*")]
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    deadline = time.monotonic() + 100
    try:
        while any(map(_runs, workers)):
            assert time.monotonic() < deadline, workers
            time.sleep(0.01)
    finally:
        for worker in workers:
            if _runs(worker):
                worker.kill()


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _load_for_ever(volume: str, directory: Path) -> None:
    def never(path: str) -> str:
        (directory / f"worker-.{os.getpid()}").touch()
        time.sleep(600)  # longer than they are waited for above
        return path

    next(iter(DataLoader(UCVolumeDataset(volume).map(never), num_workers=2, batch_size=1)))
