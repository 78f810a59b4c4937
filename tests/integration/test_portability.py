"""Checkpoints in and out: torch's and Lightning's own tools on ours, and ours on theirs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader as TorchDataLoader

from air_lightning import (
    AirCheckpointIO,
    UCVolumeReader,
    UCVolumeWriter,
    UnsafeCheckpointError,
    export_checkpoint,
    find_latest_valid,
)
from air_lightning.checkpoint.planner import save
from air_lightning.checkpoint.state import to_entries
from integration.training import FsdpOnCpu, assert_same
from ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("elsewhere"),
]


class Net(LightningModule):
    """Has hyper-parameters, a tied weight, a buffer, an optimizer with state, and a scheduler."""

    def __init__(self, width: int = 3, rate: float = 0.1, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(4, width)
        self.second = torch.nn.Linear(width, 4, bias=False)
        self.tied = torch.nn.Linear(width, 4, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        hidden = self.first(batch)
        return (self.second(hidden) + self.tied(hidden)).pow(2).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.first.weight.double().sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def samples() -> TorchDataLoader:
    """Eight samples, two to a batch."""
    return TorchDataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=2)


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A quiet CPU Trainer; with ``plugins=[]`` it saves and loads as Lightning does."""
    options = {"plugins": [AirCheckpointIO()], "max_epochs": 2, "devices": 1, **options}
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def saving(directory: Path | str) -> ModelCheckpoint:
    """Saves at each epoch's end, keeping all."""
    return ModelCheckpoint(dirpath=directory, filename="{step}", save_top_k=-1)


class Own(Callback):
    """Writes what Lightning's own file would hold, at each save of rank 0."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            torch.save(checkpoint, self.path)


def save_some(directory: str, world_size: int = 1, extra: Any = None) -> None:
    """Train two epochs, and save at the end of each."""
    torch.manual_seed(3)
    strategy = "ddp" if world_size > 1 else "auto"
    callbacks = (Own(f"{directory}.own"), saving(directory))
    fitted = trainer(*callbacks, devices=world_size, strategy=strategy)
    fitted.fit(Net(extra=extra), samples())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of ours, ``c/step=8.ckpt``, and ``c.own``, the same state by Lightning."""
    root = tmp_path_factory.mktemp("made")
    log = root / "log"
    assert run_ranks(save_some, f"{root}/c", log=log) == [0], log.read_text()[-3000:]
    return root


@pytest.fixture
def ours(made: Path) -> str:
    """A checkpoint directory of ours."""
    return f"{made}/c/step=8.ckpt"


@pytest.fixture
def own(made: Path) -> dict[str, Any]:
    """The dict that Lightning's own file would hold at the same step."""
    return torch.load(f"{made}/c.own", weights_only=True)


def test_the_fixture_is_ours(ours: str, made: Path) -> None:
    """What the other tests move about is a directory, and the newest."""
    assert find_latest_valid(f"{made}/c") == ours


def test_torchs_reader_loads_ours(ours: str, own: dict[str, Any]) -> None:
    """dcp.load with torch's own FileSystemReader fills a module's state, flat or nested."""
    state = {f"state_dict.{k}": torch.zeros_like(v) for k, v in own["state_dict"].items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(ours))
    for name, wanted in own["state_dict"].items():
        assert torch.equal(state[f"state_dict.{name}"], wanted), name


def test_torchs_converter_makes_a_file_of_ours(
    ours: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """dcp_to_torch_save gives a file whose state_dict a module loads."""
    dcp_to_torch_save(ours, tmp_path / "torch.pt")
    loaded = torch.load(tmp_path / "torch.pt", weights_only=True)
    Net().load_state_dict(loaded["state_dict"], strict=True)
    assert_same(loaded["state_dict"], dict(own["state_dict"]))


def test_our_reader_loads_what_torchs_converter_made(own: dict[str, Any], tmp_path: Path) -> None:
    """torch_save_to_dcp makes a directory that UCVolumeReader reads and export gives back."""
    torch.save({"state_dict": dict(own["state_dict"])}, tmp_path / "in.pt")
    torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "dcp")
    state = {"state_dict": {k: torch.zeros_like(v) for k, v in own["state_dict"].items()}}
    dcp.load(state, storage_reader=UCVolumeReader(tmp_path / "dcp"))
    assert_same(state["state_dict"], dict(own["state_dict"]))
    out = export_checkpoint(tmp_path / "dcp", tmp_path / "w.ckpt")
    assert_same(torch.load(out, weights_only=True)["state_dict"], dict(own["state_dict"]))


def test_lightnings_consolidation_says_that_it_is_not_for_ours(ours: str, tmp_path: Path) -> None:
    """Lightning's tool wants its own extra file; it refuses ours and writes nothing."""
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint"]
    command += [ours, "--output_file", f"{tmp_path}/out.ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "Only FSDP-sharded checkpoints saved with Lightning" in done.stderr
    assert not (tmp_path / "out.ckpt").exists()


def test_an_export_equals_lightnings_own_file(
    ours: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """The same keys, numbers and tensors as the file that Lightning itself would have written."""
    got = torch.load(export_checkpoint(ours, tmp_path / "out.ckpt"), weights_only=True)
    assert got["optimizer_states"][0]["state"].keys() == {0, 1, 2}
    assert_same(got, own)


class AtStart(Callback):
    """Notes the state that training begins with."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.state = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "model": {k: v.clone() for k, v in module.state_dict().items()},
            "optimizer": trainer.optimizers[0].state_dict()["state"][0]["exp_avg"].clone(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
        }


def resumed(path: str, plugins: list[Any]) -> dict[str, Any]:
    """Resume for one epoch more; what it began and ended with."""
    start = AtStart()
    torch.manual_seed(5)
    again = trainer(start, plugins=plugins, max_epochs=3)
    model = Net()
    again.fit(model, samples(), ckpt_path=path)
    ended = {"model": model.state_dict(), "optimizer": again.optimizers[0].state_dict()}
    return {"start": start.state, "end": ended, "steps": again.global_step}


def test_an_export_resumes_without_this_package(ours: str, tmp_path: Path) -> None:
    """Under Lightning's default IO the export resumes to the bits that the directory gives."""
    out = export_checkpoint(ours, tmp_path / "out.ckpt")
    theirs, mine = resumed(out, []), resumed(ours, [AirCheckpointIO()])
    assert theirs["start"]["step"] == 8
    assert theirs["steps"] == 12
    assert_same(theirs, mine)


def test_a_file_of_lightnings_resumes_like_the_directory(ours: str, tmp_path: Path) -> None:
    """A plain file, as Lightning or an export makes it, resumes under AirCheckpointIO, too."""
    out = export_checkpoint(ours, tmp_path / "out.ckpt")
    assert_same(resumed(out, [AirCheckpointIO()]), resumed(ours, [AirCheckpointIO()]))


def test_load_from_checkpoint_reads_an_export(
    ours: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """Hyper-parameters build the module, an argument overrides one, and the weights are there."""
    out = export_checkpoint(ours, tmp_path / "out.ckpt")
    model = Net.load_from_checkpoint(out, rate=0.5)
    assert (model.hparams.width, model.hparams.rate) == (3, 0.5)
    assert model.tied.weight is model.second.weight
    assert_same(dict(model.state_dict()), dict(own["state_dict"]))


def test_load_from_checkpoint_reads_weights_of_plain_dcp(
    own: dict[str, Any], tmp_path: Path
) -> None:
    """Weights exported from a directory of torch's own load into the module."""
    value = {"model": dict(own["state_dict"])}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    model = Net.load_from_checkpoint(export_checkpoint(tmp_path / "dcp", tmp_path / "w.ckpt"))
    assert_same(dict(model.state_dict()), dict(own["state_dict"]))


def test_a_directory_is_tested_with(ours: str, own: dict[str, Any]) -> None:
    """trainer.test(ckpt_path=directory) tests the saved weights."""
    tester = trainer()
    (found,) = tester.test(Net(), samples(), ckpt_path=ours, verbose=False)
    wanted = own["state_dict"]["first.weight"].double().sum().item()
    assert found["weight"] == pytest.approx(wanted)


def save_with_two_ranks(directory: str) -> None:
    save_some(directory, world_size=2)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_one_file(tmp_path: Path) -> None:
    """What two ranks wrote is exported to the state of Lightning's own file, and resumes alone."""
    log = tmp_path / "log"
    status = run_ranks(save_with_two_ranks, f"{tmp_path}/c", world_size=2, log=log)
    assert status == [0, 0], log.read_text()[-3000:]
    (name,) = [name for name in os.listdir(tmp_path / "c") if "step=4" in name]
    out = export_checkpoint(f"{tmp_path}/c/{name}", tmp_path / "out.ckpt")
    got, own = (torch.load(path, weights_only=True) for path in (out, f"{tmp_path}/c.own"))
    assert_same(got["state_dict"], own["state_dict"])
    assert_same(got["optimizer_states"], own["optimizer_states"])
    assert resumed(out, [])["start"]["step"] == 4


class Custom:
    """A class that weights_only does not know."""


def save_custom(directory: str) -> None:
    save_some(directory, extra=Custom())


def test_weights_only_is_honoured(tmp_path: Path) -> None:
    """A class in the hyper-parameters is refused by name; weights_only=False loads it."""
    log = tmp_path / "log"
    assert run_ranks(save_custom, f"{tmp_path}/c", log=log) == [0], log.read_text()[-3000:]
    path = f"{tmp_path}/c/step=8.ckpt"
    for weights_only in (True, None):
        with pytest.raises(UnsafeCheckpointError, match="Custom"):
            trainer().test(Net(), samples(), path, weights_only=weights_only, verbose=False)
    trainer().test(Net(), samples(), path, weights_only=False, verbose=False)
    out = export_checkpoint(path, tmp_path / "out.ckpt", weights_only=False)
    assert isinstance(Net.load_from_checkpoint(out, weights_only=False).hparams.extra, Custom)


def save_shards(directory: str) -> None:
    """Two ranks hold half of each weight and of its moment, as under FSDP2."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).reshape(5, 4)  # five rows: the halves are uneven
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    moment = distribute_tensor(whole * 2, mesh, [Shard(1)])
    optimizer = {"state": {0: {"exp_avg": moment}}, "param_groups": [{"params": [0]}]}
    checkpoint = {"global_step": 1, "state_dict": {"w": shard}, "optimizer_states": [optimizer]}
    rank = dist.get_rank()
    entries = to_entries(checkpoint, optimizer_names=[{0: "w"}], rank=rank, rank_blob={})
    save(entries, UCVolumeWriter(directory), process_group=None, no_dist=False)
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_come_out_as_whole_tensors(tmp_path: Path) -> None:
    """A checkpoint of shards is exported to plain whole tensors, without a process group."""
    log = tmp_path / "log"
    status = run_ranks(save_shards, f"{tmp_path}/c", world_size=2, log=log)
    assert status == [0, 0], log.read_text()[-3000:]
    got = torch.load(export_checkpoint(f"{tmp_path}/c", tmp_path / "o.ckpt"), weights_only=True)
    whole = torch.arange(20.0).reshape(5, 4)
    assert type(got["state_dict"]["w"]) is torch.Tensor
    assert torch.equal(got["state_dict"]["w"], whole)
    assert torch.equal(got["optimizer_states"][0]["state"][0]["exp_avg"], whole * 2)


class Sharded(Net):
    """Net under FSDP2."""

    def configure_model(self) -> None:
        for layer in (self.first, self.second, self.tied):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def save_lightnings_shards(directory: str) -> None:
    """What Lightning's own IO writes under ModelParallelStrategy, by two ranks."""
    torch.manual_seed(3)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fitted = trainer(plugins=[], devices=2, strategy=strategy, max_epochs=1)
    model = Sharded()
    model.tied = torch.nn.Linear(3, 4, bias=False)  # fully_shard unties weights
    fitted.fit(model, samples())
    fitted.save_checkpoint(f"{directory}/sharded.ckpt")
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    if fitted.global_rank == 0:
        torch.save(whole, f"{directory}/whole.pt")


@pytest.mark.slow
def test_lightnings_own_shards_give_their_weights(tmp_path: Path) -> None:
    """A sharded directory of Lightning's is exported to weights and hyper-parameters."""
    log = tmp_path / "log"
    status = run_ranks(save_lightnings_shards, str(tmp_path), world_size=2, log=log)
    assert status == [0, 0], log.read_text()[-3000:]
    assert (tmp_path / "sharded.ckpt" / "meta.pt").is_file()
    out = export_checkpoint(tmp_path / "sharded.ckpt", tmp_path / "out.ckpt")
    got = torch.load(out, weights_only=True)
    assert_same(got["state_dict"], torch.load(tmp_path / "whole.pt", weights_only=True))
    assert got["hyper_parameters"]["width"] == 3
    assert got["global_step"] == 2


class Untied(Net):
    """Net whose weights are not tied, for sharding unties them."""

    def __init__(self, width: int = 3, rate: float = 0.1, extra: Any = None) -> None:
        super().__init__(width, rate, extra)
        self.tied = torch.nn.Linear(width, 4, bias=False)


class UntiedShards(Untied):
    """Untied under FSDP2."""

    configure_model = Sharded.configure_model


def save_with(kind: str, directory: str) -> None:
    """Two ranks train two epochs under FSDP2 or FSDP1, and save through AirCheckpointIO."""
    torch.manual_seed(3)
    if kind == "fsdp2":
        strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        model: Net = UntiedShards()
    else:
        strategy = FsdpOnCpu(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded")
        model = Untied()
    trainer(saving(directory), devices=2, strategy=strategy).fit(model, samples())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_sharded_run_resumes_from_its_export_alone(kind: str, tmp_path: Path) -> None:
    """Numbers, names and shapes of an exported sharded run are those of a run without shards."""
    log = tmp_path / "log"
    status = run_ranks(save_with, kind, f"{tmp_path}/c", world_size=2, log=log)
    assert status == [0, 0], log.read_text()[-3000:]
    (name,) = [name for name in os.listdir(tmp_path / "c") if "step=4" in name]
    out = export_checkpoint(f"{tmp_path}/c/{name}", tmp_path / "out.ckpt")
    states = torch.load(out, weights_only=True)["optimizer_states"]
    assert states[0]["state"].keys() == {0, 1, 2, 3}
    alone = trainer(plugins=[], max_epochs=3)
    model = Untied.load_from_checkpoint(out)
    alone.fit(model, samples(), ckpt_path=out)
    assert alone.global_step == 8
