"""Train on tar files with many samples each, and resume exactly in the middle of one.

Copy ``Shards`` and change ``samples``: webdataset tars, record files and Parquet row groups go the
same way. What is resumable about it is its state: where the dataset of shards stood *before* the
shard that is being read, and how many samples of that one were taken. A resume opens this one shard
again, passes over what was taken, and goes on.

    .venv/bin/python examples/shards.py

It writes a few shards, reads two epochs of them without a break, reads them again while being
interrupted over and over, and compares: the same batches, random augmentation included.
"""

import argparse
import io
import json
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from air_lightning import DataLoader, UCVolumeDataset

Sample = tuple[str, torch.Tensor]


def samples(path: str, skip: int) -> Iterator[Sample]:
    """The samples of one shard; those that are skipped are passed over without being read."""
    with tarfile.open(path) as shard:
        for number, member in enumerate(shard):
            if number >= skip:
                data = shard.extractfile(member).read()  # type: ignore[union-attr]
                pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).float() / 255
                yield member.name, pixels + 0.1 * torch.randn(pixels.shape)  # augmentation


class Shards(IterableDataset[Sample]):
    """The samples of all shards of a volume, each (rank, worker) its own shards."""

    def __init__(self, shards: UCVolumeDataset) -> None:
        self.shards = shards
        self._before: dict[str, Any] | None = None  # the state of shards, before the current one
        self._taken = 0  # samples of the current shard
        self._skip = 0  # what a load left to be passed over

    def __iter__(self) -> Iterator[Sample]:
        skip, self._skip = self._skip, 0
        paths = iter(self.shards)
        while True:
            # Asked before the shard is: from then on, it counts as delivered.
            before = self.shards.state_dict()
            path = next(paths, None)
            if path is None:
                break
            for taken, sample in enumerate(samples(path, skip), skip + 1):
                self._before, self._taken = before, taken
                yield sample
            skip = 0
        self._before, self._taken = None, 0

    def state_dict(self) -> dict[str, Any]:
        shards = self._before or self.shards.state_dict()
        return {"epoch": shards["epoch"], "shards": shards, "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shards.load_state_dict(state_dict["shards"])
        self._before, self._taken = None, state_dict["taken"]
        self._skip = self._taken

    # What follows is handed on, so that the loader can say the epoch, mix the seed into the random
    # streams, and refuse to go on in the middle of an epoch when shards were added or removed.

    @property
    def epoch(self) -> int:
        return self.shards.epoch

    @property
    def seed(self) -> int:
        return self.shards.seed

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.shards.epoch:
            self._skip = 0  # a position in another epoch is given up
        self.shards.set_epoch(epoch)

    def file_list_state(self) -> dict[str, Any]:
        return self.shards.file_list_state()


def write_shards(folder: str, shards: int, samples_each: int) -> None:
    """Shards of random images; the last ones are a little longer, as real ones are."""
    os.makedirs(folder)
    for shard in range(shards):
        with tarfile.open(f"{folder}/shard-{shard:03}.tar", "w") as tar:
            for number in range(samples_each + shard % 3):
                member = tarfile.TarInfo(f"{shard:03}/{number:04}.gray")
                member.size = 64
                tar.addfile(member, io.BytesIO(os.urandom(member.size)))


def make_loader(path: str, workers: int) -> DataLoader[Any]:
    shards = UCVolumeDataset(path, pattern="*.tar", shuffle=True, seed=1)
    return DataLoader(Shards(shards), batch_size=8, num_workers=workers)


def record(batch: Any) -> tuple[tuple[str, ...], str]:
    """What a batch is made of: the names of its samples, and all its numbers, to the last bit."""
    names, pixels = batch
    return tuple(names), pixels.double().sum().item().hex()


def read(loader: DataLoader[Any], epochs: int, at_most: int) -> list[Any]:
    """So many batches, or those up to the end of the last epoch."""
    batches: list[Any] = []
    while loader.epoch < epochs and len(batches) < at_most:
        for batch in loader:
            batches.append(record(batch))
            if len(batches) == at_most:
                break
    return batches


def read_interrupted(path: str, workers: int, epochs: int, every: int) -> tuple[list[Any], int]:
    """The same, with a new loader every few batches that knows nothing but the saved state."""
    batches: list[Any] = []
    saved, interruptions, in_a_shard = None, 0, 0
    while True:
        loader = make_loader(path, workers)
        if saved is not None:
            loader.load_state_dict(json.loads(saved))
        if loader.epoch >= epochs:
            break
        batches += read(loader, epochs, every)
        saved = json.dumps(loader.state_dict())
        interruptions += 1
        in_a_shard += any(state["taken"] for state in json.loads(saved)["workers"].values())
    print(f"interrupted {interruptions} times, {in_a_shard} of them in the middle of a shard")
    return batches, in_a_shard


def main() -> int:
    parser = argparse.ArgumentParser(description="Resume exactly in the middle of a shard.")
    parser.add_argument("--shards", type=int, default=7)
    parser.add_argument("--samples", type=int, default=21, help="in a shard, at least")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=7, help="batches between interruptions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="air-shards-") as volumes:
        os.environ["AIR_VOLUMES_ROOT"] = volumes  # stands in for /Volumes
        write_shards(f"{volumes}/demo/shards/train", args.shards, args.samples)
        path = "/Volumes/demo/shards/train"
        whole = read(make_loader(path, args.workers), args.epochs, 10**9)
        parts, in_a_shard = read_interrupted(path, args.workers, args.epochs, args.every)
    seen = Counter(name for names, _ in parts for name in names)
    verdicts = {
        "every sample was seen once per epoch": set(seen.values()) == {args.epochs},
        "the batches are those of the undisturbed run, bit for bit": parts == whole,
        "some resumes were in the middle of a shard": in_a_shard > 0,
    }
    print(f"{len(seen)} samples in {args.shards} shards, {len(whole)} batches in all")
    for text, holds in verdicts.items():
        print(f"{'PASS' if holds else 'FAIL'}  {text}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
