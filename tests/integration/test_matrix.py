"""Every way to train is interrupted everywhere, and is the uninterrupted run, bit for bit.

The cases are in ``cases.py``, what is compared in ``matrix.py``. A process per strategy and rank
goes through all of them. What a process has in memory must not help a resume, so each case is also
resumed in a process of its own, after a SIGKILL.
"""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from air_lightning import AirResume
from conftest import Volume
from integration.cases import CASES, Shown
from integration.matrix import BATCHES, Case, Moment, compare, differences, path_of, train
from integration.training import Run
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run(request: pytest.FixtureRequest, volume: Volume, tmp_path: Path) -> Run:
    """Ten files for each rank that reads its own: five batches of an epoch."""
    strategy, ranks = request.param
    for number in range(2 * BATCHES * ranks):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return Run(volume.path, str(tmp_path), world_size=ranks, strategy=strategy)


def compare_all(cases: list[Case], run: Run) -> None:
    """Run in a rank: every case, one after another; raises with all that was not the same."""
    faults = []
    for case in cases:
        directory = f"{run.directory}/{case.name}"
        faults += compare(case, replace(run, directory=directory))
    assert not faults, "\n".join(faults)


GRIDS = pytest.mark.parametrize(
    "run", [("ddp", 1), ("ddp", 2), ("2x1", 2)], ids=["single", "ddp", "fsdp2"], indirect=True
)


@GRIDS
def test_saves_everywhere(run: Run, tmp_path: Path) -> None:
    """From a save at any moment of any way to train, a run goes on as if nothing had been."""
    log = tmp_path / "output.txt"
    cases = cases_for(run)
    statuses = run_ranks(compare_all, cases, run, world_size=run.world_size, log=log, timeout_s=800)
    assert set(statuses) == {0}, log.read_text()[-8000:]


def cases_for(run: Run) -> list[Case]:
    """All of them on one rank; on several, each with a third of its moments, not always the same.

    Averaged weights are whole on each rank, and there are no sharded ones in Lightning; nor has its
    ModelParallelStrategy a scaler of gradients.
    """
    if run.world_size == 1:
        return list(CASES.values())
    left_out = {"averages", "fp16", "accumulated, fp16"} if run.strategy == "2x1" else set()
    cases = [case for name, case in CASES.items() if name not in left_out]
    return [replace(case, moments=case.moments[i % 3 :: 3]) for i, case in enumerate(cases)]


def note_whole(cases: list[Case], run: Run) -> None:
    """Run in a rank: every case, uninterrupted; writes down each record."""
    for case in cases:
        directory = f"{run.directory}/{case.name}"
        os.makedirs(directory)
        record, saves = train(case, replace(run, directory=directory), moments=kills_of(case))
        for moment in kills_of(case):  # only where they are in the record is wanted
            shutil.rmtree(path_of(directory, moment))
        known = [record.lines, saves.lengths]
        Path(f"{directory}/whole.pickle").write_bytes(pickle.dumps(known))


def kills_of(case: Case) -> tuple[Moment, Moment]:
    """Two moments of a case, one after the other."""
    count = len(case.moments)
    return case.moments[count // 3], case.moments[2 * count // 3]


def train_until_killed(case: Case, run: Run, moment: Moment) -> None:
    """Run in a rank: resumes by itself, saves at a moment, and is killed."""
    train(case, run, resume=AirResume(run.directory), moments=[moment], kill=True)


def go_on_to_the_end(cases: list[Case], run: Run) -> None:
    """Run in a rank: every case that was killed, to its end; raises if that is not the same."""
    faults = []
    for number, case in enumerate(cases):
        first, second = kills_of(case)
        there = replace(run, directory=f"{run.directory}/{case.name}")
        lines, lengths = pickle.loads(Path(f"{there.directory}/whole.pickle").read_bytes())
        got, _ = train(case, there, resume=AirResume(there.directory))
        start = lengths[first if number % 3 else second]
        faults += [f"{case.name}: {fault}" for fault in differences(got.lines, lines[start:])]
    assert not faults, "\n".join(faults)


def tear(path: str, number: int) -> None:
    """Leave of a checkpoint what a kill or a full disk leaves: no metadata, or a short shard."""
    if number % 3 == 1:
        os.unlink(f"{path}/.metadata")
    elif number % 3 == 2:
        shard = next(name for name in sorted(os.listdir(path)) if name.endswith(".distcp"))
        os.truncate(f"{path}/{shard}", os.path.getsize(f"{path}/{shard}") - 1)


@pytest.mark.parametrize("run", [("ddp", 1)], ids=["single"], indirect=True)
def test_killed_twice_and_torn(run: Run, tmp_path: Path) -> None:
    """Killed twice, its newest checkpoint torn or not, each case ends as if it had not been."""
    log = tmp_path / "output.txt"
    cases = list(CASES.values())
    assert run_ranks(note_whole, cases, run, log=log, timeout_s=800) == [0], log.read_text()[-4000:]
    for number, case in enumerate(cases):
        there = replace(run, directory=f"{run.directory}/{case.name}")
        for moment in kills_of(case):
            statuses = run_ranks(train_until_killed, case, there, moment, log=log)
            assert statuses == [KILLED], f"{case.name} {moment} {log.read_text()[-4000:]}"
        tear(path_of(there.directory, moment), number)
    assert run_ranks(go_on_to_the_end, cases, run, log=log, timeout_s=800) == [0], log.read_text()[
        -8000:
    ]


def train_more(run: Run) -> None:
    """Run in a rank: to a step within an epoch, and then to more steps than were asked for."""
    moment = ("on_train_epoch_end", BATCHES + 2)
    case = Case("more", {"max_steps": BATCHES + 3})
    whole, _ = train(replace(case, trainer={"max_steps": 13}), run)
    train(case, run, moments=[moment])
    same, _ = train(case, run, path_of(run.directory, moment))
    got, _ = train(replace(case, trainer={"max_steps": 13}), run, path_of(run.directory, moment))
    assert same.lines == []
    batches = [line for line in whole.lines if line[0] == "batch"]
    assert [line for line in got.lines if line[0] == "batch"] == batches[BATCHES + 3 :]


@pytest.mark.parametrize("run", [("ddp", 1)], ids=["single"], indirect=True)
def test_more_steps_than_before(run: Run, tmp_path: Path) -> None:
    """A run that ended within an epoch goes on with its rest when it is given more steps."""
    log = tmp_path / "output.txt"
    assert run_ranks(train_more, run, log=log) == [0], log.read_text()[-4000:]


def log_in_another_way(run: Run) -> None:
    """Run in a rank: resumed within an epoch, by a module that was changed meanwhile."""
    case, moment = CASES["metrics"], ("on_train_batch_end", 2)
    whole, _ = train(case, run, moments=[moment])
    got, _ = train(replace(case, model=Shown), run, path_of(run.directory, moment))
    (wanted, *_), (told, *_) = (
        [line[-1] for line in record.lines if line[0] == "ended"] for record in (whole, got)
    )
    assert {name for name in wanted if wanted[name] != told[name]} == {"both", "both_epoch"}


@pytest.mark.parametrize("run", [("ddp", 1)], ids=["single"], indirect=True)
def test_logged_in_another_way(run: Run, tmp_path: Path) -> None:
    """What a changed module logs in another way begins anew; the other means go on."""
    log = tmp_path / "output.txt"
    assert run_ranks(log_in_another_way, run, log=log) == [0], log.read_text()[-4000:]
