"""The examples, started as a user starts them."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from air_lightning import list_checkpoints
from ranks import free_port

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = "/Volumes/demo/digits/images/train"
FILES, EPOCHS, SAVE_EVERY = 256, 30, 10
STEPS = EPOCHS * FILES // (2 * 16)
KILL_AT = 60
ON_TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """A directory that stands in for ``/Volumes``, with small images in ten class folders."""
    pixels = np.random.default_rng(0).integers(0, 256, (FILES, 8, 8), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = tmp_path / "demo/digits/images/train" / str(number % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:04}.png")
    return tmp_path


@contextlib.contextmanager
def plain_torch(
    volumes: Path, name: str, *launcher: str, epochs: int = EPOCHS
) -> Iterator[subprocess.Popen[str]]:
    """plain_torch.py, saving into checkpoints of that name; nothing of it is left at the end."""
    command = [sys.executable, *launcher, str(EXAMPLES / "plain_torch.py"), "--data", DATA]
    command += ["--checkpoints", f"/Volumes/demo/digits/{name}"]
    command += ["--epochs", str(epochs), "--save-every", str(SAVE_EVERY)]
    ranks = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in ranks}
    with subprocess.Popen(
        command,
        env={**env, "AIR_VOLUMES_ROOT": str(volumes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pipesize=4096,  # a reader that is kept waiting keeps the training waiting, see below
    ) as process:
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL the process, its ranks and their workers: torchrun puts ranks into other groups."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def run(volumes: Path, name: str, *launcher: str, epochs: int = EPOCHS) -> str:
    """Run it to its end; gives what it printed."""
    with plain_torch(volumes, name, *launcher, epochs=epochs) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait() == 0, output
    return output


def run_until_killed(volumes: Path, name: str, *launcher: str) -> str:
    """Run it, and kill everything when it prints the step ``KILL_AT``, or a hundred steps later."""
    output = ""
    with plain_torch(volumes, name, *launcher) as process:
        for line in lines_of(process):
            output += line
            if line.startswith(f"step {KILL_AT} "):
                kill_all(process)
        assert process.wait() == -9, output
    return output


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Each line of its output, and nothing read ahead: the training is so far at most.

    A buffer of ours, and a usual pipe, would hold all that the training prints to its end.
    """
    assert process.stdout is not None
    line = b""
    while byte := os.read(process.stdout.fileno(), 1):
        line += byte
        if byte == b"\n":
            yield line.decode()
            line = b""
    yield line.decode()


def losses(output: str) -> dict[int, str]:
    """What was printed of each whole step."""
    found = re.findall(r"^step (\d+)  (epoch \d+  loss \S+)\n", output, re.MULTILINE)
    return {int(step): rest for step, rest in found}


@pytest.mark.timeout(1000)
def test_demo_passes_all_verdicts(tmp_path: Path) -> None:
    """The demo ends with exit code 0, each verdict is PASS, and its log has no redrawn bars."""
    work = tmp_path / "work"
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--work", str(work)]
    # Lightning's ranks would else meet at a port that is free for a moment only.
    env = {**os.environ, "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((work / "verdicts.json").read_text())
    assert verdicts
    assert all(verdicts.values()), verdicts
    assert done.stdout.count("PASS  ") == len(verdicts)
    assert "FAIL" not in done.stdout
    assert "\r" not in done.stderr
    assert len(re.findall(r"of 352 steps", done.stderr)) == 4


@pytest.mark.timeout(500)
def test_plain_torch_resumes_to_the_same_losses(volumes: Path) -> None:
    """Two ranks, killed in the middle, go on with the losses of an undisturbed run."""
    whole = losses(run(volumes, "whole", *ON_TWO_RANKS))
    assert list(whole) == list(range(1, STEPS + 1))
    before = losses(run_until_killed(volumes, "killed", *ON_TWO_RANKS))
    assert KILL_AT <= max(before) < STEPS
    output = run(volumes, "killed", *ON_TWO_RANKS)
    resumed = re.search(r"resumed from /Volumes/demo/digits/killed/step_(\d+)", output)
    assert resumed is not None, output
    after = losses(output)
    assert list(after) == list(range(int(resumed[1]) + 1, STEPS + 1))
    assert {**before, **after} == whole
    assert all(whole[step] == loss for step, loss in before.items())


@pytest.mark.timeout(500)
def test_plain_torch_runs_alone(volumes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun it is a single process, and a second start resumes."""
    assert "started fresh" in (first := run(volumes, "alone", epochs=1))
    assert list(losses(first)) == list(range(1, FILES // 16 + 1))
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(volumes))
    assert [r.step for r in list_checkpoints("/Volumes/demo/digits/alone") if r.valid] == [10]
    second = losses(run(volumes, "alone", epochs=1))
    assert second == {step: loss for step, loss in losses(first).items() if step > 10}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_shards_resume_in_the_middle_of_one(workers: str) -> None:
    """The example of many samples per file ends with exit code 0 and nothing but PASS."""
    command = [sys.executable, str(EXAMPLES / "shards.py"), "--workers", workers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS  ") == 3
    assert "FAIL" not in done.stdout


@pytest.mark.timeout(700)
def test_fabric_loop_goes_on(tmp_path: Path) -> None:
    """A second start of the Fabric loop goes on from the first one's last checkpoint."""
    command = [sys.executable, str(EXAMPLES / "fabric_loop.py"), "--work", str(tmp_path)]
    outputs = []
    for epochs in ("1", "2"):
        started = [*command, "--save-every", "5", "--epochs", epochs]
        done = subprocess.run(started, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "started fresh" in outputs[0]
    assert list(losses(outputs[0])) == list(range(1, 25))
    assert "resumed from /Volumes/demo/numbers/checkpoints/step=20" in outputs[1]
    again = losses(outputs[1])
    assert list(again) == list(range(21, 49))
    assert all(again[step] == losses(outputs[0])[step] for step in range(21, 25))
