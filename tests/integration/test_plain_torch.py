"""The examples of plain torch loops: killed and started again, they end as if they had not been."""

import importlib
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - optimizers import it: once here, not in every rank

from air_lightning import find_latest_valid
from conftest import Volume
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "plain"
STEPS, SAVE_EVERY = 30, 6
KILL_AT = 21  # no step of a save, and the save in flight has a complete one before it
NAMES = (
    "sync_save",
    "async_save",
    "recover",
    "sample_counter",
    "completed_shards",
    "resumable_dataset",
    "random_state",
)


class KillingOutput(io.StringIO):
    """Writes to a file, and kills the whole run when one line begins as it is told."""

    def __init__(self, path: Path, kill_before: str | None) -> None:
        super().__init__()
        self._path = path
        self._kill_before = kill_before

    def write(self, text: str) -> int:
        if self._kill_before and text.startswith(self._kill_before):
            os.killpg(0, signal.SIGKILL)
        with self._path.open("a") as file:
            file.write(text)
        return len(text)


def example(name: str, checkpoints: str, output: Path, kill_before: str | None) -> None:
    """One rank of one start of an example."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, "--checkpoints", checkpoints]
    sys.argv += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    sys.stdout = KillingOutput(output.with_suffix(f".{os.environ.get('RANK', '0')}"), kill_before)
    importlib.import_module(name).main()


def start(
    name: str, checkpoints: str, output: Path, *, ranks: int, kill_before: str | None = None
) -> str:
    """One start of an example; gives what all ranks printed."""
    log = output.with_suffix(".log")
    arguments: tuple[Any, ...] = (name, checkpoints, output, kill_before)
    statuses = run_ranks(example, *arguments, world_size=ranks, log=log)
    wanted = {0} if kill_before is None else {KILLED}
    assert set(statuses) == wanted, log.read_text()[-4000:]
    # The kill of the group may come between a rank's line and its end.
    return "\n".join(output.with_suffix(f".{rank}").read_text() for rank in range(ranks))


def facts(output: str) -> dict[tuple[str, str], str]:
    """The loss of each step of each rank, and the weights at the end."""
    lines = re.findall(r"^rank (\d+)  (?:step (\d+)  )?(?:loss|weights) (\S+)$", output, re.M)
    return {(rank, step): value for rank, step, value in lines}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_goes_on_as_if_never_killed(volume: Volume, tmp_path: Path, name: str, ranks: int) -> None:
    """On one rank and on two, the losses and weights after a kill are those without it."""
    whole = facts(start(name, f"{volume.path}/whole", tmp_path / "whole", ranks=ranks))
    assert len(whole) == ranks * (STEPS + 1)
    checkpoints = f"{volume.path}/killed"
    before = facts(
        start(
            name,
            checkpoints,
            tmp_path / "before",
            ranks=ranks,
            kill_before=f"rank {ranks - 1}  step {KILL_AT} ",
        )
    )
    found = find_latest_valid(checkpoints)
    assert found is not None
    leave_a_torn_save(volume)
    output = start(name, checkpoints, tmp_path / "after", ranks=ranks)
    after = facts(output)
    assert f"resumed from {found}\n" in output
    first = min(int(step) for _, step in after if step)
    assert first == int(found.rpartition("_")[2])
    assert 0 < first < KILL_AT
    assert all(whole[key] == value for key, value in before.items())
    assert {**before, **after} == whole


def leave_a_torn_save(volume: Volume) -> None:
    """A directory of a higher step than any other, as a kill in the middle of a save leaves it."""
    volume.put("killed/step_1000/__0_0.distcp", b"half of a sh")
