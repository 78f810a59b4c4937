"""Fabric loops: saves of every rank, exact resume, and everything that fabric.load takes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from air_lightning import find_latest_valid
from conftest import Volume
from integration.fabric_checks import run_all
from integration.fabric_loop import Loop, train
from integration.training import assert_same, diary, result
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("elsewhere")]

FILES = 11


@pytest.fixture
def numbers(volume: Volume) -> str:
    """A volume of small numbered text files."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    return volume.path


def attempt(loop: Loop, tmp_path: Path, *, killed: bool = False) -> None:
    """Run every rank once, to its end or its kill."""
    log = tmp_path / "output.txt"
    statuses = run_ranks(train, loop, world_size=loop.world_size, log=log)
    assert set(statuses) == ({KILLED} if killed else {0}), log.read_text()[-6000:]


@pytest.mark.parametrize(
    "loop",
    [
        Loop("", "", num_workers=2, save_every=1),
        Loop("", "", world_size=2, strategy="ddp", num_workers=1, registered=True),
        Loop("", "", world_size=2, strategy="2x1"),
        Loop("", "", world_size=2, strategy="1x2", save_every=3),
        Loop("", "", world_size=2, strategy="fsdp1"),
    ],
    ids=["single", "ddp", "fsdp2", "tp", "fsdp1"],
)
def test_killed_loop_resumes_exactly(numbers: str, tmp_path: Path, loop: Loop) -> None:
    """Killed by SIGKILL, a loop goes on: batches, losses, weights, moments and draws are equal."""
    whole = replace(loop, volume=numbers, directory=str(tmp_path / "whole"))
    attempt(whole, tmp_path)
    broken = replace(whole, directory=str(tmp_path / "broken"))
    attempt(replace(broken, kill_at=4), tmp_path, killed=True)
    assert find_latest_valid(broken.checkpoints) is not None
    attempt(broken, tmp_path)
    assert diary(broken) == diary(whole)
    for rank in range(loop.world_size):
        assert_same(result(broken, rank), result(whole, rank))
    readers = 1 if loop.strategy == "1x2" else loop.world_size
    seen = Counter(
        name
        for (rank, _), line in diary(whole).items()
        if rank < readers and line["epoch"] == 1
        for name in line["files"]
    )
    assert len(seen) == FILES
    assert sum(seen.values()) <= FILES + 1


def test_checks_on_two_ranks(tmp_path: Path) -> None:
    """What works under DDP works under each strategy; the checks' own sentences say what."""
    log = tmp_path / "output.txt"
    statuses = run_ranks(run_all, str(tmp_path), world_size=2, log=log)
    assert set(statuses) == {0}, log.read_text()[-6000:]
