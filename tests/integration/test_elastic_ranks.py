"""Real ranks that are killed, and started again on another grid in the same epoch."""

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from ranks import KILLED, run_ranks

FILES = 97
VOLUME = "/Volumes/main/default/data"

pytestmark = pytest.mark.timeout(500)


def sample(path):
    """The file's number, and a draw that belongs to it."""
    return int(Path(path).read_text()), random.random()


def train(out, world_size, num_workers, die_after):
    """One rank: goes on from the states of the run before, and is killed before its next batch."""
    rank = 0
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    saved = [json.loads(file.read_text()) for file in sorted(Path(out).glob("before/*.json"))]
    dataset = UCVolumeDataset(VOLUME, shuffle=True, seed=7).map(sample)
    loader = DataLoader(
        dataset, batch_size=3, num_workers=num_workers, collate_fn=list, elastic=True
    )
    if saved:
        loader.load_state_dict([record["state"] for record in saved])
    if world_size > 1:
        torch.distributed.barrier()  # else one that is killed early takes the others' start along
    batches = []
    for batch in loader:
        if len(batches) == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        batches.append(batch)
        record = {"state": loader.state_dict(), "batches": batches}
        part = Path(out) / f"{rank}.part"
        part.write_text(json.dumps(record))
        part.replace(Path(out) / f"now/{rank}.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "grids",
    [
        [(2, 2, 6), (1, 3, 5), (3, 1, 2), (2, 0, None)],
        [(1, 3, 4), (2, 1, 3), (2, 1, 4), (1, 2, None)],
    ],
)
def test_ranks_killed_and_started_on_other_grids_deliver_each_file_once(volume, tmp_path, grids):
    """(ranks, workers, batches until SIGKILL) in one epoch: each file once, no draw twice."""
    for i in range(FILES):
        volume.put(f"part{i % 3}/{i:03}.txt", f"{i:03}".encode())
    now, before, log = tmp_path / "now", tmp_path / "before", tmp_path / "log"
    now.mkdir()
    before.mkdir()
    delivered = []
    for world_size, workers, die_after in grids:
        statuses = run_ranks(
            train, tmp_path, world_size, workers, die_after, world_size=world_size, log=log
        )
        end = 0 if die_after is None else KILLED
        assert statuses == [end] * world_size, log.read_text()
        records = [json.loads(file.read_text()) for file in sorted(now.glob("*.json"))]
        assert len(records) == world_size
        delivered += [item for record in records for batch in record["batches"] for item in batch]
        for file in before.iterdir():
            file.unlink()
        for file in now.iterdir():
            file.rename(before / file.name)
    assert {record["state"]["epoch"] for record in records} == {1}
    assert Counter(number for number, _ in delivered) == Counter(range(FILES))
    assert len({draw for _, draw in delivered}) == FILES
