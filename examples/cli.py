"""The training of ``digits.py`` as a LightningCLI: everything that may change is in a YAML file.

    .venv/bin/python examples/cli.py fit --config examples/config.yaml
    .venv/bin/python examples/cli.py validate --config examples/config.yaml \
        --ckpt_path /Volumes/demo/digits/cli/last.ckpt

``test`` and ``predict`` work like ``validate``. Killed at any moment, ``fit`` goes on when the same
command is started again. ``make demo`` writes the images that ``config.yaml`` names.
"""

from typing import Any

import torch
from digits import DigitNet
from lightning.pytorch.cli import LightningCLI

from air_lightning import AirDataModule


class Digits(DigitNet):
    """DigitNet with the two steps more that the commands ``test`` and ``predict`` ask for."""

    def test_step(self, batch: Any) -> None:
        pixels, labels, _names = batch
        hits = self.layers(pixels).argmax(dim=1) == labels
        self.log("test_accuracy", hits.float().mean(), batch_size=len(labels), sync_dist=True)

    def predict_step(self, batch: Any) -> list[tuple[str, int]]:
        pixels, _labels, names = batch
        return list(zip(names, self.layers(pixels).argmax(dim=1).tolist(), strict=True))


def main(args: list[str] | None = None) -> LightningCLI:
    torch.set_num_threads(1)  # two ranks on two cores; more threads would only wait for each other
    # Without overwrite the second start of a run would stop at the config.yaml of the first one.
    return LightningCLI(Digits, AirDataModule, save_config_kwargs={"overwrite": True}, args=args)


if __name__ == "__main__":
    main()
