"""Fabric loops: saves of every rank, exact resume, and everything that fabric.load takes."""

import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Fabric
from lightning.fabric.strategies import DataParallelStrategy
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader as TorchLoader

from air_lightning import (
    AirCheckpointIO,
    CheckpointMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    export_checkpoint,
    find_latest_valid,
    list_checkpoints,
    verify_checkpoint,
)
from air_lightning.checkpoint.catalog import remove_checkpoint
from air_lightning.checkpoint.inspection import inspect_checkpoint
from air_lightning.integrations.fabric_state import progress
from conftest import Volume
from integration.fabric_checks import run_all
from integration.fabric_loop import Loop, build, train
from integration.test_wiring import fit, saving, trainer_with
from integration.training import assert_same, diary, result
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("elsewhere")]

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


@pytest.mark.parametrize(("ranks", "kill_at"), [((1, 2), 4), ((2, 1), 2)], ids=["1-2", "2-1"])
def test_another_number_of_ranks(
    numbers: str, tmp_path: Path, ranks: tuple[int, int], kill_at: int
) -> None:
    """A loop goes on in mid-epoch on another number of ranks, each file once, sharded or not."""
    loop = Loop(numbers, str(tmp_path / "run"), elastic=True)
    strategies = {1: "auto", 2: "2x1"}
    before, after = (replace(loop, world_size=count, strategy=strategies[count]) for count in ranks)
    attempt(replace(before, kill_at=kill_at), tmp_path, killed=True)
    attempt(after, tmp_path)
    epochs: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for path in Path(loop.directory).glob("diary-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            epochs[line["epoch"]].update(line["files"])
    for seen in epochs.values():
        assert sorted(seen.elements()) == [f"{number:03d}.txt" for number in range(FILES)]


def attached(**options: Any) -> tuple[Fabric, AirCheckpointIO]:
    """A Fabric on one CPU, and its plugin."""
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    return fabric, AirCheckpointIO().attach(fabric)


class Elsewhere(DataParallelStrategy):
    """A strategy that derives from none of those that are known."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")])


def test_what_attach_refuses(tmp_path: Path) -> None:
    """Each wrong argument is told at once, with what to do instead; attaching twice is once."""
    fabric, plugin = attached()
    bound = fabric.strategy.save_checkpoint
    assert plugin.attach(fabric) is plugin
    assert fabric.strategy.save_checkpoint == bound
    with pytest.raises(InvalidArgumentError, match="another AirCheckpointIO"):
        AirCheckpointIO().attach(fabric)
    with pytest.raises(InvalidArgumentError, match="another AirCheckpointIO"):
        AirCheckpointIO().attach(Fabric(accelerator="cpu", devices=1, plugins=[AirCheckpointIO()]))
    with pytest.raises(TypeError, match=r"Trainer\(plugins=\[AirCheckpointIO\(\)\]\)"):
        AirCheckpointIO().attach(Trainer(logger=False))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lightning_fabric"):
        AirCheckpointIO().attach(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not DeepSpeed, not XLA"):
        AirCheckpointIO().attach(Fabric(accelerator="cpu", devices=1, strategy=Elsewhere()))
    with pytest.raises(InvalidArgumentError, match=r"attach\(fabric\)"):
        AirCheckpointIO().resume(tmp_path, {})
    with pytest.raises(InvalidArgumentError, match="no state_dict"):
        plugin.register(train=torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    model = fabric.setup(torch.nn.Linear(1, 1))
    for state in ({"models": [model]}, {"air": 1}, {1: model}, {"l": TorchLoader([1])}):
        with pytest.raises(InvalidArgumentError):
            fabric.save(tmp_path / "c", state)  # type: ignore[arg-type]
    assert not list_checkpoints(tmp_path)


def test_a_strategy_that_was_pickled_is_bound_to_itself() -> None:
    """A spawned rank's methods are those of its own strategy, not of one left in the parent."""
    strategy: Any = attached()[0].strategy
    copied = pickle.loads(pickle.dumps(strategy))
    assert copied.save_checkpoint.__self__ is not strategy.save_checkpoint.__self__
    assert copied.save_checkpoint.__self__._strategy is copied
    copied.setup_environment()


def test_the_entry_point_attaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is installed, the plugin line binds on the first setup."""
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group, name, value = re.findall(r'"(lightning\.fabric.*)"\]\n(\w+) = "(.*)"', declared)[0]
    info = tmp_path / "installed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = AirCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = fabric.setup(torch.nn.Linear(2, 2))
    state = {"model": model, "step": 1}
    fabric.save(tmp_path / "c/1", state)
    with torch.no_grad():
        weight = model.weight.clone()
        model.weight.zero_()
    assert plugin.resume(tmp_path / "c", state) == str(tmp_path / "c/1")
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("root", ["/Volumes/main/default/c", "memory://fabric"])
def test_roots_and_tools(volume: Volume, tmp_path: Path, root: str) -> None:
    """Volumes and URLs are roots; the package's and torch's own tools read what is there."""
    fabric, plugin = attached()
    model = fabric.setup(build())
    state: dict[str, Any] = {"net": model, "step": 0}
    assert plugin.resume(root, state) is None
    for step in (9, 10):
        fabric.save(f"{root}/{step}", {**state, "step": step})
    assert plugin.resume(root, state) == f"{root}/10"
    assert state["step"] == 10
    assert verify_checkpoint(f"{root}/10", deep=True).step == 10
    described = inspect_checkpoint(f"{root}/10")
    assert described["tensors"] == 6
    weights = dict(model.state_dict())
    exported = torch.load(export_checkpoint(f"{root}/10", tmp_path / "o.ckpt"), weights_only=True)
    assert_same(dict(exported["net"]), weights)
    plain = {"net": build(), "step": 0}
    Fabric(accelerator="cpu", devices=1).load(tmp_path / "o.ckpt", plain, strict=False)
    assert plain["step"] == 10
    assert_same(dict(plain["net"].state_dict()), weights)
    export_checkpoint(f"{root}/10", tmp_path / "o.safetensors")
    assert_same(load_file(tmp_path / "o.safetensors"), weights)
    if root.startswith("/Volumes"):
        dcp_to_torch_save(volume.directory.parent / "c/10", tmp_path / "o.pt")
        whole = torch.load(tmp_path / "o.pt", weights_only=False)
        assert_same(whole["net"], weights)


def test_trainer_and_fabric(tmp_path: Path) -> None:
    """Fabric loads a Trainer's weights by key or raw; a Trainer refuses what a loop saved."""
    trained = fit(trainer_with(saving(tmp_path, filename="{step}")))
    path = f"{tmp_path}/step=4.ckpt"
    for load in ("load", "load_raw"):
        fabric, plugin = attached()
        model = fabric.setup(type(trained)())
        if load == "load":
            left = fabric.load(path, {"state_dict": model})
            assert left["global_step"] == 4
        else:
            fabric.load_raw(path, model)
        assert_same(dict(model.state_dict()), dict(trained.state_dict()))
    fabric.save(tmp_path / "loop", {"model": model})
    plugin.wait()
    with pytest.raises(CheckpointMismatchError, match="no Trainer's checkpoint"):
        fit(trainer_with(), ckpt_path=str(tmp_path / "loop"))


@pytest.mark.parametrize("number", [int, np.int64, np.uint8, np.array, torch.tensor])
def test_the_step_may_be_of_any_whole_kind(tmp_path: Path, number: Any) -> None:
    """Resume takes the newer of two steps, which count as NumPy and torch do, not the later."""
    fabric, plugin = attached()
    for name, key, step in (("a", "global_step", 200), ("b", "step", 100)):
        fabric.save(tmp_path / name, {key: number(step), "other": True, "epoch": number(step)})
    state = {"global_step": None}
    assert plugin.resume(tmp_path, state) == str(tmp_path / "a")
    assert state["global_step"] == 200
    assert type(state["global_step"]) is type(number(1))
    record = verify_checkpoint(tmp_path / "b")
    assert (record.step, record.epoch) == (100, 100)


@pytest.mark.parametrize("step", [True, np.True_, torch.tensor(True), 1.0, torch.tensor(1.0), "1"])
def test_what_is_no_step(step: Any) -> None:
    """Truth values, fractions and text are no steps; the next key is asked then."""
    assert progress({"global_step": step, "step": np.int64(3), "epoch": step}) == (3, None)


class Fields:
    """Has no keys."""


@pytest.mark.parametrize("state", [None, [1], "model", Fields(), torch.nn.Linear(1, 1)])
def test_a_state_is_a_dict(tmp_path: Path, state: Any) -> None:
    """Anything else is told by its kind, and nothing is saved, loaded or in the way of more."""
    fabric, plugin = attached()
    fabric.save(tmp_path / "good", {"step": 1})
    told = f"The state is a {type(state).__name__}; a dict is wanted"
    calls = [lambda: fabric.save(tmp_path / "c", state), lambda: plugin.resume(tmp_path, state)]
    if not (state is None or isinstance(state, torch.nn.Module)):
        calls.append(lambda: fabric.load(tmp_path / "good", state))
    for call in calls:
        with pytest.raises(InvalidTypeError, match=told):
            call()
    assert not (tmp_path / "c").exists()
    assert fabric.load(tmp_path / "good") == {"step": 1}


EXIT = """
import sys, torch
from lightning import Fabric
from air_lightning import AirCheckpointIO
fabric = Fabric(accelerator="cpu", devices=1)
AirCheckpointIO().attach(fabric)
fabric.save(sys.argv[1], {"model": fabric.setup(torch.nn.Linear(1000, 4000)), "step": 1})
"""


def test_exit_waits_for_the_last_save(tmp_path: Path) -> None:
    """A process that ends right after a save leaves a complete checkpoint."""
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "c")], check=True, timeout=300)
    assert verify_checkpoint(tmp_path / "c").valid


def test_the_loop_of_the_docs(
    volume: Volume, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's loop runs as it stands; a second start resumes, and no validation is left out."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # the loop sets them: they are put back
    page = (Path(__file__).parents[2] / "docs/fabric.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    for number in range(10):
        (volume.directory / f"{number}.txt").write_text("x" * number)
    whole: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "fabric.md", "exec"), whole)
    assert len(whole["state"]["losses"]) == 2
    assert "started fresh" in capsys.readouterr().out
    checkpoints = "/Volumes/main/default/checkpoints"
    assert sorted(r.step or 0 for r in list_checkpoints(checkpoints)) == [2, 4, 6, 8, 10]
    for step in (6, 8, 10):
        remove_checkpoint(f"{checkpoints}/step={step}")
    for step in (4, 10):  # before an epoch's end, and at it
        resumed: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "fabric.md", "exec"), resumed)
        assert f"resumed from {checkpoints}/step={step}" in capsys.readouterr().out
        assert resumed["state"]["losses"] == whole["state"]["losses"]
        assert sorted(r.step or 0 for r in list_checkpoints(checkpoints)) == [2, 4, 6, 8, 10]
