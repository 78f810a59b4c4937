"""What the examples beside this file share: a small model, made-up batches, a process group.

Each of them shows one thing, in a loop of one's own in plain torch, and is started like this::

    .venv/bin/python examples/plain/<name>.py --checkpoints /Volumes/demo/digits/<name>
    .venv/bin/torchrun --nproc-per-node 2 examples/plain/<name>.py --checkpoints ...

Killed and started again, each goes on from its newest complete checkpoint, and prints the losses
and the sum of the weights that it would have printed without the kill.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from air_lightning import find_latest_valid

FEATURES = 8


def arguments(what: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--checkpoints", required=True, help="a volume path, URL or directory")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10, help="in steps")
    return parser.parse_args()


@contextlib.contextmanager
def ranks() -> Iterator[int]:
    """Joins the other ranks that torchrun started, or is the only one; gives this one's number."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    torch.set_num_threads(1)
    # Saves in the background need a back end for the CPU beside the one for the GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
    dist.init_process_group(backend=backend)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that all ranks train together, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))
    # A group of its own for the gradients: without GPUs they go through gloo, as saves in the
    # background do, and on one group the two would meet in another order on each rank.
    parallel = DistributedDataParallel(model, process_group=dist.new_group())
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.01)


def batch_of(step: int, rank: int) -> torch.Tensor:
    """The batch of one step, where the examples are not about data."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, FEATURES, generator=generator)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batch: torch.Tensor
) -> None:
    loss = (model(batch) - batch.sum(dim=1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {dist.get_rank()}  step {step}  loss {loss.item().hex()}", flush=True)


def newest(checkpoints: str) -> str | None:
    """The newest complete checkpoint: one rank looks, so that all go on from the same."""
    choice = [find_latest_valid(checkpoints) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice)
    if dist.get_rank() == 0:
        print(f"resumed from {choice[0]}" if choice[0] else "started fresh", flush=True)
    return choice[0]


def finish(model: nn.Module) -> None:
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}  weights {float(total).hex()}", flush=True)
