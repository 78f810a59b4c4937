"""A run that is killed and resumed is, bit for bit, the run that was not."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from air_lightning import find_latest_valid
from conftest import Volume
from integration.training import Run, assert_same, diary, generators, result, train
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FILES = 22  # not a multiple of the batch size times any grid below


@pytest.fixture
def numbers(volume: Volume) -> str:
    """A volume of small numbered text files."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


def attempt(run: Run, tmp_path: Path, *, killed: bool) -> None:
    """Run every rank once, to its end or its kill."""
    log = tmp_path / "output.txt"
    statuses = run_ranks(train, run, world_size=run.world_size, log=log)
    wanted = {KILLED} if killed else {0}
    assert set(statuses) == wanted, log.read_text()[-4000:]


def assert_resumes_exactly(run: Run, tmp_path: Path, kills: list[int]) -> None:
    """Compare an interrupted run with one that was not."""
    whole = replace(run, directory=str(tmp_path / "whole"))
    attempt(whole, tmp_path, killed=False)
    broken = replace(run, directory=str(tmp_path / "broken"))
    for kill in kills:
        attempt(replace(broken, kill_at=kill), tmp_path, killed=True)
        assert find_latest_valid(broken.checkpoints) is not None
    attempt(broken, tmp_path, killed=False)
    assert diary(broken) == diary(whole)
    for rank in range(run.world_size):
        assert_same(result(broken, rank), result(whole, rank))
        assert_same(generators(broken, rank), generators(whole, rank), f"rank {rank}")
    if not any(key == "limit_train_batches" for key, _ in run.trainer):
        assert_each_file_once_per_epoch(broken)


def assert_each_file_once_per_epoch(run: Run) -> None:
    """Count what was delivered, epoch by epoch."""
    epochs: dict[int, Counter[str]] = {}
    for (rank, _), line in diary(run).items():
        if rank in run.readers:
            epochs.setdefault(line["epoch"], Counter()).update(line["files"])
    slots = len(run.readers) * max(run.num_workers, 1)
    # Under several ranks the data module pads, so that every slot delivers equally many files.
    padded = -FILES % slots if len(run.readers) > 1 else 0
    for delivered in epochs.values():
        assert len(delivered) == FILES
        assert sum(delivered.values()) == FILES + padded
        assert max(delivered.values()) <= (2 if padded else 1)


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_mid_epoch(numbers: str, tmp_path: Path, num_workers: int, has_length: bool) -> None:
    """Killed in the middle of an epoch, a run goes on with the batch that would have come next."""
    run = Run(numbers, "", num_workers=num_workers, has_length=has_length)
    assert_resumes_exactly(run, tmp_path, kills=[5])


def test_killed_twice_in_one_epoch(numbers: str, tmp_path: Path) -> None:
    """The second resume within one epoch is as exact as the first."""
    run = Run(numbers, "", num_workers=3, every_n_steps=2)
    assert_resumes_exactly(run, tmp_path, kills=[15, 19])


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_killed_after_a_save_at_an_epochs_end(
    numbers: str, tmp_path: Path, has_length: bool, limit: str
) -> None:
    """A checkpoint taken at an epoch's end resumes with the whole next epoch, and its shuffle."""
    amount = 3 if limit == "max_epochs" else 3 * 11
    run = Run(
        numbers, "", has_length=has_length, trainer=((limit, amount),), save_at_epoch_end=True
    )
    assert_resumes_exactly(run, tmp_path, kills=[13])


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_save_on_the_last_batch_of_an_epoch(numbers: str, tmp_path: Path, limit: str) -> None:
    """A checkpoint taken at an epoch's last step resumes with the next epoch."""
    per_epoch = 12  # 6 batches from each of two workers
    amount = 3 if limit == "max_epochs" else 3 * per_epoch
    run = Run(numbers, "", num_workers=2, every_n_steps=per_epoch, trainer=((limit, amount),))
    assert_resumes_exactly(run, tmp_path, kills=[14])


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_resumed_at_an_epochs_last_step_twice(
    numbers: str, tmp_path: Path, limit: str, has_length: bool
) -> None:
    """A run that resumed at one epoch's last step resumes at the next one's, with no epoch more."""
    amount = 4 if limit == "max_epochs" else 4 * 11
    run = Run(numbers, "", has_length=has_length, every_n_steps=11, trainer=((limit, amount),))
    assert_resumes_exactly(run, tmp_path, kills=[13, 24, 38])


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("save_at_epoch_end", [True, False])
@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_a_run_that_is_over_resumes_to_where_it_ended(
    numbers: str, tmp_path: Path, limit: str, save_at_epoch_end: bool, validate: bool
) -> None:
    """Started again after its end, and again, a run trains nothing and stands where it stood."""
    per_epoch = 11
    run = Run(
        numbers,
        str(tmp_path / "run"),
        every_n_steps=per_epoch,
        save_at_epoch_end=save_at_epoch_end,
        validate=validate,
        trainer=((limit, 2 if limit == "max_epochs" else 2 * per_epoch),),
    )
    attempt(run, tmp_path, killed=False)
    lines, ended, drawn = diary(run), result(run), generators(run)
    for again in ("once", "twice"):
        attempt(run, tmp_path, killed=False)
        assert diary(run) == lines
        assert_same(result(run), ended, again)
        assert_same(generators(run), drawn, again)


def test_limit_train_batches(numbers: str, tmp_path: Path) -> None:
    """Epochs cut short by the Trainer go on to new shuffles, resumed or not."""
    run = Run(numbers, "", trainer=(("max_epochs", 4), ("limit_train_batches", 4)))
    assert_resumes_exactly(run, tmp_path, kills=[4, 10])
    batches = diary(replace(run, directory=str(tmp_path / "whole"))).values()
    assert len({tuple(line["files"]) for line in batches}) > 4


def test_accumulated_gradients(numbers: str, tmp_path: Path) -> None:
    """Saves fall on optimizer steps, and the batches between are done again, the same."""
    run = Run(numbers, "", trainer=(("max_epochs", 2), ("accumulate_grad_batches", 2)))
    assert_resumes_exactly(run, tmp_path, kills=[9])


def test_two_ranks(numbers: str, tmp_path: Path) -> None:
    """Two DDP ranks with two workers each resume, twice, each where it was."""
    run = Run(numbers, "", world_size=2, num_workers=2, every_n_steps=2)
    assert_resumes_exactly(run, tmp_path, kills=[4, 10])
