"""The whole job on a bucket: stream, train, save, resume."""

from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from air_lightning import AirCheckpointIO, AirDataModule, AirResume, find_latest_valid

pytest.importorskip("moto.server", reason="moto is not installed")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
from s3_server import KEY, SECRET, s3_server  # noqa: E402 - needs moto

pytestmark = pytest.mark.slow

BUCKET = "fit-bucket"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bucket with 64 files, and the environment that leads to it."""
    with s3_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir(BUCKET)
        fs.pipe({f"{BUCKET}/data/{number:03}.txt": b"x" for number in range(64)})
        yield


class Files(AirDataModule):
    def decode(self, path: str) -> torch.Tensor:
        return torch.tensor([float(Path(path).stem)])


class Model(lightning.LightningModule):
    """Notes which files it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen += [int(number) for number in batch[:, 0]]
        return self.layer(batch / 64).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(max_steps: int) -> Model:
    model = Model()
    checkpoints = ModelCheckpoint(f"s3://{BUCKET}/ckpt", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AirCheckpointIO()],
        callbacks=[checkpoints, AirResume()],
    )
    trainer.fit(model, datamodule=Files(train=f"s3://{BUCKET}/data", batch_size=8, num_workers=2))
    return model


def test_a_run_on_a_bucket_resumes_in_the_middle_of_its_epoch(bucket):
    """Three batches, a checkpoint in the bucket, and the other five: every file once."""
    first = fit(max_steps=3)
    found = find_latest_valid(f"s3://{BUCKET}/ckpt")
    assert found is not None
    assert found.endswith("step=3.ckpt")
    rest = fit(max_steps=8)
    assert len(first.seen) == 24
    assert sorted(first.seen + rest.seen) == list(range(64))
