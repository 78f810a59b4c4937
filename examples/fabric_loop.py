"""A Fabric loop that saves in the background and, killed whenever, goes on exactly.

    python examples/fabric_loop.py                                  one rank
    python examples/fabric_loop.py --devices 2 --strategy ddp       two
    python examples/fabric_loop.py --devices 2 --strategy fsdp2     two, with sharded weights

Start it again with the same --work, and with more epochs, and it goes on from its last checkpoint.
It makes its own data: small files in a directory that stands in for ``/Volumes``.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from air_lightning import AirCheckpointIO, DataLoader, UCVolumeDataset, prune_checkpoints

DATA = "/Volumes/demo/numbers/train"
CHECKPOINTS = "/Volumes/demo/numbers/checkpoints"
FILES = 96


def make_data(root: str) -> None:
    """Writes numbered files, for the rank that comes first; all of them write the same."""
    directory = Path(f"{root}/demo/numbers/train")
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        path = directory / f"{number:03d}.txt"
        if not path.exists():
            path.with_suffix(f".{os.getpid()}").write_text(str(number))
            os.replace(path.with_suffix(f".{os.getpid()}"), path)


def decode(path: str) -> torch.Tensor:
    """One sample: the file's number, with noise."""
    return float(Path(path).read_text()) / FILES + 0.1 * torch.randn(4)


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2: each rank holds a part of each weight."""
    return fully_shard(module, mesh=mesh["data_parallel"])


def make_fabric(strategy: str, devices: int) -> Fabric:
    """Fabric with one of the strategies that run on a CPU."""
    chosen: Any = strategy
    if strategy == "fsdp2":
        chosen = ModelParallelStrategy(shard, data_parallel_size=devices, tensor_parallel_size=1)
    return Fabric(accelerator="cpu", devices=devices, strategy=chosen)


def train(fabric: Fabric, plugin: AirCheckpointIO, epochs: int, save_every: int) -> None:
    fabric.seed_everything(1, workers=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    files = UCVolumeDataset(DATA, pattern="*.txt", shuffle=True, seed=1, uneven="pad")
    loader = DataLoader(files.map(decode), batch_size=4, num_workers=2)
    batches = fabric.setup_dataloaders(loader)

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": batches,
        "step": 0,
    }
    resumed = plugin.resume(CHECKPOINTS, state)
    fabric.print(f"resumed from {resumed}" if resumed else "started fresh", flush=True)
    while (epoch := loader.epoch) < epochs:
        for batch in batches:
            loss = (model(batch) - batch).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            fabric.print(
                f"step {state['step']}  epoch {epoch}  loss {loss.item().hex()}", flush=True
            )
            if state["step"] % save_every == 0:
                fabric.save(f"{CHECKPOINTS}/step={state['step']}", state)
                if fabric.is_global_zero:  # when this save is published, and not before
                    plugin.after_published(lambda: prune_checkpoints(CHECKPOINTS, keep_last=2))
    plugin.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A Fabric loop that resumes exactly.")
    parser.add_argument("--work", help="keeps data and checkpoints; by default a temporary one")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "fsdp2"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=10, help="in steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Where Fabric starts further ranks, they find the directory of the first.
    work = args.work or os.environ.get("AIR_VOLUMES_ROOT") or tempfile.mkdtemp(prefix="air_fabric_")
    os.environ["AIR_VOLUMES_ROOT"] = work
    make_data(work)
    fabric = make_fabric(args.strategy, args.devices)
    plugin = AirCheckpointIO().attach(fabric)
    fabric.launch()
    train(fabric, plugin, args.epochs, args.save_every)


if __name__ == "__main__":
    main()
