"""Checkpoint a dataset of one's own that knows its position: ``state_dict``, ``load_state_dict``.

The position is that of the last sample given. It counts what was trained on as long as the training
process itself iterates: ``air_lightning.DataLoader(..., num_workers=0)``, whose own state comes to
the same. With workers ask the loader for the state, not the dataset: their copies are ahead.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import FEATURES, arguments, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import IterableDataset

from air_lightning import DataLoader, UCVolumeReader, UCVolumeWriter

SAMPLES_PER_SHARD = 12


class ResumableShardDataset(IterableDataset[torch.Tensor]):
    """Streams the samples of shards, and can tell and take its position."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = shards
        self._shard_idx = 0
        self._offset = 0  # samples of the shard that were given

    def state_dict(self) -> dict[str, Any]:
        return {"shard_idx": self._shard_idx, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shard_idx = state["shard_idx"]
        self._offset = state["offset"]

    def _read_shard(self, shard: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(shard)
        return torch.randn(SAMPLES_PER_SHARD, FEATURES, generator=generator)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self._shard_idx, len(self._shards)):
            self._shard_idx = index
            samples = self._read_shard(self._shards[index])
            # Asked once: the position that was loaded is that of this shard only.
            for number in range(self._offset, len(samples)):
                self._offset = number + 1
                yield samples[number]
            self._offset = 0


def main() -> None:
    args = arguments("Saves and restores the position of a dataset of one's own.")
    with ranks() as rank:
        model, optimizer = build()
        dataset = ResumableShardDataset(range(rank, 1000, dist.get_world_size()))
        loader = DataLoader(dataset, batch_size=5, num_workers=0)
        step = 0
        key = f"dataset.{rank}"  # of a key that several ranks save, DCP keeps one rank's value
        latest = newest(args.checkpoints)
        if latest is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": 0, key: dataset.state_dict()}
            dcp.load(state, storage_reader=UCVolumeReader(latest))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            step = state["step"]
            dataset.load_state_dict(state[key])
        for batch in loader:
            if step == args.steps:
                break
            train_step(model, optimizer, step, batch)
            step += 1
            if step % args.save_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step}
                state[key] = dataset.state_dict()
                writer = UCVolumeWriter(f"{args.checkpoints}/step_{step}")
                dcp.save(state, storage_writer=writer)
        finish(model)


if __name__ == "__main__":
    main()
