"""A training loop in plain torch that resumes exactly: no Lightning, every step in sight.

    .venv/bin/torchrun --nproc-per-node 2 examples/plain_torch.py \\
        --data /Volumes/demo/digits/images/train

or, as a single process, ``.venv/bin/python examples/plain_torch.py --data ...``. The two count the
ranks differently, so each needs ``--checkpoints`` of its own.

The same command, started again after a kill, goes on from the newest complete checkpoint. Three
things make that exact, beside weights and optimizer:

* The loader's state says which files were consumed. It differs by rank, and so do the random
  generators, so both are saved under keys that carry the rank: of a key that several ranks save,
  DCP keeps one arbitrary rank's value.
* They are saved as one text and one byte string: DCP would take nested dicts apart and drop the
  empty ones.
* The generators are restored last, after everything that might draw from them.
"""

import argparse
import io
import json
import os
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from PIL import Image
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from air_lightning import (
    DataLoader,
    UCVolumeDataset,
    UCVolumeReader,
    UCVolumeWriter,
    capture_rng_state,
    find_latest_valid,
    restore_rng_state,
)


def decode(path: str) -> tuple[torch.Tensor, int]:
    """Reads one image with noise, and its class: the name of the folder it lies in."""
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return pixels + 0.05 * torch.randn(8, 8), int(os.path.basename(os.path.dirname(path)))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)
    )


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


class Training:
    """Model, optimizer, loader and progress of one rank, and how they are saved and restored."""

    def __init__(self, data: str, checkpoints: str) -> None:
        self.rank = dist.get_rank()
        self.checkpoints = checkpoints
        self.model = DistributedDataParallel(build_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        files = UCVolumeDataset(data, shuffle=True, seed=1, uneven="pad")
        self.loader = DataLoader(files.map(decode), batch_size=16, num_workers=2)
        # Saves need a group of their own: in the background their collectives would meet those of
        # the training in another order on each rank, and both would wait for ever.
        self.save_group = dist.new_group(backend="gloo")
        self.step = 0
        self.saving: Future[Any] | None = None

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "progress": json.dumps({"step": self.step}),
            f"loader.{self.rank}": json.dumps(self.loader.state_dict()),
            f"rng.{self.rank}": pack(capture_rng_state()),
        }

    def save(self) -> None:
        """Starts a save; the files are written while the training goes on."""
        self.finish_save()
        writer = UCVolumeWriter(
            f"{self.checkpoints}/step_{self.step}", global_step=self.step, epoch=self.loader.epoch
        )
        self.saving = dcp.async_save(
            self.state(), storage_writer=writer, process_group=self.save_group
        )

    def finish_save(self) -> None:
        """Waits for the save in flight, and raises its error if it failed."""
        if self.saving is not None:
            self.saving.result()

    def resume(self) -> str | None:
        """Restores the newest complete checkpoint, if there is one, and gives its path."""
        # One rank looks and tells the others: they must not choose differently.
        choice = [find_latest_valid(self.checkpoints) if self.rank == 0 else None]
        dist.broadcast_object_list(choice)
        if choice[0] is None:
            return None
        state = self.state()
        dcp.load(state, storage_reader=UCVolumeReader(choice[0]))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = json.loads(state["progress"])["step"]
        self.loader.load_state_dict(json.loads(state[f"loader.{self.rank}"]))
        restore_rng_state(unpack(state[f"rng.{self.rank}"]))
        return choice[0]

    def train_step(self, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        loss = functional.cross_entropy(self.model(pixels), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def run(self, epochs: int, save_every: int) -> None:
        while (epoch := self.loader.epoch) < epochs:
            for pixels, labels in self.loader:
                loss = self.train_step(pixels, labels)
                if self.rank == 0:
                    print(f"step {self.step}  epoch {epoch}  loss {loss.hex()}", flush=True)
                if self.step % save_every == 0:
                    self.save()
        self.finish_save()


def run_alone_without_torchrun() -> None:
    """Makes this process the only rank, unless a launcher said which one it is."""
    if "RANK" not in os.environ:
        # Port 0: any that is free. Nobody else has to find it.
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain torch loop that resumes exactly.")
    parser.add_argument("--data", default="/Volumes/demo/digits/images/train")
    parser.add_argument("--checkpoints", default="/Volumes/demo/digits/plain_torch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=10, help="in steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_alone_without_torchrun()
    dist.init_process_group(backend="gloo")  # with GPUs: "cpu:gloo,cuda:nccl"
    try:
        torch.manual_seed(1 + dist.get_rank())
        training = Training(args.data, args.checkpoints)
        resumed = training.resume()
        if training.rank == 0:
            print(f"resumed from {resumed}" if resumed else "started fresh", flush=True)
        training.run(args.epochs, args.save_every)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
