"""The loader: defaults, lengths, epochs, states and random draws, with datasets made for it."""

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import pickle
import random
import resource
import select
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import data as fabric_data
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.pin_memory import pin_memory

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from air_lightning.data.outlive import outliving
from air_lightning.data.stream import Grid, current_grid
from air_lightning.data.worker import Delivered, Standing
from air_lightning.data.workers import StartInTurn
from air_lightning.errors import (
    EmptyVolumeError,
    GridMismatchError,
    InvalidArgumentError,
    NotCheckpointableError,
    StateError,
    WorkerDiedError,
)
from ranks import kill_worker, run_ranks, start_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(IterableDataset):
    """0 to n - 1, item i to slot i mod slots, with everything the loader can use."""

    def __init__(self, n: int, *, draws: bool = False, seed: int = 0) -> None:
        self.n, self.draws, self.seed = n, draws, seed
        self.epoch, self.delivered, self._skip = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def slice_length(self, grid: Grid) -> int:
        return len(range(grid.slot, self.n, grid.slots))

    def file_list_state(self) -> dict[str, Any]:
        return {"count": self.n, "fingerprint": f"{self.n:x}"}

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._skip = state_dict["delivered"]

    def __iter__(self) -> Iterator[Any]:
        grid = current_grid()
        self.delivered, self._skip = self._skip, 0
        for i in range(grid.slot + self.delivered * grid.slots, self.n, grid.slots):
            self.delivered += 1
            yield (i, *draw()) if self.draws else 1000 * self.epoch + i


def draw() -> tuple[float, float, float]:
    """One draw of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Shards(IterableDataset):
    """The resumable dataset of the training guide: no epochs, no length, no notion of workers."""

    def __init__(self, shards: list[list[int]]) -> None:
        self.shards, self.shard, self.offset = shards, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "offset": self.offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shard, self.offset = state_dict["shard"], state_dict["offset"]

    def __iter__(self) -> Iterator[int]:
        for i in range(self.shard, len(self.shards)):
            self.shard = i
            for j, item in enumerate(self.shards[i]):
                if j < self.offset:
                    continue
                self.offset = j + 1
                yield item
            self.offset = 0


class Plain(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def listed(items: list[Any]) -> list[Any]:
    """A collate function of the user's."""
    return list(items)


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    """A loader of lists of three, without workers unless asked."""
    options = {"batch_size": 3, "num_workers": 0, "collate_fn": listed, **options}
    return DataLoader(dataset, **options)


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next so many."""
    return [next(iterator) for _ in range(count)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives back."""
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


# ---- arguments


def test_default_number_of_workers_depends_on_whether_there_are_other_ranks(tmp_path):
    """-1 means 48 workers alone and 6 under torch.distributed; an explicit number wins."""
    assert DataLoader(Plain()).num_workers == 48
    assert DataLoader(Plain(), num_workers=3).num_workers == 3
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert DataLoader(Plain()).num_workers == 6
        assert DataLoader(Plain(), num_workers=0).num_workers == 0
    finally:
        torch.distributed.destroy_process_group()


def test_prefetch_and_persistence_follow_the_workers():
    """Without workers both are off, with workers four batches are prefetched and workers stay."""
    alone, served = DataLoader(Plain(), num_workers=0), DataLoader(Plain(), num_workers=2)
    assert (alone.prefetch_factor, alone.persistent_workers) == (None, False)
    assert (served.prefetch_factor, served.persistent_workers) == (4, True)
    insisting = DataLoader(Plain(), num_workers=2, persistent_workers=False, prefetch_factor=None)
    assert (insisting.prefetch_factor, insisting.persistent_workers) == (4, True)


def test_workers_are_forked_unless_something_else_is_asked_for():
    """No start method asked for means fork, and fork may be named as text or context."""
    for given_context in (None, "fork", multiprocessing.get_context("fork")):
        loader = DataLoader(Plain(), num_workers=1, multiprocessing_context=given_context)
        assert loader.multiprocessing_context.get_start_method() == "fork"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_are_refused(method):
    """A start method that is not fork is a ValueError, as text, as a context and process-wide."""
    for wish in (method, multiprocessing.get_context(method)):
        with pytest.raises(ValueError, match=f"(?s){method}.*forked") as caught:
            DataLoader(Plain(), num_workers=1, multiprocessing_context=wish)
        assert isinstance(caught.value, InvalidArgumentError)
    if method == multiprocessing.get_all_start_methods()[0]:
        return  # the platform's default (Python 3.14): set or not cannot be told apart
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        with pytest.raises(InvalidArgumentError, match=method):
            DataLoader(Plain(), num_workers=1)
        DataLoader(Plain(), num_workers=0)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -2}, "num_workers=-2"),
        ({"num_workers": 1.5}, "num_workers=1.5"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0"),
        ({"num_workers": 1, "prefetch_factor": "many"}, "prefetch_factor='many'"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "thread"),
        ({"num_workers": 0, "multiprocessing_context": "fork"}, "num_workers > 0"),
        ({"num_workers": 0, "batch_size": 0}, "batch_size"),
        ({"num_workers": 0, "batch_size": None, "drop_last": True}, "drop_last"),
        ({"num_workers": 0, "timeout": -1}, "timeout"),
        ({"num_workers": 0, "shuffle": True}, "shuffle"),
        ({"num_workers": 0, "sampler": [1, 2]}, "sampler"),
        ({"num_workers": 0, "batch_sampler": [[1], [2]]}, "batch_sampler"),
    ],
)
def test_bad_arguments_are_value_errors_that_name_them(options, message):
    """An argument out of range is a ValueError whose message has the argument and its value."""
    with pytest.raises(ValueError, match=message):
        DataLoader(Plain(), **options)


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True, 2**63])
def test_set_epoch_wants_a_count(epoch):
    """set_epoch refuses what is not a whole number from 0."""
    with pytest.raises(InvalidArgumentError, match="set_epoch"):
        loader_of(Numbers(3)).set_epoch(epoch)


def test_numpys_whole_numbers_are_whole_numbers():
    """num_workers, prefetch_factor and set_epoch take NumPy's integers."""
    loader = DataLoader(Numbers(3), num_workers=np.int64(1), prefetch_factor=np.int32(2))
    assert (loader.num_workers, loader.prefetch_factor) == (1, 2)
    loader.set_epoch(np.int64(4))
    assert type(loader.epoch) is int
    assert json.dumps(loader.state_dict())


# ---- a drop-in


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_datasets_give_what_torchs_loader_gives(workers):
    """Batches of a shuffled map-style dataset are those of torch's loader with the same seed."""
    data = TensorDataset(torch.arange(23))

    def batches(cls: Any) -> list[list[int]]:
        torch.manual_seed(5)
        stay = workers > 0
        options = {"shuffle": True, "num_workers": workers, "persistent_workers": stay}
        loader = cls(data, batch_size=4, **options)
        return [batch.tolist() for _ in range(2) for (batch,) in loader]

    assert batches(DataLoader) == batches(torch.utils.data.DataLoader)
    assert len(DataLoader(data, batch_size=4, num_workers=workers)) == 6


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": None}])
def test_plain_iterable_datasets_give_what_torchs_loader_gives(options):
    """An iterable dataset without a state gives torch's batches and has no length."""
    ours = DataLoader(Plain(), num_workers=0, **options)
    theirs = torch.utils.data.DataLoader(Plain(), **options)
    assert [torch.as_tensor(b).tolist() for b in ours] == [
        torch.as_tensor(b).tolist() for b in theirs
    ]
    with pytest.raises(TypeError):
        len(ours)


@pytest.mark.parametrize("dataset", [Plain(), TensorDataset(torch.arange(3))])
def test_no_state_of_a_dataset_that_has_none(dataset):
    """state_dict and load_state_dict raise a TypeError that names the dataset's class."""
    loader = DataLoader(dataset, num_workers=0)
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(TypeError, match=type(dataset).__name__) as caught:
            call()
        assert isinstance(caught.value, NotCheckpointableError)


def test_attributes_stay_the_users():
    """Iterating leaves dataset, collate_fn and worker_init_fn as they were given."""
    dataset = Numbers(9)
    loader = loader_of(dataset, num_workers=1, worker_init_fn=print)
    list(loader)
    assert loader.dataset is dataset
    assert loader.collate_fn is listed
    assert loader.worker_init_fn is print


def test_a_copy_and_a_loader_made_of_the_same_attributes_work():
    """A copy keeps the position and has its own workers; re-creating wraps nothing twice."""
    loader = loader_of(Numbers(12), num_workers=2)
    iterator = iter(loader)
    first = take(iterator, 2)
    twin = copy.copy(loader)
    assert twin.state_dict() == loader.state_dict()
    assert pickle.loads(pickle.dumps(loader)).state_dict() == loader.state_dict()
    assert first + list(iterator) == list(twin)
    again = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
    )
    assert [[i % 1000 for i in b] for b in again] == [[i % 1000 for i in b] for b in twin]


def test_lightning_re_creates_a_loader_without_workers_as_it_was():
    """Lightning's re-creation from attributes keeps num_workers=0, which is not our default."""
    loader = loader_of(Numbers(9))
    twin = fabric_data._update_dataloader(loader, sampler=None)
    assert isinstance(twin, DataLoader)
    assert (twin.num_workers, twin.batch_size, twin.collate_fn) == (0, 3, listed)
    assert list(twin) == list(loader)


def test_workers_end_with_the_loader():
    """Deleting loader and iterator ends the worker processes at once."""
    loader = loader_of(Numbers(30), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    process = loader._iterator._workers[0]
    gc.disable()
    try:
        del loader, iterator
        process.join(120)
        assert not process.is_alive()
    finally:
        gc.enable()


def test_workers_end_when_the_loader_is_garbage():
    """By what they are told, also where the collector finds loader and queues in one cycle."""
    gc.disable()
    try:
        cycle = [loader_of(Numbers(30), num_workers=2)]
        next(iter(cycle[0]))
        workers = cycle[0]._iterator._workers
        for worker in workers:
            worker.terminate = lambda: None  # what torch does after 5 s to those it cannot tell
        cycle.append(cycle)
        del cycle
        gc.collect()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()


def test_workers_live_through_epochs():
    """The same worker processes serve every epoch."""
    loader = loader_of(Pids(6), num_workers=2)
    assert len({pid for _ in range(3) for batch in loader for pid in batch}) == 2


class Pids(Numbers):
    def __iter__(self) -> Iterator[int]:
        return (os.getpid() for _ in super().__iter__())


class Stopping(Numbers):
    """A stream that stops before its fourth item, for as long as ``stops``, and tells that it does.

    A worker that is killed there has none of the locks of torch's queues and events, for which
    whoever ends or replaces the workers would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__(600)
        self.stops = True
        self._told, self._tell = os.pipe()

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__()):
            if self.stops and number == 3:
                os.write(self._tell, b"3")
                while True:
                    signal.pause()
            yield item

    def wait(self) -> None:
        """Wait until it has stopped."""
        os.read(self._told, 1)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._told)
        os.close(self._tell)


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    """Such a dataset."""
    dataset = Stopping()
    yield dataset
    dataset.close()


def test_a_killed_worker_is_torchs_error_and_the_next_pass_has_new_workers(stopping):
    """A worker that dies is an error that names it, and iter() forks anew."""
    loader = loader_of(stopping, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    stopping.wait()
    with pytest.raises(WorkerDiedError, match=r"pid \d+, signal 9"):
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
        list(iterator)
    stopping.stops = False
    assert sum(len(batch) for batch in loader) == 600


def kill_in_a_step(worker: Any) -> None:
    """Kill a worker, and be in no loader until the signal of its death comes."""
    os.kill(worker.pid, signal.SIGKILL)
    threading.Event().wait()


@pytest.fixture
def torchs_handler(monkeypatch):
    """Torch installs its handler of SIGCHLD once in a process's life, and tests share one."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("torchs_handler")
def test_a_worker_killed_during_a_step_is_told_in_our_words(stopping):
    """The error comes out of the step, where torch raises its own; the loader is fit for use."""
    loader = loader_of(stopping, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    stopping.wait()
    with pytest.raises(WorkerDiedError, match=r"epoch 0, after 1 batches: .*signal 9") as caught:
        kill_in_a_step(loader._iterator._workers[0])
    assert "is killed by signal" in str(caught.value.__cause__)
    stopping.stops = False
    assert sum(len(batch) for batch in loader) == 600
    loader._drop_pool()


@pytest.mark.usefixtures("torchs_handler")
def test_a_death_is_told_in_our_words_after_a_trainer_has_put_handlers_back(stopping):
    """Lightning takes away every handler that was installed during a fit; torch's comes once."""
    for _ in range(2):
        loader = loader_of(stopping, num_workers=1, prefetch_factor=1)
        iterator = iter(loader)
        next(iterator)
        stopping.wait()
        with pytest.raises(WorkerDiedError):
            kill_in_a_step(loader._iterator._workers[0])
        loader._drop_pool()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.mark.usefixtures("torchs_handler")
def test_a_worker_of_another_loader_is_torchs_to_tell(stopping):
    """A worker of torch's own loader that is killed is torch's error, as without ours."""
    ours = loader_of(Numbers(600), num_workers=1)
    iterators = [iter(ours), iter(TorchLoader(stopping, batch_size=4, num_workers=1))]
    next(iterators[0])
    stopping.wait()
    with pytest.raises(RuntimeError, match="is killed by signal") as caught:
        kill_in_a_step(iterators[1]._workers[0])
    assert not isinstance(caught.value, WorkerDiedError)
    ours._drop_pool()
    iterators[1]._shutdown_workers()


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_init_fn_is_chained_and_sees_the_users_dataset(workers):
    """The user's worker_init_fn runs in each worker, with the user's dataset in its info."""

    def init(worker: int) -> None:
        get_worker_info().dataset.n += 100

    loader = loader_of(Numbers(4), num_workers=workers, worker_init_fn=init, batch_size=1)
    assert sum(1 for _ in iter(loader)) == (104 if workers else 4)


def test_pinning_keeps_the_standing():
    """Torch's pinning thread pins the batch and hands on where its stream stands."""

    class Batch:
        pinned = False

        def pin_memory(self) -> "Batch":
            pinned = Batch()
            pinned.pinned = True
            return pinned

    delivered = pin_memory(Delivered(Batch(), 3, Standing(7, {"delivered": 7})))
    assert isinstance(delivered, Delivered)
    assert (delivered.batch.pinned, delivered.worker) == (True, 3)
    assert delivered.standing == Standing(7, {"delivered": 7})


def test_an_old_iterator_says_that_its_pass_is_over():
    """next() on the iterator of an earlier pass raises instead of taking batches of the new one."""
    loader = loader_of(Numbers(9))
    old = iter(loader)
    iter(loader)
    with pytest.raises(RuntimeError, match="one pass at a time"):
        next(old)


def test_an_iterator_can_be_copied_at_the_price_of_being_empty():
    """A deep copy of a container with a live iterator works, and its iterator is at its end."""
    iterator = iter(loader_of(Numbers(9), num_workers=1))
    assert list(copy.deepcopy({"it": iterator})["it"]) == []
    assert len(list(iterator)) == 3


# ---- length


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 40),
    workers=st.integers(0, 4),
    batch_size=st.one_of(st.none(), st.integers(1, 7)),
    drop=st.booleans(),
)
def test_length_is_the_sum_over_workers(n, workers, batch_size, drop):
    """len() is the sum over workers of what each delivers, computed without a worker."""
    drop = drop and batch_size is not None
    loader = DataLoader(Numbers(n), batch_size=batch_size, drop_last=drop, num_workers=workers)
    expected = 0
    for w in range(max(1, workers)):
        mine = len(range(w, n, max(1, workers)))
        size = batch_size or 1
        expected += mine // size if drop else -(-mine // size)
    assert len(loader) == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_is_what_comes_and_nothing_warns(drop_last):
    """As many batches come as len() said, with workers of unequal shares, and no warning."""
    loader = loader_of(Numbers(17), num_workers=3, drop_last=drop_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message=".* multi-threaded")  # a library's thread, a fork
        assert len(list(loader)) == len(loader)
        iterator = iter(loader)
        take(iterator, 2)
        loader.load_state_dict(loader.state_dict())
        assert len(list(loader)) == len(loader) - 2


# ---- epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_pass_is_followed_by_the_next_epoch(workers):
    """Each finished pass moves on, whether StopIteration was pulled or only len() batches."""
    loader = loader_of(Numbers(12), num_workers=workers)
    epochs = [{i // 1000 for batch in loader for i in batch} for _ in range(2)]
    for _ in range(2):
        batches = take(iter(loader), len(loader))
        epochs.append({i // 1000 for batch in batches for i in batch})
    assert epochs == [{0}, {1}, {2}, {3}]
    assert loader.epoch == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_pass_is_followed_by_the_same_epoch(workers):
    """iter() after a break begins the epoch again, from its first batch."""
    loader = loader_of(Numbers(12), num_workers=workers)
    first = take(iter(loader), 2)
    assert list(loader)[:2] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_decides_the_next_pass(workers):
    """set_epoch on the loader, or on the dataset, names the epoch of the next pass."""
    loader = loader_of(Numbers(4), num_workers=workers)
    loader.set_epoch(7)
    assert loader.epoch == 7
    assert {i // 1000 for batch in loader for i in batch} == {7}
    assert {i // 1000 for batch in loader for i in batch} == {8}
    loader.dataset.set_epoch(3)
    assert {i // 1000 for batch in loader for i in batch} == {3}
    assert {i // 1000 for batch in loader for i in batch} == {4}


def test_the_state_says_which_epoch_was_asked_for():
    """After set_epoch, the state is that epoch's start, unless the pass before goes on."""
    loader = loader_of(Numbers(12))
    loader.set_epoch(5)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (5, 0)
    resumed = loader_of(Numbers(12))
    resumed.load_state_dict(state)
    assert list(resumed) == list(loader)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(9)
    assert loader.state_dict()["epoch"] == 9
    next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (6, 2)
    list(iterator)
    assert loader.state_dict()["epoch"] == 9


# ---- state


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    batch_size=st.one_of(st.none(), st.integers(1, 6)),
    drop=st.booleans(),
    cuts=st.lists(st.integers(0, 9), max_size=5),
)
def test_any_interruptions_change_nothing(n, batch_size, drop, cuts):
    """However often a run is cut and resumed, its batches and draws are the uninterrupted run's."""
    drop = drop and batch_size is not None
    options = {"batch_size": batch_size, "drop_last": drop}

    def fresh() -> DataLoader[Any]:
        return loader_of(Numbers(n, draws=True), **options)

    endless = stream_of(fresh())
    if len(fresh()) == 0:
        return
    whole = take(endless, sum(cuts) + 3)
    state, seen = None, []
    for cut in [*cuts, 3]:
        loader = fresh()
        if state is not None:
            loader.load_state_dict(state)
        seen += take(stream_of(loader), cut)
        state = through_json(loader.state_dict())
    assert seen == whole


def stream_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches of epoch after epoch."""
    while True:
        yield from loader


@pytest.mark.parametrize("cuts", [(1, 4), (5, 6), (3, 8), (7, 7), (2, 9)])
@pytest.mark.parametrize("batch_size", [2, None])
def test_resuming_with_workers_twice_in_an_epoch_goes_on_in_the_same_order(cuts, batch_size):
    """Order, items and draws after two resumes are the uninterrupted run's, into epoch two."""

    def fresh() -> DataLoader[Any]:
        return loader_of(Numbers(19, draws=True), num_workers=3, batch_size=batch_size)

    total = 2 * len(fresh()) + 4
    whole = take(stream_of(fresh()), total)
    state, seen = None, []
    for count in (*cuts, total - sum(cuts)):
        loader = fresh()
        if state is not None:
            loader.load_state_dict(state)
        seen += take(stream_of(loader), count)
        state = through_json(loader.state_dict())
    assert seen == whole


def test_state_counts_what_next_returned_not_what_was_prefetched():
    """With many batches prefetched, the state after k batches has exactly their items."""
    loader = loader_of(Numbers(200), num_workers=2, prefetch_factor=8)
    iterator = iter(loader)
    for k in range(1, 6):
        next(iterator)
        state = loader.state_dict()
        assert state["batches"] == k
        assert sum(worker["delivered"] for worker in state["workers"].values()) == 3 * k


def test_state_can_be_asked_as_of_batches_ago():
    """state_dict(batches_ago=n) is the state that was true n batches earlier, eight at most."""
    loader = loader_of(Numbers(60))
    iterator = iter(loader)
    states = [loader.state_dict()]
    for _ in range(10):
        next(iterator)
        states.append(loader.state_dict())
    for ago in range(9):
        assert loader.state_dict(batches_ago=ago) == states[-1 - ago]
    for wrong in (9, -1, "1"):
        with pytest.raises(InvalidArgumentError, match="batches_ago"):
            loader.state_dict(batches_ago=wrong)


def test_the_state_outlives_the_iterator():
    """The state is the loader's: it is the same after the iterator is gone."""
    loader = loader_of(Numbers(30), num_workers=1)
    iterator = iter(loader)
    take(iterator, 3)
    state = loader.state_dict()
    del iterator
    gc.collect()
    assert loader.state_dict() == state


@pytest.mark.parametrize("workers", [0, 2])
def test_until_the_first_batch_the_state_is_the_loaded_one(workers):
    """Before next(), also after iter() twice, the state equals what was loaded."""
    source = loader_of(Numbers(30), num_workers=workers)
    iterator = iter(source)
    take(iterator, 3)
    state = {**source.state_dict(), "written_by": "someone"}
    rest = list(iterator)
    loader = loader_of(Numbers(30), num_workers=workers)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    iter(loader)
    assert loader.state_dict() == state
    assert list(loader) == rest


@pytest.mark.parametrize("pull_stop", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_at_the_end_of_an_epoch_begins_the_next_with_every_item(workers, pull_stop):
    """After the last batch the state is the next epoch's start, StopIteration pulled or not."""
    loader = loader_of(Numbers(12), num_workers=workers)
    iterator = iter(loader)
    take(iterator, len(loader))
    if pull_stop:
        assert next(iterator, None) is None
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["workers"]) == (1, 0, {})
    resumed = loader_of(Numbers(12), num_workers=workers)
    resumed.load_state_dict(state)
    assert sorted(i for batch in resumed for i in batch) == [1000 + i for i in range(12)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_without_length_or_epochs_never_gives_an_empty_epoch(workers):
    """The guide's ResumableShardDataset: a state after the last batch begins a full epoch."""
    shards = [[0, 1, 2], [3, 4, 5]]
    loader = loader_of(Shards(shards), num_workers=workers)
    assert [list(loader) for _ in range(2)] == [[[0, 1, 2], [3, 4, 5]]] * 2
    iterator = iter(loader)
    take(iterator, 1)
    middle = loader.state_dict()
    take(iterator, 1)
    end = loader.state_dict()
    for state, expected in ((middle, [[3, 4, 5]]), (end, [[0, 1, 2], [3, 4, 5]])):
        resumed = loader_of(Shards(shards), num_workers=workers)
        resumed.load_state_dict(through_json(state))
        assert list(resumed) == expected
        assert list(resumed) == [[0, 1, 2], [3, 4, 5]]


class Counting(Shards):
    """Counts its epochs itself, shuffles by them, and cannot be told the epoch."""

    def __init__(self, n: int) -> None:
        super().__init__([])
        self.n, self._epoch, self._given = n, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self._given = state_dict["epoch"], state_dict["given"]

    def __iter__(self) -> Iterator[int]:
        grid = current_grid()
        order = random.Random(self._epoch).sample(range(self.n), self.n)
        mine = order[grid.slot :: grid.slots]
        for i in mine[self._given :]:
            self._given += 1
            yield 1000 * self._epoch + i
        self._epoch, self._given = self._epoch + 1, 0


def uneven_shards() -> Shards:
    """Four shards of seven, as no batch of three divides them."""
    return Shards([[100 * shard + i for i in range(7)] for shard in range(4)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fresh", "drop_last"),
    # Not the shards with drop_last: they have no epochs, so no state of theirs can tell that only
    # a rest is left that will be dropped.
    [
        (uneven_shards, False),
        *((lambda n=n: Counting(n), drop_last) for n in (12, 14) for drop_last in (False, True)),
    ],
)
def test_every_state_of_every_kind_of_dataset_resumes_with_the_next_batch(
    fresh, workers, drop_last
):
    """A state after any batch of three epochs resumes with the batches that came after it."""
    options = {"num_workers": workers, "batch_size": 3, "drop_last": drop_last}
    loader = loader_of(fresh(), **options)
    states, batches = [loader.state_dict()], []
    for _ in range(3):
        for batch in loader:
            batches.append(batch)
            states.append(through_json(loader.state_dict()))
    for done, state in enumerate(states[:-1]):
        resumed = loader_of(fresh(), **options)
        resumed.load_state_dict(state)
        seen: list[Any] = []
        while len(seen) < len(batches) - done:
            seen += list(resumed)
        assert seen == batches[done:], f"resumed after batch {done}"


@pytest.mark.parametrize("workers", [1, 2])
def test_new_workers_of_a_dataset_that_counts_epochs_itself_learn_the_epoch(workers):
    """When a worker was killed, the next pass's new workers go on with the epoch that is due."""
    loader = loader_of(Counting(20), num_workers=workers, prefetch_factor=1)  # see kill_worker
    list(loader)
    kill_worker(loader._iterator._workers[0])
    assert sorted(i for batch in loader for i in batch) == list(range(1000, 1020))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_partial_last_batch_ends_the_epoch_of_a_dataset_without_length(workers):
    """The state after a last batch that fell short is the next epoch's start, nothing repeated."""
    loader = loader_of(uneven_shards(), num_workers=workers)
    state = None
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["workers"]) == (1, 0, {})


def test_loading_into_a_loader_in_use_replaces_its_workers():
    """load_state_dict in the middle of a pass goes back to the state, with new workers."""
    loader = loader_of(Numbers(60), num_workers=2)
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    expected = take(iterator, 3)
    old = {worker.pid for worker in loader._iterator._workers}
    loader.load_state_dict(state)
    assert take(iter(loader), 3) == expected
    assert old.isdisjoint(worker.pid for worker in loader._iterator._workers)


def test_set_epoch_after_a_load_keeps_the_position_of_that_epoch_only():
    """set_epoch to the loaded epoch goes on in the middle, to another begins that one."""
    loader = loader_of(Numbers(12))
    take(iter(loader), 2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert len(list(loader)) == 2
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert sorted(i for batch in loader for i in batch) == [1000 + i for i in range(12)]


def test_another_batch_size_warns_and_goes_on_with_the_files_left():
    """A state of batches of 3 goes on in batches of 4, each item left once, and then epoch 1."""
    source = loader_of(Numbers(20), num_workers=2)
    seen = [i for batch in take(iter(source), 3) for i in batch]
    loader = loader_of(Numbers(20), num_workers=2, batch_size=4)
    with pytest.warns(UserWarning, match=r"batch_size=3.*batch_size=4"):
        loader.load_state_dict(source.state_dict())
    assert sorted(seen + [i for batch in loader for i in batch]) == list(range(20))
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, StateError, "version 2"),
        ({"version": None}, StateError, "version None"),
        ({"world_size": 4}, GridMismatchError, r"(?s)world_size=4.*world_size=1"),
        ({"num_workers": 5}, GridMismatchError, r"(?s)num_workers=5.*num_workers=0"),
        ({"rank": 1}, StateError, "rank 1"),
        ({"files": {"count": 31, "fingerprint": "x"}}, StateError, "31 files then, 30 now"),
        ({"epoch": -1}, StateError, "-1"),
        ({"batches": "3"}, StateError, "malformed"),
        ({"next_worker": 1}, StateError, "malformed"),
        ({"workers": {"1": {}}}, StateError, "malformed"),
        ({"workers": None}, StateError, "malformed"),
        ({"items": {}}, StateError, "malformed"),
        ({"batches": 10**6}, StateError, "batches=1000000.*are 6"),
        ({"batches": 0}, StateError, "batches=0.*are 6"),
        ({"workers": {}}, StateError, "batches=2.*are 0"),
        ({"batches": 0, "items": {"0": 0}}, StateError, "no item"),
        ({"files": 5}, StateError, "files=5"),
        ({"epoch": 2**63}, StateError, "malformed"),
        ({"ended": 3}, StateError, "malformed"),
        ({"ended": [1]}, StateError, "malformed"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, error, message):
    """Unknown version, other grid, other rank, other files, nonsense: named, nothing changed."""
    loader = loader_of(Numbers(30))
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    with pytest.raises(error, match=message):
        loader.load_state_dict({**state, **change})
    assert loader.state_dict() == state
    assert len(list(iterator)) == 8


@pytest.mark.parametrize("state", [None, [], "state", {}])
def test_what_is_no_state_is_refused(state):
    """Something that never was a loader's state is a ValueError."""
    with pytest.raises(StateError):
        loader_of(Numbers(3)).load_state_dict(state)


def test_version_is_checked_before_the_grid():
    """A state of an unknown version is refused for that, whatever else is wrong with it."""
    with pytest.raises(StateError, match="version 9") as caught:
        loader_of(Numbers(3)).load_state_dict({"version": 9, "world_size": 99})
    assert not isinstance(caught.value, GridMismatchError)


def test_a_state_at_an_epochs_start_takes_a_changed_list():
    """Files added between epochs are fine: the state at an epoch's start loads."""
    loader = loader_of(Numbers(6))
    list(loader)
    grown = loader_of(Numbers(9))
    grown.load_state_dict(loader.state_dict())
    assert sorted(i for batch in grown for i in batch) == [1000 + i for i in range(9)]


class Broken(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if item == 7:
                raise OSError("item 7 is broken")
            yield item


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_is_raised_and_does_not_end_the_epoch(workers):
    """After an error the state is that of the last batch consumed, in the same epoch."""
    loader = loader_of(Broken(12), num_workers=workers)
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    with pytest.raises(OSError, match="item 7"):
        next(iterator)
    assert list(iterator) == []
    assert loader.state_dict() == state
    assert loader.epoch == 0


# ---- random streams


def draws_of(loader: DataLoader[Any]) -> list[tuple[float, ...]]:
    """The draws of one epoch, item by item."""
    return [item[1:] for batch in loader for item in batch]


def test_streams_differ_by_epoch_worker_and_seed(monkeypatch):
    """No two items of any epoch, worker, seed or global seed have the same draws."""
    draws = []
    for seed, pl_seed in ((0, None), (1, None), (0, "5")):
        if pl_seed is None:
            monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        else:
            monkeypatch.setenv("PL_GLOBAL_SEED", pl_seed)
        loader = loader_of(Numbers(12, draws=True, seed=seed), num_workers=2)
        draws += draws_of(loader) + draws_of(loader)
    assert len(set(draws)) == len(draws) == 6 * 12


def test_iterating_leaves_the_training_processs_generators_alone():
    """Without workers and with, iterating draws nothing from the process's own generators."""
    for workers in (0, 1):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        before = draw()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        draws = draws_of(loader_of(Numbers(6, draws=True), num_workers=workers))
        assert draw() == before
        assert draws == draws_of(loader_of(Numbers(6, draws=True), num_workers=workers))


def test_a_given_generator_draws_the_base_seed():
    """A generator given by the user is drawn from, as torch's loader does."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    list(loader_of(Numbers(3), generator=generator))
    assert not torch.equal(generator.get_state(), before)


def test_lightnings_worker_seeding_can_be_set_on_the_loader(monkeypatch):
    """The worker_init_fn that Lightning's seed_everything sets is taken, and resume stays exact."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    def fresh() -> DataLoader[Any]:
        loader = loader_of(Numbers(12, draws=True), num_workers=2)
        fabric_data._auto_add_worker_init_fn(loader, rank=0)
        assert loader.worker_init_fn is not None
        return loader

    whole = list(fresh())
    cut = fresh()
    take(iter(cut), 2)
    resumed = fresh()
    resumed.load_state_dict(cut.state_dict())
    assert list(resumed) == whole[2:]


def test_drop_last_that_leaves_nothing_is_refused(volume):
    """Workers with fewer files than a batch would train nothing, in silence."""
    volume.write(7)
    loader = DataLoader(UCVolumeDataset(volume.path), batch_size=4, num_workers=3, drop_last=True)
    with pytest.raises(EmptyVolumeError, match=r"7 files.*num_workers=3, and batch_size=4"):
        iter(loader)
    loader = DataLoader(UCVolumeDataset(volume.path), batch_size=4, num_workers=1, drop_last=True)
    assert len(list(loader)) == 1


def test_an_abandoned_pass_in_batches_of_another_size_is_begun_again():
    """More batches than the length of this size were consumed; the epoch is not over for that."""
    first = loader_of(Numbers(24), batch_size=1)
    iterator = iter(first)
    for _ in range(10):
        next(iterator)
    loader = loader_of(Numbers(24), batch_size=4)
    with pytest.warns(UserWarning, match="batch_size=1"):
        loader.load_state_dict(first.state_dict())
    next(iter(loader))
    assert next(iter(loader)) == [0, 1, 2, 3]
    assert loader.epoch == 0


def test_the_worker_whose_batch_is_needed_first_starts_first():
    """After a resume too, when that may be the last of many: a fork takes its time."""
    whole = [batch.tolist() for batch in DataLoader(Numbers(24), batch_size=2, num_workers=3)]
    loader = DataLoader(Numbers(24), batch_size=2, num_workers=3)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    assert state["next_worker"] == 2
    resumed = DataLoader(Numbers(24), batch_size=2, num_workers=3)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == whole[5:]
    zero, one, two = (worker.pid for worker in resumed._iterator._workers)
    most = int(Path("/proc/sys/kernel/pid_max").read_text())  # after which they begin again
    assert 0 < (zero - two) % most < (one - two) % most < most // 2


def test_a_worker_that_holds_still_outlives_the_signal_that_its_job_gets():
    """The training process ends its step first; a worker that died in its start would fail it."""
    memory = multiprocessing.get_context("fork")
    holds, go_on = memory.Event(), memory.Event()

    def hold() -> None:
        holds.set()
        go_on.wait(120)

    context = StartInTurn(2, 0, hold)
    workers = [context.Process(target=print, args=("started",)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert holds.wait(120)
    os.kill(workers[1].pid, signal.SIGTERM)
    go_on.set()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


def test_workers_that_were_started_end_when_others_cannot_be():
    """Wherever in the start a limit is met: nobody would ask them, nor wait for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, here = set(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))
    loader = loader_of(Numbers(9), num_workers=3)
    failed = 0
    for limit in range(here + 8, here + 400, 2):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            iter(loader)
        except OSError:
            failed += 1
            assert set(multiprocessing.active_children()) <= before
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed
    assert [item for batch in loader for item in batch] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_every_worker_outlives_the_signal_from_its_first_moment():
    """The first one, too, which does not hold still: until its init it has no thread for it."""
    context = StartInTurn(2, 0, lambda: None)
    workers = [context.Process(target=_exit_by_mask) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


def _exit_by_mask() -> None:
    os._exit(signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_a_worker_whose_process_was_killed_while_it_held_still_ends(tmp_path):
    """It has another parent by the time that it begins to look for its own."""
    reader, writer = os.pipe()  # as long as a worker lives it has the other end
    (killed,) = start_ranks(_start_and_die, tmp_path, world_size=1)
    os.close(writer)
    os.waitpid(killed, 0)
    try:
        assert (tmp_path / "holds").exists()
        assert select.select([reader], [], [], 100)[0]
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(killed, signal.SIGKILL)


def _start_and_die(directory: Path) -> None:
    parent = os.getpid()

    def hold() -> None:
        (directory / "holds").touch()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.001)

    context = StartInTurn(2, 0, hold)
    target = outliving(lambda _: time.sleep(600))
    workers = [context.Process(target=target, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(600)


def test_a_worker_without_a_thread_for_it_ends_by_the_signal():
    """Where no thread is to be had it would else be blocked, and whoever ends workers wait."""
    assert run_ranks(_fail_to_outlive) == [-signal.SIGTERM]


def _fail_to_outlive() -> None:
    threading.stack_size(1 << 46)
    with pytest.raises(RuntimeError, match="start new thread"):
        outliving(print)(0)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_that_their_process_ends_or_leaves_remove_their_sockets(tmp_path, number):
    """A script that ends with its loader in use terminates them; a killed one does not even."""
    (pid,) = start_ranks(_leave_workers, tmp_path, number, world_size=1)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 100
    while list(tmp_path.glob("pymp-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "there-were").exists()


def _leave_workers(directory: Path, number: int) -> None:
    tempfile.tempdir = str(directory)
    vars(multiprocessing.current_process())["_config"].pop("tempdir", None)  # the test process's
    loader = loader_of(Large(8), num_workers=2)
    take(iter(loader), 2)  # of each worker: one that dies while it makes its own may leave it
    assert list(directory.glob("pymp-*"))
    (directory / "there-were").touch()
    if number == signal.SIGKILL:
        os.kill(os.getpid(), number)
    for worker in loader._iterator._workers:  # as multiprocessing does at the exit
        worker.terminate()
        worker.join()


class Large(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((1000,), number) for number in super().__iter__())
