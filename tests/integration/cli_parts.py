"""What the tests of LightningCLI name in their config files, as a user's own modules are named."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from integration.training import FEATURES, Model

Sample = tuple[str, torch.Tensor]


def decode(path: str) -> Sample:
    """The file's name, and a vector of its number and of noise."""
    return os.path.basename(path), torch.rand(FEATURES) + float(Path(path).read_text()) / 100


class Scaled:
    """The same, with a factor: a decoder that has arguments of its own."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, path: str) -> Sample:
        name, vector = decode(path)
        return name, vector * self.factor


class Net(Model):
    """Model with the steps of the other commands; each logs what tells its weights from others."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__(width)

    def _log_weights(self) -> None:
        total = sum(weight.double().abs().sum() for weight in self.parameters())
        self.log("weights", total, on_epoch=True, batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_weights()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log_weights()

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
        return list(batch[0])


class Lines(Callback):
    """Writes down what each batch was and came to.

    Args:
        directory: Where.
        kill_at: The batch before which the whole run is killed.
    """

    def __init__(self, directory: str, kill_at: int | None = None) -> None:
        self.directory, self.kill_at = directory, kill_at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.kill_at:
            trainer.strategy.checkpoint_io.wait()
            os.killpg(0, signal.SIGKILL)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        line = [number, list(batch[0]), outputs["loss"].item().hex()]
        with open(f"{self.directory}/lines-{trainer.global_rank}.jsonl", "a") as lines:
            lines.write(json.dumps(line) + "\n")


def lines(directory: Any, rank: int) -> dict[int, Any]:
    """What a rank wrote, by batch; what was done again must have been the same."""
    found: dict[int, Any] = {}
    for text in Path(f"{directory}/lines-{rank}.jsonl").read_text().splitlines():
        number, *line = json.loads(text)
        assert found.setdefault(number, line) == line
    return found
