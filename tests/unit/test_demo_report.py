"""The demo's verdicts can fail: each is given a run with the fault it is there to find."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from demo_report import (
    Plan,
    RunLog,
    StartLog,
    each_file_once,
    same_steps,
    same_when_repeated,
)

PLAN = Plan(train_files=8, val_files=2, epochs=2, ranks=2, batch_size=2, save_every=1)
FILES = {f"{n}/a.png" for n in range(8)}


def step_line(rank: int, step: int, **changed: Any) -> dict[str, Any]:
    """One line as the demo's callback writes it: two files a rank and step, two steps an epoch."""
    first = 4 * ((step - 1) % 2) + 2 * rank
    files = [f"{first}/a.png", f"{first + 1}/a.png"]
    line = {"kind": "step", "step": step, "epoch": (step - 1) // 2, "files": files}
    return {**line, "loss": float(step + rank).hex(), "wait_s": 0.0, **changed}


def start_log(folder: Path, steps: range, **changed: Any) -> StartLog:
    """Both ranks' logs of some steps, the last one changed, and a line that a kill cut short."""
    folder.mkdir()
    for rank in range(2):
        lines = [step_line(rank, step) for step in steps]
        lines[-1] = {**lines[-1], **changed}
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank{rank}.jsonl").write_text(text + '{"kind": "st', encoding="utf-8")
    log = StartLog(str(folder))
    log.read()
    return log


def run_log(*starts: StartLog) -> RunLog:
    """A run of these starts."""
    return RunLog(list(starts), [None] * len(starts), [None] * len(starts))


@pytest.fixture
def whole(tmp_path: Path) -> RunLog:
    """A run that was not disturbed."""
    return run_log(start_log(tmp_path / "whole", range(1, 5)))


def test_a_killed_run_that_equals_the_whole_one_passes(tmp_path: Path, whole: RunLog) -> None:
    """Steps done again after a kill count once, and a line cut short is left out."""
    first = start_log(tmp_path / "1", range(1, 4))
    second = start_log(tmp_path / "2", range(3, 5))
    killed = run_log(first, second)
    assert each_file_once(PLAN, killed, FILES)[0]
    assert same_steps(PLAN, whole, killed)[0]
    assert same_when_repeated(killed) == (True, "1 steps done again, 0 differ")


def test_a_file_seen_twice_fails(tmp_path: Path) -> None:
    """A batch that repeats another one's files leaves files out and repeats others."""
    run = run_log(start_log(tmp_path / "1", range(1, 5), files=["0/a.png", "1/a.png"]))
    assert each_file_once(PLAN, run, FILES) == (
        False,
        "epoch 1: 4 files missed, 2 seen more than once",
    )


def test_a_loss_that_differs_in_one_bit_fails(tmp_path: Path, whole: RunLog) -> None:
    """The comparison is of bits, and the message names the first step that differs."""
    other = run_log(start_log(tmp_path / "1", range(1, 5), loss="0x1.0000000000001p+0"))
    assert same_steps(PLAN, whole, other) == (False, "1 of 4 steps differ, the first is 4")


def test_a_missing_step_fails(tmp_path: Path, whole: RunLog) -> None:
    """A run that ends early, or skips steps at a resume, is not the same run."""
    assert not same_steps(PLAN, whole, run_log(start_log(tmp_path / "1", range(1, 4))))[0]


def test_a_repeated_step_that_differs_fails(tmp_path: Path) -> None:
    """A step done again after a kill must have the batch and the loss it had before."""
    first = start_log(tmp_path / "1", range(1, 4), loss="0x1p+9")
    killed = run_log(first, start_log(tmp_path / "2", range(3, 5)))
    assert same_when_repeated(killed) == (False, "1 steps done again, 1 differ")
