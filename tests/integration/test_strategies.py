"""Saves and resumes under sharded strategies, on real gloo ranks."""

from pathlib import Path

import pytest

from conftest import Volume
from integration.test_exact_resume import assert_resumes_exactly
from integration.training import Run

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
    run = Run(
        numbers,
        "",
        world_size=ranks,
        strategy=strategy,
        every_n_steps=2,
        trainer=(("max_epochs", 2),),
    )
    assert_resumes_exactly(run, tmp_path, kills=[4])
