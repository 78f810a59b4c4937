"""LightningCLI with this package's classes in its config file, run as a user runs it."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from PIL import Image

from air_lightning import AirDataModule, EmptyVolumeError, find_latest_valid, list_checkpoints
from conftest import Volume
from integration.cli_parts import Net, lines
from integration.training import assert_same
from ranks import KILLED, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILES = 22
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def config(
    volume: Volume, tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A config file as users write them, and the files that it names."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which seed_everything sets
        monkeypatch.setenv(variable, "7")
    for number in range(FILES):
        volume.put(f"{number:03d}.txt", str(number).encode())
    path = tmp_path / "config.yaml"
    path.write_text(f"""
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: air_lightning.AirCheckpointIO
      init_args:
        verify: true
  callbacks:
    - class_path: air_lightning.AirResume
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: {volume.path}/checkpoints
        every_n_train_steps: 3
        save_top_k: -1
    - class_path: integration.cli_parts.Lines
      init_args:
        directory: {tmp_path}
model:
  class_path: integration.cli_parts.Net
data:
  class_path: air_lightning.AirDataModule
  init_args:
    train: {volume.path}
    decode: integration.cli_parts.decode
    pattern: "*.txt"
    batch_size: 2
    num_workers: 2
""")
    return path


def cli(*args: str, **options: Any) -> LightningCLI:
    """Run it with these arguments of a command line."""
    torch.set_num_threads(1)
    sys.argv[1:] = []  # those of pytest, of which it would warn
    return LightningCLI(args=list(args), save_config_kwargs={"overwrite": True}, **options)


def fit(result: str, *args: str) -> None:
    """``fit``; writes down what came of it."""
    done = cli("fit", *args)
    optimizer = done.trainer.optimizers[0].state_dict()
    torch.save({"model": done.model.state_dict(), "optimizer": optimizer}, result)


def ranks(directory: Path, *args: str) -> list[int]:
    """``fit`` on two ranks that save and write below a directory of their own."""
    directory.mkdir(exist_ok=True)
    log = directory / "log"
    statuses = run_ranks(
        fit,
        f"{directory}/result.pt",
        *args,
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        world_size=2,
        log=log,
    )
    assert set(statuses) <= {0, KILLED}, log.read_text()[-4000:]
    return statuses


def elsewhere_in(config: Path, directory: Path, **lines: Any) -> str:
    """A copy of the config file that saves and writes elsewhere."""
    parsed = yaml.safe_load(config.read_text())
    _, checkpoint, diary = parsed["trainer"]["callbacks"]
    checkpoint["init_args"]["dirpath"] += f"/{directory.name}"
    diary["init_args"] |= {"directory": str(directory), **lines}
    path = config.with_name(f"{directory.name}-{len(lines)}.yaml")
    path.write_text(yaml.safe_dump(parsed))
    return str(path)


def test_killed_and_started_again(config: Path, tmp_path: Path, capsys: Any) -> None:
    """A fit of two ranks that was killed resumes exactly, from what --print_config made of it."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert set(ranks(whole, f"--config={elsewhere_in(config, whole)}")) == {0}
    killed = elsewhere_in(config, broken, kill_at=8)
    assert set(ranks(broken, f"--config={killed}")) == {KILLED}
    with pytest.raises(SystemExit) as done:
        cli("fit", f"--config={elsewhere_in(config, broken)}", "--print_config")
    assert done.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert set(ranks(broken, f"--config={printed}")) == {0}
    for rank in range(2):
        assert lines(broken, rank) == lines(whole, rank)
    results = [torch.load(f"{each}/result.pt", weights_only=True) for each in (broken, whole)]
    assert_same(*results)


def test_the_other_commands(config: Path, volume: Volume, tmp_path: Path) -> None:
    """validate, test and predict take a checkpoint of fit, from one file and a few overrides."""
    log, told = tmp_path / "log", tmp_path / "told.json"
    assert run_ranks(_all_commands, str(config), volume.path, str(told), log=log) == [0], (
        log.read_text()[-4000:]
    )
    found = json.loads(told.read_text())
    assert found["validate"] == found["test"] == found["trained"]
    assert Counter(found["predict"]) == Counter(f"{n:03d}.txt" for n in range(FILES))
    assert found["factor"] == 0.5


def _all_commands(config: str, path: str, told: str) -> None:
    done = cli("fit", f"--config={config}", "--trainer.max_epochs=1", "--data.batch_size=4")
    assert done.datamodule.batch_size == 4
    assert done.trainer.global_step == 6
    weights = sum(weight.double().abs().sum() for weight in done.model.parameters())
    found: dict[str, Any] = {"trained": float(weights)}
    newest = find_latest_valid(f"{path}/checkpoints")
    override = ("--data.init_args.num_workers=0", f"--ckpt_path={newest}")
    for command, stage in (("validate", "val"), ("test", "test")):
        done = cli(command, f"--config={config}", f"--data.{stage}={path}", *override)
        found[command] = float(done.trainer.callback_metrics["weights"])
    scaled = ("--data.decode=integration.cli_parts.Scaled", "--data.decode.factor=0.5")
    done = cli("predict", f"--config={config}", f"--data.predict={path}", *override, *scaled)
    batches = done.trainer.predict_loop.predictions
    found["predict"] = [name for batch in batches for name in batch]
    found["factor"] = done.datamodule._decode.factor
    Path(told).write_text(json.dumps(found))


def test_a_data_module_that_the_program_names(config: Path, volume: Volume) -> None:
    """LightningCLI(Model, AirDataModule) takes options of data without a class_path."""
    parsed = yaml.safe_load(config.read_text())
    flat = {**parsed, "data": parsed["data"]["init_args"], "model": {"width": 4}}
    config.write_text(yaml.safe_dump(flat))
    classes = {"model_class": Net, "datamodule_class": AirDataModule}
    done = cli(f"--config={config}", "--data.seed=3", run=False, **classes)
    assert done.datamodule.paths == {"train": volume.path}
    assert done.datamodule.seed == 3
    assert done.datamodule.decode(str(volume.directory / "007.txt"))[0] == "007.txt"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--data.train=images", "'images' was given; wanted is a volume path"),
        ("--data.val=/Volumes/a/b", "'/Volumes/a/b' was given"),
        ("--data.batch_size=0", "batch_size=0 was given; at least 1"),
        ("--data.uneven=cut", "Literal"),
        ("--data.batchsize=2", "batchsize"),
        ("--data.decode=integration.cli_parts.nothing", "nothing"),
        ("--trainer.plugins.timeout_s=0", "timeout_s=0"),
        ("--trainer.callbacks=AirResume|dirpath=/Volumes/a/b", "'/Volumes/a/b' was given"),
    ],
)
def test_an_option_that_cannot_work(config: Path, capsys: Any, override: str, told: str) -> None:
    """A wrong option ends the command before anything is trained, and the message says why."""
    first, _, more = override.partition("|")
    name = first.partition("=")[0]
    overrides = [first, f"{name}.{more}"] if more else [first]
    with pytest.raises((ValueError, SystemExit)) as caught:
        cli("fit", f"--config={config}", *overrides)
    assert told in str(caught.value) + capsys.readouterr().err


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_path_where_nothing_is(config: Path, volume: Volume, stage: str) -> None:
    """Files that are not there are an error before the first step, also those of a later epoch."""
    config.write_text(config.read_text().replace("num_workers: 2", "num_workers: 0"))
    with pytest.raises(EmptyVolumeError, match="does not exist"):
        cli(
            "fit",
            f"--config={config}",
            f"--data.{stage}={volume.path}/missing",
            "--trainer.check_val_every_n_epoch=2",
            "--trainer.num_sanity_val_steps=0",
        )
    assert list_checkpoints(f"{volume.path}/checkpoints") == []


def test_the_example(volume: Volume, tmp_path: Path, elsewhere: None) -> None:
    """examples/cli.py and its config.yaml: each command, and a second start that goes on."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 8, 8), dtype=np.uint8)
    root = Path(os.environ["AIR_VOLUMES_ROOT"]) / "demo/digits/images"
    for stage in ("train", "val"):
        for number, image in enumerate(pixels):
            folder = root / stage / str(number % 10)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:04}.png")
    log = tmp_path / "log"
    assert run_ranks(_example, log=log) == [0], log.read_text()[-4000:]


def _example() -> None:
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[1:] = []
    from cli import main

    alone = [f"--config={EXAMPLES}/config.yaml", "--trainer.devices=1", "--trainer.strategy=auto"]
    checkpoints = "/Volumes/demo/digits/cli"
    quick = ["--trainer.callbacks.init_args.every_n_train_steps=2", "--model.width=8"]
    for epochs in (1, 2):
        main(["fit", *alone, *quick, f"--trainer.max_epochs={epochs}"])
        assert max(record.step or 0 for record in list_checkpoints(checkpoints)) == 2 * epochs
    last = [f"--ckpt_path={checkpoints}/last.ckpt", "--model.width=8"]
    main(["validate", *alone, *last])
    assert "test_accuracy" in main(["test", *alone, *last]).trainer.callback_metrics
    predicted = main(["predict", *alone, *last]).trainer.predict_loop.predictions
    assert len([name for batch in predicted for name, _ in batch]) == 32
