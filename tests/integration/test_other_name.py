"""Lightning's other import name, pytorch_lightning: what works, and clear errors for the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as here
import pytest
import torch

from air_lightning import (
    AirCheckpointIO,
    AirDataModule,
    AirResume,
    DataLoader,
    InvalidArgumentError,
    UCVolumeDataset,
)
from conftest import Volume
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("elsewhere"),
]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module_of(package: Any) -> Any:
    """A small module, of the class of that package."""

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Net()


def decode(path: str) -> torch.Tensor:
    return torch.tensor([float(Path(path).stem)])


def loader(workers: int = 0) -> DataLoader:
    """Eight files, two to a batch."""
    dataset = UCVolumeDataset(Volume.path, shuffle=True, seed=3).map(decode)
    return DataLoader(dataset, batch_size=2, num_workers=workers)


def said(action: Callable[[], Any]) -> str:
    """The message of the error that is wanted; nothing where none comes."""
    try:
        action()
    except InvalidArgumentError as error:
        return str(error)
    return ""


def refusals(out: str) -> None:
    """Each mixture that the two packages let through."""
    import pytorch_lightning as other
    from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
    from pytorch_lightning.plugins.io import AsyncCheckpointIO
    from pytorch_lightning.strategies import SingleDeviceStrategy

    def fit_other(checkpoint_io: Any = None, **options: Any) -> None:
        if checkpoint_io is not None:
            options["strategy"] = SingleDeviceStrategy("cpu", checkpoint_io=checkpoint_io)
        other.Trainer(**QUIET, **options).fit(module_of(other), loader())

    def fit_here(*callbacks: Any) -> None:
        trainer = here.Trainer(plugins=[AirCheckpointIO()], callbacks=list(callbacks), **QUIET)
        trainer.fit(module_of(here), loader())

    messages = {
        "strategy": said(lambda: fit_other(AirCheckpointIO())),
        "wrapped": said(lambda: fit_other(plugins=[AsyncCheckpointIO(AirCheckpointIO())])),
        "resume": said(lambda: fit_other(callbacks=[AirResume()])),
        "saving": said(lambda: fit_here(ModelCheckpoint("c", every_n_train_steps=2))),
        "resuming": said(
            lambda: fit_here(AirResume(), ModelCheckpoint("c", every_n_train_steps=2))
        ),
        "on exception": said(lambda: fit_here(OnExceptionCheckpoint("c"))),
        "nothing of theirs": said(fit_here),
        "nothing of ours": said(fit_other),
    }
    Path(out).write_text(json.dumps(messages))


def test_mixtures_that_would_do_less_than_was_asked_are_refused(
    volume: Volume, tmp_path: Path
) -> None:
    """A Trainer of one package with what saves or resumes of the other raises before it trains."""
    volume.write(8)
    log, out = tmp_path / "log", tmp_path / "messages.json"
    assert run_ranks(refusals, str(out), log=log) == [0], log.read_text()[-3000:]
    messages = json.loads(out.read_text())
    assert messages.pop("nothing of theirs") == messages.pop("nothing of ours") == ""
    for case, message in messages.items():
        assert "pytorch_lightning" in message, case
        assert "import lightning.pytorch as pl" in message, case
    assert messages["strategy"].startswith("AirCheckpointIO was given to")
    assert messages["resume"].startswith("AirResume was given to")
    assert messages["on exception"].startswith("OnExceptionCheckpoint of pytorch_lightning")


def data_path(out: str) -> None:
    """One epoch, saved by their own Trainer after each batch, and resumed in its middle."""
    import pytorch_lightning as other
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Seen(other.Callback):
        def __init__(self) -> None:
            self.batches: list[list[float]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            self.batches.append(batch[:, 0].tolist())

    def fit(*callbacks: Any, **options: Any) -> list[list[float]]:
        seen = Seen()
        trainer = other.Trainer(callbacks=[seen, *callbacks], **QUIET)
        trainer.fit(module_of(other), loader(workers=2), **options)
        return seen.batches

    saving = ModelCheckpoint("c", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(saving)
    rest = fit(ckpt_path="c/step=2.ckpt")
    Path(out).write_text(json.dumps({"whole": whole, "rest": rest}))


def test_their_trainer_resumes_our_loader_in_mid_epoch(volume: Volume, tmp_path: Path) -> None:
    """On one rank a Trainer of pytorch_lightning keeps and restores the loader's position."""
    volume.write(8)
    log, out = tmp_path / "log", tmp_path / "seen.json"
    assert run_ranks(data_path, str(out), log=log) == [0], log.read_text()[-3000:]
    seen = json.loads(out.read_text())
    assert sorted(n for batch in seen["whole"] for n in batch) == [float(n) for n in range(8)]
    assert seen["rest"] == seen["whole"][2:]


def module_and_data(out: str) -> None:
    import pytorch_lightning as other

    messages = {}
    ours = here.Trainer(plugins=[AirCheckpointIO()], **QUIET)
    data = AirDataModule(train=Volume.path, decode=decode, num_workers=0)
    for name, action in {
        "plugin": lambda: other.Trainer(plugins=[AirCheckpointIO()], **QUIET),
        "data": lambda: other.Trainer(**QUIET).fit(module_of(other), datamodule=data),
        "module": lambda: ours.fit(module_of(other), loader()),
    }.items():
        with pytest.raises(Exception) as raised:
            action()
        messages[name] = f"{raised.type.__name__}: {raised.value}"
    Path(out).write_text(json.dumps(messages))


def test_lightnings_own_checks_are_those_that_the_docs_explain(
    volume: Volume, tmp_path: Path
) -> None:
    """What Lightning itself says of the plugin, the data module and the module of the other."""
    volume.write(8)
    log, out = tmp_path / "log", tmp_path / "messages.json"
    assert run_ranks(module_and_data, str(out), log=log) == [0], log.read_text()[-3000:]
    messages = json.loads(out.read_text())
    assert "Found invalid type for plugin" in messages["plugin"]
    assert "Expected a parent" in messages["data"]
    assert "`model` must be a `LightningModule`" in messages["module"]
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    for wanted in ("Found invalid type for plugin", "Expected a parent", "model must be a"):
        assert any(wanted in heading.replace("`", "") for heading in headings), wanted
