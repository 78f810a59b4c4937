"""Ranks that differ in files, order or length: told at once, and nobody waits for ever.

How long a rank waits for others is no limit here, so that no test depends on how soon they come: a
rank that waits in vain does so until the whole run is killed. Where one is to wait in vain, it
gives itself a moment for that.
"""

import json
import logging
import math
import os
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset
from training import Run, train

from air_lightning import AirDataModule, DataLoader, RankMismatchError, UCVolumeDataset
from air_lightning.data import agreement, board
from air_lightning.data.board import Board
from ranks import free_port, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILES = 12
MOMENT_S = 0.5


class Plain(IterableDataset):
    """A dataset of a user's own that holds one of ours."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        return iter(self.files)


class Ranks:
    """Runs a function of (rank, volume) on ranks; gives what each returned, or raised."""

    def __init__(self, volume, tmp_path: Path) -> None:
        self.volume, self._results = volume, tmp_path / "results"
        self._results.mkdir()

    def __call__(self, function, *, world_size: int = 2) -> list[Any]:
        assert run_ranks(self._rank, function, world_size=world_size) == [0] * world_size
        return [json.loads(path.read_text()) for path in sorted(self._results.iterdir())]

    def _rank(self, function) -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        try:
            result = function(rank, self.volume)
        except RankMismatchError as error:
            result = str(error)
        (self._results / str(rank)).write_text(json.dumps(result))
        # Rank 0 serves the store: it must not be gone while others look something up.
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks wait for each other as long as it takes."""
    monkeypatch.setattr(board, "WAIT_S", math.inf)


def wait_in_vain(action):
    """What an action gives that waits for others, who do not come, a moment long.

    Whatever waits for them once more does so for ever.
    """
    board.WAIT_S = MOMENT_S
    try:
        return action()
    finally:
        board.WAIT_S = math.inf


@pytest.fixture
def ranks(volume, tmp_path):
    volume.write(FILES)
    return Ranks(volume, tmp_path)


def loader_of(volume, *, num_workers: int = 1, batch_size: int = 2, **options) -> DataLoader:
    files = UCVolumeDataset(volume.path, **options)
    return DataLoader(files, num_workers=num_workers, batch_size=batch_size)


def trained_on(loader: DataLoader) -> DataLoader:
    """The loader as AirDataModule gives it to a training loop: all ranks iterate over it."""
    loader.equal_batches = True
    return loader


def in_turn(rank: int, action):
    """What an action gives: first on rank 0, then on the others."""
    if rank > 0:
        dist.barrier()
    given = action()
    if rank == 0:
        dist.barrier()
    return given


def test_ranks_that_agree_go_on_at_once(ranks):
    """Four equal ranks deliver each file once a pass, and nobody waits in vain."""

    def work(rank, volume):
        loader = loader_of(volume, shuffle=True, num_workers=0)
        return [[os.path.basename(path) for batch in loader for path in batch] for _ in range(3)]

    results = ranks(work, world_size=4)
    for number in range(3):
        delivered = [name for passes in results for name in passes[number]]
        assert sorted(delivered) == [f"{n:04}.txt" for n in range(FILES)]


def test_a_file_more_on_one_rank_is_an_error_on_all(ranks):
    """A file that came between two listings: both ranks name both counts and the remedy."""

    def work(rank, volume):
        loader = in_turn(rank, lambda: loader_of(volume))
        if rank == 0:
            volume.put("part0/new.txt", b"new")
        dist.barrier()
        return len(list(loader_of(volume) if rank == 1 else loader))

    for message in ranks(work):
        assert "files=12 on rank 0, 13 on rank 1" in message
        assert "pattern=" in message
        assert "/Volumes/main/default/data" in message
        assert "fingerprint" not in message


def test_a_replaced_file_is_an_error_on_all(ranks):
    """As many files, one under another name: the fingerprints differ."""

    def work(rank, volume):
        loader = loader_of(volume)
        dist.barrier()
        if rank == 0:
            (volume.directory / "part0/0000.txt").rename(volume.directory / "part0/9999.txt")
        dist.barrier()
        # The second one of this rank is listed anew.
        return len(list(loader if rank == 0 else loader_of(volume)))

    for message in ranks(work):
        assert "fingerprint=" in message
        assert "replaced" in message


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("seed", (0, 0, 7), "seed=0 on ranks 0-1, 7 on rank 2. Give all ranks the same seed="),
        ("shuffle", (True, False, True), "shuffle=True on ranks 0, 2, False on rank 1"),
        ("uneven", ("pad", "drop", "drop"), "uneven='pad' on rank 0, 'drop' on ranks 1-2"),
        ("num_workers", (1, 2, 2), "num_workers=1 on rank 0, 2 on ranks 1-2"),
    ],
)
def test_another_order_on_one_rank_is_an_error_on_all(ranks, option, values, message):
    """Any option that decides who reads which file when: named, with its value on each rank."""

    def work(rank, volume):
        return len(list(trained_on(loader_of(volume, **{option: values[rank]}))))

    for told in ranks(work, world_size=3):
        assert message in told


def test_what_a_users_own_dataset_wraps_is_compared(ranks):
    """The files below a plain dataset of the user's, which the loader knows nothing of, too."""

    def work(rank, volume):
        files = UCVolumeDataset(volume.path, shuffle=True, seed=rank)
        return len(list(trained_on(DataLoader(Plain(files), num_workers=0))))

    for told in ranks(work):
        assert "seed=0 on rank 0, 1 on rank 1" in told


def test_states_of_different_epochs_are_an_error_on_all(ranks):
    """Ranks that loaded states of different checkpoints are told, though they agreed before."""

    def work(rank, volume):
        loader = loader_of(volume, shuffle=True, num_workers=0)
        states = [loader.state_dict()]
        for _ in range(2):
            list(loader)
            states.append(loader.state_dict())
        loader.load_state_dict(states[rank])
        return len(list(loader))

    for told in ranks(work):
        assert "epoch=0 on rank 0, 1 on rank 1" in told
        assert "checkpoint" in told


def test_ranks_that_try_again_are_told_again(ranks):
    """Catching the error does not turn the check off: the next pass is refused, too."""

    def work(rank, volume):
        loader = trained_on(loader_of(volume, seed=rank))
        for _ in range(2):
            with pytest.raises(RankMismatchError, match="seed=0 on rank 0, 1 on rank 1"):
                list(loader)
        return loader.state_dict()["batches"]

    assert ranks(work) == [0, 0]


def test_uneven_batches_are_a_warning_for_a_loader(ranks):
    """Streams of other lengths, as for inference: a warning that names uneven="pad"."""

    def work(rank, volume):
        loader = loader_of(volume, pattern="000?.txt", batch_size=1, num_workers=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = len(list(loader)) + len(list(loader))
        return batches, [str(w.message) for w in caught if "batches" in str(w.message)]

    results = ranks(work, world_size=3)
    assert [batches for batches, _ in results] == [8, 8, 4]
    for _, told in results:
        assert len(told) == 1
        assert "4 on ranks 0-1, 2 on rank 2" in told[0]
        assert 'uneven="pad"' in told[0]


def test_uneven_batches_are_an_error_for_the_training_loader(ranks):
    """AirDataModule's train loader refuses to begin; its validation loader only warns."""

    def work(rank, volume):
        module = AirDataModule(
            volume.path, volume.path, pattern="000?.txt", num_workers=2, uneven="keep"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validated = len(list(module.val_dataloader()))
        assert validated == (4, 4, 2)[rank]
        return len(list(module.train_dataloader()))

    for told in ranks(work, world_size=3):
        assert "4 on ranks 0-1, 2 on rank 2" in told
        assert 'uneven="pad"' in told


def train_on_own_files(root: str, run: Run) -> None:
    """A Trainer run that sees a volume of its own for each rank."""
    os.environ["AIR_VOLUMES_ROOT"] = f"{root}/{os.environ['RANK']}"
    train(run)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainer_on_ranks_with_other_files_ends_with_the_error(tmp_path, num_workers):
    """Under DDP every rank ends with the error, before the first step, and none hangs."""
    for rank, files in enumerate((8, 9)):
        folder = tmp_path / str(rank) / "main/default/data"
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number:03}.txt").write_text(str(number))
    run = Run("/Volumes/main/default/data", str(tmp_path / "run"), 2, num_workers)
    log = tmp_path / "log"
    statuses = run_ranks(train_on_own_files, str(tmp_path), run, world_size=2, log=log)
    assert statuses == [1, 1]
    told = log.read_text()  # of both, whose lines may be mixed
    assert told.count("RankMismatchError: ") >= 2
    assert "files=8 on rank 0, 9 on rank 1" in told
    assert not list(Path(run.directory).glob("diary-*"))


def test_a_rank_alone_waits_once_and_goes_on(ranks):
    """Rank 0 iterating alone is delayed by ``WAIT_S`` before its first batch, and never again."""

    def work(rank, volume):
        waited = 0.0
        if rank == 0:
            loader = loader_of(volume, num_workers=0)
            began = time.monotonic()
            first = wait_in_vain(lambda: next(iter(loader)))
            waited = time.monotonic() - began
            assert len(first) == 2
            later = (loader, loader, loader_of(volume, num_workers=0))
            assert [sum(map(len, each)) for each in later] == [FILES // 2] * 3
        dist.barrier()
        return waited

    assert ranks(work)[0] >= MOMENT_S - 0.1  # the last look comes before the limit


def test_a_late_rank_is_compared_when_it_comes(ranks):
    """A rank that comes after the others gave up waiting gets the error, and so do they."""

    def work(rank, volume):
        loader = trained_on(loader_of(volume, num_workers=0, batch_size=1, seed=rank))
        iterator = iter(loader) if rank == 0 else None
        if iterator is not None:
            wait_in_vain(lambda: next(iterator))
        dist.barrier()
        iterator = iterator or iter(loader)
        dist.barrier()
        return len(list(iterator))

    for told in ranks(work):
        assert "seed=0 on rank 0, 1 on rank 1" in told


def test_a_process_group_made_anew_agrees_anew(ranks):
    """After destroy_process_group and another group, loaders agree, and differences are told."""
    another = str(free_port())

    def work(rank, volume):
        assert len(list(loader_of(volume))) == 3
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = another
        dist.init_process_group("gloo")
        assert len(list(loader_of(volume))) == 3
        return len(list(trained_on(loader_of(volume, seed=rank))))

    for told in ranks(work):
        assert "seed=0 on rank 0, 1 on rank 1" in told


def test_loaders_of_other_options_meet_nobody_and_a_warning_says_so(ranks):
    """Ranks that read with other seeds wait once, are told once, by a warning, and go on."""

    def work(rank, volume):
        loader = loader_of(volume, num_workers=0, batch_size=1, seed=rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            iterator = iter(loader)
            wait_in_vain(lambda: next(iterator))
            dist.barrier()  # both have a pass under way
            delivered = 1 + len(list(iterator)) + len(list(loader))
        return delivered, [str(w.message) for w in caught if "rank" in str(w.message)]

    for delivered, told in ranks(work):
        assert delivered == FILES
        assert len(told) == 1
        assert "seed=0 on rank 0, 1 on rank 1" in told[0]


@pytest.mark.parametrize("alike", [False, True])
def test_an_evaluation_on_one_rank_disturbs_no_training(ranks, alike):
    """Rank 0 evaluates alone, before and between passes of all ranks, and waits in vain once."""

    def work(rank, volume):
        def evaluate() -> int:
            return len(list(loader_of(volume, num_workers=0, shuffle=alike)))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(2):
                if rank == 0:
                    assert (wait_in_vain(evaluate) if number == 0 else evaluate()) == 3
                    assert evaluate() == 3
                dist.barrier()
                loader = loader_of(volume, num_workers=0, shuffle=True)
                assert [len(list(loader)) for _ in range(2)] == [3, 3]
                dist.barrier()

    assert ranks(work) == [None, None]


def test_files_that_differ_are_an_error_after_an_evaluation_on_one_rank(ranks):
    """What rank 0 did alone hides no difference of the loaders that all ranks iterate over."""

    def work(rank, volume):
        if rank == 0:
            wait_in_vain(lambda: list(loader_of(volume, num_workers=0)))
        loader = in_turn(rank, lambda: loader_of(volume, batch_size=1, num_workers=0))
        if rank == 0:
            volume.put("part0/new.txt", b"new")
        dist.barrier()
        loader = loader_of(volume, batch_size=1, num_workers=0) if rank == 1 else loader
        iterator = iter(loader)
        dist.barrier()
        return len(list(iterator))

    for told in ranks(work):
        assert "files=12 on rank 0, 13 on rank 1" in told


def test_a_rank_that_had_finished_its_epoch_resumes_beside_the_others(ranks):
    """A checkpoint that one rank made at its epoch's end is one moment; all files come once."""

    def work(rank, volume):
        volume.put("0.txt", b"0")
        dist.barrier()

        def make():
            files = UCVolumeDataset(volume.path)
            return DataLoader(files, num_workers=0, batch_size=1, collate_fn=list)

        loader = make()
        iterator = iter(loader)
        head = [next(iterator) for _ in range(6)]
        state = loader.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.epoch == rank
        rest = []
        while resumed.epoch < 2:
            rest += list(resumed)
        return len(head), len(rest)

    assert ranks(work) == [[6, 8], [6, 6]]


def test_a_store_that_fails_stops_nobody(caplog):
    """When the store is gone the pass goes on, unchecked, with a note at level DEBUG."""

    class Gone:
        def add(self, key, number):
            raise RuntimeError("the store is gone")

        def set(self, key, value):
            pass

    board = Board(Gone(), "key", 0, 2)
    with caplog.at_level(logging.DEBUG, logger="air_lightning"):
        agreed = agreement.Agreement(board, {}, 3, strict=True)
        assert not agreed.publish()
        agreed.check()
    assert "the store is gone" in caplog.text


def test_rank_0_raises_when_the_others_have_looked(monkeypatch):
    """Rank 0, with which the store ends, lets the others read it before it raises."""

    def published(rank):
        source = {"path": "p", "pattern": None, "files": 1, "fingerprint": rank}
        order = {"sources": [source], "num_workers": 0, "epoch": 0}
        agreed = agreement.Agreement(Board(store, "key", rank, 2), order, 3, strict=True)
        agreed.publish()
        return agreed

    def look(_seconds):
        with pytest.raises(RankMismatchError):
            other.check()
        looked.append(True)

    store, looked = dist.HashStore(), []
    first, other = published(0), published(1)
    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=look)
    monkeypatch.setattr(board, "time", clock)
    with pytest.raises(RankMismatchError):
        first.check()
    assert looked == [True]


def test_the_check_can_be_turned_off(ranks, monkeypatch):
    """With AIR_SKIP_AGREEMENT set, ranks read what they were given."""
    monkeypatch.setenv("AIR_SKIP_AGREEMENT", "1")
    assert ranks(lambda rank, volume: len(list(loader_of(volume, seed=rank)))) == [3, 3]
