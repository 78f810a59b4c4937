"""Checkpoint the data pipeline by the shards that are done, for a stream of many samples per shard.

A checkpoint is taken at a shard's end only, so that none is done in part. What is left is what
every rank has not done: each takes its share of all shards, and notes its own under a key that
carries its rank, for of a key that several ranks save DCP keeps one arbitrary rank's value.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import FEATURES, arguments, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import IterableDataset

from air_lightning import UCVolumeReader, UCVolumeWriter

BATCHES_PER_SHARD = 5


def read_shard(shard: str) -> list[torch.Tensor]:
    """Stands for reading a file: the batches in it follow from its name."""
    generator = torch.Generator().manual_seed(int(shard.rpartition("-")[2]))
    return list(torch.randn(BATCHES_PER_SHARD, 4, FEATURES, generator=generator))


class ShardDataset(IterableDataset[tuple[str, torch.Tensor]]):
    def __init__(self, shards: Sequence[str]) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self.shards:
            for batch in read_shard(shard):
                yield shard, batch


def main() -> None:
    args = arguments("Notes which shards are done, and goes on with the others.")
    with ranks() as rank:
        model, optimizer = build()
        shards = args.steps // BATCHES_PER_SHARD
        all_shards = [f"shard-{number * dist.get_world_size() + rank}" for number in range(shards)]
        key = f"completed_shards.{rank}"
        completed: list[str] = []
        step = 0
        latest = newest(args.checkpoints)
        if latest is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": 0, key: []}
            dcp.load(state, storage_reader=UCVolumeReader(latest))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            step, completed = state["step"], list(state[key])
        remaining = [shard for shard in all_shards if shard not in completed]
        for number, (shard, batch) in enumerate(ShardDataset(remaining), start=1):
            train_step(model, optimizer, step, batch)
            step += 1
            if number % BATCHES_PER_SHARD == 0:
                completed.append(shard)
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step, key: completed}
                writer = UCVolumeWriter(f"{args.checkpoints}/step_{step}")
                dcp.save(state, storage_writer=writer)
        finish(model)


if __name__ == "__main__":
    main()
