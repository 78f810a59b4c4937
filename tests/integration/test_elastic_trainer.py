"""A Trainer's run goes on on another grid of ranks and workers, with what is left of the epoch."""

import json
import math
import random
import shutil
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from air_lightning import list_checkpoints
from conftest import Volume
from integration.training import Run, assert_same, diary, result, train
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FILES = 44


class Hooks(Callback):
    """Writes down what Lightning counts at an epoch's end, and a generator at each batch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        state = zlib.crc32(repr(random.getstate()).encode())
        line = [trainer.global_rank, trainer.fit_loop.epoch_loop.total_batch_idx, state]
        with open(f"{self.run.directory}/generators.jsonl", "a") as generators:
            generators.write(json.dumps(line) + "\n")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self.write(trainer, ["trained", trainer.current_epoch, trainer.global_step, batches])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.write(trainer, ["validated", trainer.current_epoch, trainer.global_step])

    def write(self, trainer: Any, line: list[Any]) -> None:
        if trainer.is_global_zero:
            with open(f"{self.run.directory}/epochs.jsonl", "a") as epochs:
                epochs.write(json.dumps(line) + "\n")


def observed(run: Run) -> None:
    """One attempt, in a rank."""
    train(run, extra=[Hooks(run)])


@pytest.fixture
def numbers(volume: Volume) -> str:
    """A volume of small numbered text files."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


@pytest.fixture
def run(numbers: str, tmp_path: Path) -> Run:
    """A run of two epochs with a save at every second step."""
    directory = str(tmp_path / "run")
    return Run(numbers, directory, every_n_steps=2, trainer=(("max_epochs", 2),), elastic=True)


def attempt(run: Run) -> list[dict[str, Any]]:
    """Run every rank once, to its end or its kill; those of its batches that need not be redone."""
    log = Path(run.directory).parent / "output.txt"
    for old in Path(run.directory).glob("diary-*"):
        old.unlink()
    statuses = run_ranks(observed, run, world_size=run.world_size, log=log)
    wanted = {0} if run.kill_at is None else {KILLED}
    assert set(statuses) == wanted, log.read_text()[-4000:]
    lines = diary(run).values()
    return [line for line in lines if run.kill_at is None or line["batch"] < last_step(run)]


def last_step(run: Run) -> int:
    """The global step of the newest checkpoint."""
    step = max(record.step or 0 for record in list_checkpoints(run.checkpoints) if record.valid)
    return int(step)


def trained_on(lines: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    """How often each file was trained on, by epoch."""
    files: dict[int, Counter[str]] = {}
    for line in lines:
        files.setdefault(line["epoch"], Counter()).update(line["files"])
    return files


def written(run: Run, name: str) -> list[list[Any]]:
    """What ``Hooks`` wrote."""
    return [json.loads(line) for line in Path(f"{run.directory}/{name}").read_text().splitlines()]


def epochs(run: Run) -> list[list[Any]]:
    """What Lightning counted at each epoch's end."""
    return written(run, "epochs.jsonl")


EACH_ONCE = Counter({f"{number:03d}.txt": 1 for number in range(FILES)})


def test_killed_and_restarted_on_other_grids_within_one_epoch(run: Run, tmp_path: Path) -> None:
    """2 x 2, 1 x 1, 3 x 1 and 2 x 2 ranks and workers train on each file once in each epoch."""
    run = replace(run, validate=True)
    trained: list[dict[str, Any]] = []
    # Of 44 files 16, then 8, then 12 are known to the checkpoint; 8 are left for 2 x 2.
    for world_size, num_workers, kill_at in [(2, 2, 5), (1, 1, 9), (3, 1, 11)]:
        trained += attempt(
            replace(run, world_size=world_size, num_workers=num_workers, kill_at=kill_at)
        )
    assert last_step(run) == 10
    last = replace(run, world_size=2, num_workers=2)
    other = replace(last, directory=str(tmp_path / "other"))
    shutil.copytree(run.directory, other.directory)

    trained += attempt(last)
    assert trained_on(trained) == {0: EACH_ONCE, 1: EACH_ONCE}
    assert {line["batch"] for line in trained} == set(range(24))
    # An epoch on 2 x 2 has 12 batches, and the last two of the first one were left.
    assert epochs(run) == [
        ["validated", 0, 12],
        ["trained", 0, 12, 12],
        ["validated", 1, 24],
        ["trained", 1, 24, 12],
    ]
    assert last_step(run) == 24
    assert_same(result(last, 1)["model"], result(last, 0)["model"])

    attempt(replace(other, kill_at=15))
    attempt(other)
    again = diary(other)
    assert again
    assert again.items() <= diary(last).items()
    for rank in range(2):
        assert_same(result(other, rank), result(last, rank))


def test_two_ranks_become_three_and_four_and_two_again(run: Run) -> None:
    """2 x 1, 3 x 2, 2 x 1, 4 x 1 and 2 x 2 ranks and workers share one epoch, each file once."""
    run = replace(run, every_n_steps=1, trainer=(("max_epochs", 1),))
    trained: list[dict[str, Any]] = []
    # Of 44 files 8, then 12, then 8, then 8 are known to the checkpoint; 8 are left for 2 x 2.
    for world_size, num_workers, kill_at in [(2, 1, 2), (3, 2, 4), (2, 1, 6), (4, 1, 7)]:
        trained += attempt(
            replace(run, world_size=world_size, num_workers=num_workers, kill_at=kill_at)
        )
        assert last_step(run) == kill_at
    trained += attempt(replace(run, world_size=2, num_workers=2))
    assert trained_on(trained) == {0: EACH_ONCE}
    assert {line["batch"] for line in trained} == set(range(9))


@pytest.mark.parametrize("save_at_epoch_end", [True, False])
@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_an_ended_epoch_is_followed_by_the_next_on_another_grid(
    run: Run, limit: str, save_at_epoch_end: bool
) -> None:
    """The checkpoint of a finished run of one rank goes on with two ranks at the next epoch."""
    run = replace(run, save_at_epoch_end=save_at_epoch_end, validate=True)
    batches = FILES // run.batch_size
    alone = batches if limit == "max_steps" else 1
    trained = attempt(replace(run, trainer=((limit, alone),)))
    assert last_step(run) == batches
    two = batches + batches // 2 if limit == "max_steps" else 2
    trained += attempt(replace(run, world_size=2, trainer=((limit, two),)))
    assert trained_on(trained) == {0: EACH_ONCE, 1: EACH_ONCE}
    # What followed the last batch came after the save that was made at it, and is done again.
    again = [] if save_at_epoch_end else [["trained", 0, 22, 11]]
    assert epochs(run)[1::2] == [["trained", 0, 22, 22], *again, ["trained", 1, 33, 11]]


def test_generators_go_on_where_they_were(run: Run) -> None:
    """A rank that was there draws what would have come next; another begins at the seed's start."""
    for world_size, kill_at in [(2, 5), (1, 9), (2, 11)]:
        attempt(replace(run, world_size=world_size, kill_at=kill_at))
    states: dict[tuple[int, int], set[int]] = {}
    for rank, batch, state in written(run, "generators.jsonl"):
        states.setdefault((rank, batch), set()).add(state)
    first = [states[0, batch] for batch in range(11)]
    assert all(len(state) == 1 for state in first)
    assert len(set.union(*first)) == 11
    assert states[1, 8] == states[1, 0]


def test_other_workers_need_no_other_ranks(run: Run) -> None:
    """Two ranks that get other numbers of workers go on as on any other grid."""
    run = replace(run, world_size=2, elastic=False, resume_elastic=True)
    trained = attempt(replace(run, num_workers=1, kill_at=5))
    trained += attempt(replace(run, num_workers=2))
    assert trained_on(trained)[1] == EACH_ONCE
    # 28 files were left for four workers: none is repeated.
    assert trained_on(trained)[0] == EACH_ONCE


def test_accumulated_gradients_and_a_limit(run: Run) -> None:
    """Where ``limit_train_batches`` ends an epoch, it does so after as many batches as ever."""
    options = (("max_epochs", 3), ("limit_train_batches", 6), ("accumulate_grad_batches", 2))
    run = replace(run, trainer=options)
    attempt(replace(run, world_size=2, kill_at=9))
    assert last_step(run) == 4
    attempt(run)
    assert [line[:3] for line in epochs(run)] == [
        ["trained", 0, 3],
        ["trained", 1, 6],
        ["trained", 2, 9],
    ]


@pytest.mark.parametrize(("before", "after"), [("2x2", "1x2"), ("1x2", "2x1"), ("2x1", "4x1")])
def test_tensor_parallel_ranks_count_once(run: Run, before: str, after: str) -> None:
    """What matters is how many shares of the data there are, not how many ranks read each."""
    ranks = {grid: math.prod(map(int, grid.split("x"))) for grid in (before, after)}
    trained = []
    for grid, kill_at in [(before, 5), (after, None)]:
        there = replace(run, strategy=grid, world_size=ranks[grid], kill_at=kill_at)
        trained += [line for line in attempt(there) if line["rank"] in there.readers]
    assert trained_on(trained) == {0: EACH_ONCE, 1: EACH_ONCE}
