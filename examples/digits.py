"""Train a small CNN on digit images that lie in a volume; killed at any moment, it resumes exactly.

Copy this file and change the model, the paths and ``decode``. What makes the run resumable is in
``main``: ``AirCheckpointIO`` saves from every rank without stopping the training, and
``AirResume`` finds the newest complete checkpoint when the same command is started again.

    .venv/bin/python examples/digits.py --data /Volumes/demo/digits/images \
        --checkpoints /Volumes/demo/digits/checkpoints

``--data`` holds ``train/<class>/*.png`` and ``val/<class>/*.png``. ``make demo`` writes such a
folder, runs this script, kills it twice and compares the outcome with an undisturbed run.
"""

import argparse
import os
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import nn
from torch.nn import functional

from air_lightning import AirCheckpointIO, AirDataModule, AirResume, UCVolumeDataset

Sample = tuple[torch.Tensor, int, str]


def decode(path: str) -> Sample:
    """Reads one image: pixels of shape (1, 8, 8) from 0 to 1, its class, and its name.

    The class is the name of the folder the file lies in; the name is only for the step log.
    """
    folder, name = os.path.split(path)
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    label = os.path.basename(folder)
    return pixels[None], int(label), f"{label}/{name}"


def decode_augmented(path: str) -> Sample:
    """The same, moved by up to one pixel and with noise: drawn anew in the worker each time."""
    pixels, label, name = decode(path)
    down, right = torch.randint(0, 3, (2,)).tolist()
    moved = functional.pad(pixels, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
    return moved + 0.05 * torch.randn(1, 8, 8), label, name


class DigitData(AirDataModule):
    """The data module with augmentation for training and plain images for validation."""

    def decode(self, path: str) -> Sample:
        return decode(path)

    def train_dataset(self) -> Any:
        files = UCVolumeDataset(self.paths["train"], shuffle=True, seed=self.seed, uneven="pad")
        return files.map(decode_augmented)


class DigitNet(LightningModule):
    """Two convolutions and two linear layers: images of shape (N, 1, 8, 8) to ten scores."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        pixels, labels, _names = batch
        loss = functional.cross_entropy(self.layers(pixels), labels)
        self.log("train_loss", loss, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        pixels, labels, _names = batch
        hits = self.layers(pixels).argmax(dim=1) == labels
        accuracy = hits.float().mean()
        self.log("val_accuracy", accuracy, batch_size=len(labels), sync_dist=True)
        return {"hits": hits}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        epochs = self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]


def mlflow_logger() -> MLFlowLogger | bool:
    """A logger for the run that ``MLFLOW_TRACKING_URI`` and ``MLFLOW_RUN_ID`` name; else False.

    Rank 0 makes that run the active one, so that the loader's timings land in it too. The same
    ``MLFLOW_RUN_ID`` at every start keeps one run over all interruptions.
    """
    if "MLFLOW_TRACKING_URI" not in os.environ:
        return False
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if rank_zero_only.rank == 0:
        import mlflow

        run_id = mlflow.start_run().info.run_id
    return MLFlowLogger(run_id=run_id, tracking_uri=os.environ["MLFLOW_TRACKING_URI"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", default="/Volumes/demo/digits/images")
    parser.add_argument("--checkpoints", default="/Volumes/demo/digits/checkpoints")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--save-every", type=int, default=22, help="in steps")
    parser.add_argument("--log", help="a local directory for a log of every step (step_log.py)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # two ranks on two cores; more threads would only wait for each other
    seed_everything(1, workers=True, verbose=False)
    callbacks: list[Any] = [
        AirResume(),
        ModelCheckpoint(
            dirpath=args.checkpoints,
            filename="{step}",
            every_n_train_steps=args.save_every,
            save_top_k=-1,
        ),
    ]
    profiler = None
    if args.log:
        from step_log import DataWait, StepLog

        profiler = DataWait()
        callbacks.append(StepLog(args.log, profiler))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        plugins=[AirCheckpointIO()],
        callbacks=callbacks,
        profiler=profiler,
        logger=mlflow_logger(),
        log_every_n_steps=20,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=not args.log,
    )
    data = DigitData(
        train=f"{args.data}/train",
        val=f"{args.data}/val",
        batch_size=args.batch_size,
        num_workers=2,
        seed=1,
    )
    trainer.fit(DigitNet(), datamodule=data)


if __name__ == "__main__":
    main()
