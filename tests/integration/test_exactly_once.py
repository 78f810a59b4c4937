"""Each file exactly once per epoch: over ranks, workers, epochs and interruptions."""

import contextlib
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
from air_lightning.errors import GridMismatchError, StateError
from ranks import KILLED, run_ranks

FILES = 75
VOLUME = "/Volumes/main/data/numbers"

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture
def volume(tmp_path, monkeypatch):
    """A volume of text files in folders, each holding its own number."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path / "mount"))
    root = tmp_path / "mount" / VOLUME.removeprefix("/Volumes/")
    for i in range(FILES):
        file = root / f"part{i % 3}" / f"{i:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(i))
    return root


def sample(path):
    """The file's number, and a draw that belongs to it."""
    return int(Path(path).read_text()), random.random()


def fresh_loader(num_workers, **options):
    """A loader as a new process would make it."""
    options = {"batch_size": 4, "collate_fn": list, **options}
    dataset = UCVolumeDataset(VOLUME, shuffle=True, seed=7).map(sample)
    return DataLoader(dataset, num_workers=num_workers, **options)


def numbers(batches):
    """How often each file was delivered."""
    return Counter(number for batch in batches for number, _ in batch)


EACH_ONCE = Counter(range(FILES))


# ---- ranks that are killed


def train(out, num_workers, epochs, die_after):
    """One rank of a run: saves every third batch, and is killed after ``die_after`` of them."""
    torch.distributed.init_process_group("gloo")
    saved = Path(out) / f"rank{torch.distributed.get_rank()}.json"
    record = json.loads(saved.read_text()) if saved.exists() else {"epochs": [[]]}
    loader = fresh_loader(num_workers)
    if "state" in record:
        loader.load_state_dict(record["state"])
    done = record["epochs"]
    torch.distributed.barrier()
    steps = 0
    while loader.epoch < epochs:
        for batch in loader:
            done[-1].append(batch)
            steps += 1
            if steps % 3 == 0:
                save(saved, loader, done)
            if steps == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
        done.append([])
    save(saved, loader, done)
    torch.distributed.destroy_process_group()


def save(path, loader, done):
    """Replace the checkpoint, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"state": loader.state_dict(), "epochs": done}))
    part.replace(path)


def batches_of(out):
    """Per rank and epoch, the batches of a run; an epoch's opening entry may be empty."""
    records = [json.loads(file.read_text()) for file in sorted(Path(out).glob("rank*.json"))]
    return [[epoch for epoch in record["epochs"] if epoch] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_ranks_killed_over_and_over_deliver_each_file_once(volume, tmp_path, num_workers):
    """Two ranks, three epochs, killed four times, twice in one epoch: the uninterrupted run's."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    log = tmp_path / "log"
    assert run_ranks(train, whole, num_workers, 3, None, world_size=2, log=log) == [0, 0], (
        log.read_text()
    )
    for die_after in (4, 4, 2, 8):
        statuses = run_ranks(train, cut, num_workers, 3, die_after, world_size=2, log=log)
        assert statuses == [KILLED, KILLED], log.read_text()
    assert run_ranks(train, cut, num_workers, 3, None, world_size=2, log=log) == [0, 0], (
        log.read_text()
    )
    assert flat(batches_of(cut)) == flat(batches_of(whole))
    for epoch in range(3):
        delivered = [batch for rank in batches_of(whole) for batch in rank[epoch]]
        assert numbers(delivered) == EACH_ONCE


def flat(ranks):
    """Per rank, all its batches in order."""
    return [[batch for epoch in rank for batch in epoch] for rank in ranks]


# ---- one rank


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"batch_size": None, "collate_fn": None}])
def test_each_file_once_per_epoch_in_an_order_of_its_own(volume, num_workers, options):
    """Every epoch delivers each file once, in as many batches as len() says, and reshuffled."""
    loader = fresh_loader(num_workers, **options)
    epochs = [list(loader) for _ in range(3)]
    if "batch_size" in options:
        epochs = [[[item] for item in epoch] for epoch in epochs]
    for epoch in epochs:
        assert len(epoch) == len(loader)
        assert numbers(epoch) == EACH_ONCE
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_place_to_stop_is_a_place_to_resume(volume, num_workers):
    """A state after any number of batches resumes with the batches and draws that came next."""
    loader = fresh_loader(num_workers)
    length = len(loader)
    states, batches = [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
    for stop in (0, 1, length // 2, length - 2, length - 1, length, length + 3):
        resumed = fresh_loader(num_workers)
        resumed.load_state_dict(states[stop])
        expected = batches[stop + 1 : 2 * length]
        seen = []
        while len(seen) < len(expected):
            seen += list(resumed)
        assert seen == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_touches_no_file_that_was_delivered(volume, num_workers):
    """After a resume, files of the delivered prefix are neither opened nor needed."""
    loader = fresh_loader(num_workers)
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(5)]
    state = loader.state_dict()
    resumed = fresh_loader(num_workers)
    resumed.load_state_dict(state)
    len(resumed)  # takes the list, of all files
    for number in numbers(seen):
        (volume / f"part{number % 3}" / f"{number:03}.txt").unlink()
    assert numbers(seen) + numbers(resumed) == EACH_ONCE


def test_consumed_not_prefetched(volume):
    """However much is prefetched, the state has the files of the batches that next() returned."""
    loader = fresh_loader(2, prefetch_factor=6)
    iterator = iter(loader)
    for k in range(1, 4):
        next(iterator)
        streams = loader.state_dict()["workers"].values()
        assert sum(stream["delivered"] for stream in streams) == 4 * k


def test_resuming_on_another_grid_names_both(volume):
    """A state of two workers is refused by a loader of three, which stays usable."""
    loader = fresh_loader(2)
    next(iter(loader))
    other = fresh_loader(3)
    with pytest.raises(GridMismatchError, match=r"(?s)num_workers=2.*num_workers=3"):
        other.load_state_dict(loader.state_dict())
    assert numbers(other) == EACH_ONCE


def test_a_changed_volume_is_refused_in_the_middle_of_an_epoch_only(volume):
    """Files added since: a mid-epoch state is refused, one at an epoch's start is taken."""
    loader = fresh_loader(2)
    next(iter(loader))
    middle = loader.state_dict()
    list(loader)
    start = loader.state_dict()
    (volume / "part0" / "999.txt").write_text("999")
    grown = fresh_loader(2)
    with pytest.raises(StateError, match=r"added|removed"):
        grown.load_state_dict(middle)
    grown.load_state_dict(start)
    assert grown.epoch == 1
    assert numbers(grown) == EACH_ONCE + Counter([999])


def test_a_state_whose_epochs_differ_is_refused(volume):
    """A state that names another epoch than its workers' states do is refused with both."""
    loader = fresh_loader(2)
    next(iter(loader))
    with pytest.raises(StateError, match=r"epoch=3.*epoch 0"):
        fresh_loader(2).load_state_dict({**loader.state_dict(), "epoch": 3})


class Wrapper(torch.utils.data.IterableDataset):
    """Decodes the paths of a dataset, and hands its state on; it knows nothing of epochs."""

    def __init__(self):
        self._paths = UCVolumeDataset(VOLUME, shuffle=True)

    def __iter__(self):
        return (int(Path(path).read_text()) for path in self._paths)

    def state_dict(self):
        return self._paths.state_dict()

    def load_state_dict(self, state_dict):
        self._paths.load_state_dict(state_dict)


@pytest.mark.parametrize(
    "options", [{"batch_size": 5}, {"batch_size": 8}, {"batch_size": 8, "drop_last": True}]
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_wrapper_that_only_hands_the_state_on_resumes_exactly(volume, num_workers, options):
    """Every state of two epochs of such a wrapper resumes with the batches that came next."""
    for extra in range(20, FILES):
        (volume / f"part{extra % 3}" / f"{extra:03}.txt").unlink()
    options = {"collate_fn": list, **options}

    def fresh():
        return DataLoader(Wrapper(), num_workers=num_workers, **options)

    loader = fresh()
    states, batches = [loader.state_dict()], []
    for _ in range(3):
        for batch in loader:
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
    if "drop_last" not in options:
        first = [i for batch in batches[: len(batches) // 3] for i in batch]
        assert sorted(first) == list(range(20))
    for done, state in enumerate(states[: len(states) * 2 // 3 + 1]):
        resumed = fresh()
        resumed.load_state_dict(state)
        seen = []
        while len(seen) < len(batches) - done:
            seen += list(resumed)
        assert seen == batches[done:], f"resumed after batch {done}"


def test_a_file_that_cannot_be_decoded_is_raised_and_the_run_can_go_on(volume):
    """A decode error reaches the training process, and the state is still the last batch's."""
    (volume / "part0" / "021.txt").write_text("not a number")
    loader = fresh_loader(1)
    state = loader.state_dict()
    with contextlib.suppress(ValueError):
        for _ in loader:
            state = loader.state_dict()
    assert loader.state_dict() == state
    (volume / "part0" / "021.txt").write_text("021")
