"""Checkpoints that Lightning itself wrote resume under AirCheckpointIO, to the bits of its own."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from air_lightning import (
    AirCheckpointIO,
    AirResume,
    CheckpointMismatchError,
    DataLoader,
    UCVolumeDataset,
)
from conftest import Volume
from integration.training import assert_same
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(450),
    pytest.mark.usefixtures("elsewhere"),
]

SAMPLES = 16


class Net(LightningModule):
    """Dropout, a buffer, Adam and a scheduler; sharded where the strategy has a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 6)
        self.drop = torch.nn.Dropout(0.4)
        self.second = torch.nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.first.weight, DTensor):
            for layer in (self.first, self.second):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        loss = self.second(self.drop(self.first(batch))).pow(2).mean()
        self.losses.append(torch.stack([batch.sum(), loss.detach()]))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.second(self.first(batch)).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def samples(count: int = SAMPLES) -> TorchDataLoader:
    return TorchDataLoader(torch.arange(2.0 * count).reshape(count, 2) / count, batch_size=2)


def trainer(kind: str, *callbacks: Callback, ours: bool = True, epochs: int = 3) -> Trainer:
    """A quiet Trainer of that kind; without ``ours`` it saves and loads as Lightning does."""
    sharded, whole = kind.startswith("model_parallel"), kind == "model_parallel_file"
    strategy: Any = {"alone": "auto", "ddp": "ddp"}.get(kind)
    if sharded:
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole)
    return Trainer(
        accelerator="cpu",
        devices=1 if kind == "alone" else 2,
        strategy=strategy,
        plugins=[AirCheckpointIO()] if ours else [],
        callbacks=list(callbacks),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def whole(value: Any) -> Any:
    """Without shards."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def saving(directory: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        directory, "{step}", save_top_k=-1, every_n_train_steps=3, enable_version_counter=False,
        **options,
    )  # fmt: skip


def outcome(fitting: Trainer, data: Any = None, **options: Any) -> dict[str, Any]:
    """Fit, and return each batch and loss, the end's weights and moments, and the last step."""
    torch.manual_seed(7)
    model = Net()
    fitting.fit(model, samples() if data is None else data, **options)
    return {
        "losses": model.losses,
        "model": whole(dict(model.state_dict())),
        "optimizer": whole(fitting.optimizers[0].state_dict()),
        "scheduler": fitting.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": fitting.global_step,
        "epoch": fitting.current_epoch,
    }


def lightnings_checkpoints(kind: str) -> None:
    """Save two epochs by Lightning; each rank compares what both IOs make of these."""
    warnings.simplefilter("ignore")
    per_epoch = SAMPLES // 2 // (1 if kind == "alone" else 2)
    outcome(trainer(kind, saving("c", save_last=True), ours=False, epochs=2))
    assert os.path.isdir("c/step=3.ckpt") == (kind == "model_parallel")
    last = 2 * per_epoch - 2 * per_epoch % 3
    for step in (3, last):
        wanted = outcome(trainer(kind, ours=False), ckpt_path=f"c/step={step}.ckpt")
        assert wanted["step"] == 3 * per_epoch
        assert len(wanted["losses"]) == 3 * per_epoch - step
        assert_same(outcome(trainer(kind), ckpt_path=f"c/step={step}.ckpt"), wanted)
    # It finds the newest by itself, which is what Lightning calls the last one: in 2.5 a later one.
    wanted = outcome(trainer(kind, ours=False), ckpt_path="c/last.ckpt")
    assert_same(outcome(trainer(kind, AirResume("c"))), wanted)
    assert_same(outcome(trainer(kind, AirResume(), saving("c")), ckpt_path="last"), wanted)
    tested = [
        trainer(kind, ours=ours).test(Net(), samples(), "c/step=3.ckpt", verbose=False)
        for ours in (False, True)
    ]
    assert tested[0] == tested[1] != [{}]
    # The run above went on to save directories of ours beside those, and these are newer now.
    again = outcome(trainer(kind, AirResume("c"), epochs=4))
    assert len(again["losses"]) == per_epoch


@pytest.mark.parametrize("kind", ["alone", "ddp", "model_parallel", "model_parallel_file"])
def test_lightnings_checkpoints_resume_to_the_bits_of_its_own_resume(
    kind: str, tmp_path: Path
) -> None:
    """fit(ckpt_path), AirResume, ``last`` and test give with the plugin what they do without."""
    log, size = tmp_path / "log", 1 if kind == "alone" else 2
    status = run_ranks(lightnings_checkpoints, kind, world_size=size, log=log)
    assert status == [0] * size, log.read_text()[-4000:]


def without_its_strategy(path: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="under the strategy that saved it"):
        outcome(trainer("alone"), ckpt_path=path)


def sharded(path: str) -> None:
    outcome(trainer("model_parallel", saving(path), ours=False, epochs=1))


def test_a_sharded_directory_under_another_strategy_says_what_to_do(tmp_path: Path) -> None:
    """Lightning's sharded directory given to a single device is an error with the way out."""
    log = tmp_path / "log"
    status = run_ranks(sharded, f"{tmp_path}/c", world_size=2, log=log)
    status += run_ranks(without_its_strategy, f"{tmp_path}/c/step=3.ckpt", log=log)
    assert status == [0, 0, 0], log.read_text()[-4000:]


class Stateful(IterableDataset):
    """Batches of another package, whose loader has a state in a format of its own."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in samples():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("ours has taken its place")


def decode(path: str) -> torch.Tensor:
    return torch.full((2,), float(Path(path).stem))


def ours(epoch: int = 0) -> DataLoader:
    dataset = UCVolumeDataset(Volume.path, shuffle=True, seed=2).map(decode)
    loader = DataLoader(dataset, batch_size=2, num_workers=0)
    loader.set_epoch(epoch)
    return loader


def order(epoch: int) -> list[float]:
    return [batch.sum().item() for batch in ours(epoch)]


def change_loaders(kept: str) -> None:
    """Train with a loader that keeps a state or none; resume with ours."""
    data = Stateful() if kept == "stateful" else samples()
    torch.manual_seed(7)
    trainer("alone", saving("c"), ours=False, epochs=2).fit(Net(), data)
    end = ModelCheckpoint("c", "end", every_n_epochs=1)
    trainer("alone", end, ours=False, epochs=1).fit(Net(), data)
    for name, left, warned in (("step=3", 5, 1), ("step=12", 4, 1), ("end", 8, 0)):
        shutil.rmtree("checkpoints", ignore_errors=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = outcome(trainer("alone"), ours(), ckpt_path=f"c/{name}.ckpt")
        batches = [line[0].item() for line in got["losses"]]
        first = {"step=3": 0, "step=12": 1, "end": 1}[name]
        assert batches[:left] == order(first)[:left], name
        later = [batch for epoch in range(first + 1, 3) for batch in order(epoch)]
        assert batches[left:] == later, name
        assert sum("holds no position" in str(each.message) for each in told) == warned, name


@pytest.mark.parametrize("kept", ["stateless", "stateful"])
def test_a_loader_of_ours_takes_the_place_of_another(
    kept: str, volume: Volume, tmp_path: Path
) -> None:
    """The epoch's rest begins at its order's start, with a warning; later epochs are whole."""
    volume.write(SAMPLES)
    log = tmp_path / "log"
    assert run_ranks(change_loaders, kept, log=log) == [0], log.read_text()[-4000:]
