"""Loaders that go on where loaders of another grid left off, over real files."""

import copy
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import data as fabric_data
from torch.utils.data import IterableDataset

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from air_lightning.errors import GridMismatchError, StateError
from inprocess import rank_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = (1, 2, 5, 13, 24, 41, 60)
State = dict[str, Any]
Batches = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of files for each count, each file holding its own number, and one cache."""
    root = tmp_path_factory.mktemp("elastic")
    for count in COUNTS:
        for i in range(count):
            file = root / str(count) / f"part{i % 3}" / f"{i:03}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{i:03}")
    return root


def sample(path: str) -> tuple[int, float]:
    """The file's number, and a draw that belongs to it."""
    return int(Path(path).read_text()), random.random()


class Run:
    """What a training run is made with, whatever the grid."""

    def __init__(self, folders: Path, count: int = 24, batch_size: int = 3, **options: Any) -> None:
        self.url = f"file://{folders}/{count}"
        self.cache = folders / "cache"
        self.batch_size = batch_size
        self.drop_last = options.pop("drop_last", False)
        self.options = {"shuffle": True, "seed": 5, **options}

    def loader(self, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
        """A loader as a new process would make it."""
        dataset = UCVolumeDataset(self.url, cache_dir=self.cache, **self.options).map(sample)
        options = {"batch_size": self.batch_size, "elastic": True, **options}
        options = {"collate_fn": list, "drop_last": self.drop_last, **options}
        return DataLoader(dataset, num_workers=num_workers, **options)

    def go_on(
        self, grid: tuple[int, int], states: list[State], batches: list[int | None]
    ) -> tuple[list[State], list[tuple[int, Batches]]]:
        """Every rank of a grid consumes so many batches of one epoch; None for all.

        A rank that is an epoch ahead waits for the others.

        Returns:
            The states of all ranks, and each rank's epoch and batches.
        """
        saved, consumed = [], []
        epoch = min((state["epoch"] for state in states), default=0)
        for rank, wanted in enumerate(batches):
            with rank_of(rank, grid[0]):
                loader = self.loader(grid[1])
                if states:
                    loader.load_state_dict(shuffled(states))
                left = len(loader) - loader.state_dict()["batches"]
                assert 0 <= left <= len(loader)
                if loader.epoch > epoch:
                    mine = []
                elif wanted is None:
                    mine = list(loader)
                    assert len(mine) == left
                else:
                    mine = take(loader, min(wanted, left))
                saved.append(through_json(loader.state_dict()))
                consumed.append((epoch, mine))
        return saved, consumed


def take(loader: DataLoader[Any], count: int) -> Batches:
    """The next so many batches; a pass that is not begun draws nothing."""
    iterator = iter(loader) if count else iter(())
    return [next(iterator) for _ in range(count)]


def through_json(state: State) -> State:
    """What a checkpoint gives back."""
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def shuffled(states: list[State]) -> list[State]:
    """The states in another order."""
    return states[1:] + states[:1]


def numbers(batches: Batches) -> Counter[int]:
    """How often each file was delivered."""
    return Counter(number for batch in batches for number, _ in batch)


grids = st.tuples(st.integers(1, 5), st.just(0))


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    count=st.sampled_from(COUNTS),
    batch_size=st.integers(1, 5),
    uneven=st.sampled_from(["keep", "pad", "drop"]),
    stays=st.lists(grids, max_size=3),
    last=grids,
)
def test_any_sequence_of_grids_delivers_each_file_once(
    folders, data, count, batch_size, uneven, stays, last
):
    """Ranks killed wherever each stood, over up to four grids: each file once in the epoch."""
    if uneven == "drop":
        assume(count >= max(world_size for world_size, _ in [*stays, last]))
    run = Run(folders, count, batch_size, uneven=uneven)
    states: list[State] = []
    consumed: list[tuple[int, Batches]] = []
    ended_on = last[0]
    for grid in stays:
        kills = [data.draw(st.integers(0, count // batch_size)) for _ in range(grid[0])]
        states, more = run.go_on(grid, states, kills)
        consumed += more
        if all(state["epoch"] == 1 for state in states):
            ended_on = grid[0]
            break
    else:
        states, more = run.go_on(last, states, [None] * last[0])
        consumed += more
    assert {(state["epoch"], state["batches"], str(state["before"])) for state in states} == {
        (1, 0, "[]")
    }
    batches = [batch for epoch, mine in consumed for batch in mine if epoch == 0]
    seen = numbers(batches)
    assert len(seen) == count or (uneven == "drop" and count - len(seen) < ended_on)
    if uneven != "pad":
        assert seen.total() == len(seen)
    draws = [draw for batch in batches for _, draw in batch]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("drop_last", [False, True])
def test_worker_processes_share_out_what_is_left(folders, drop_last):
    """2 x 2, 1 x 3, 3 x 1 and 2 x 0 ranks and workers in one epoch; then a whole epoch."""
    run = Run(folders, 41, 4, drop_last=drop_last)
    states, first = run.go_on((2, 2), [], [3, 3])
    states, second = run.go_on((1, 3), states, [1])
    states, third = run.go_on((3, 1), states, [1, 0, 0])
    states, fourth = run.go_on((2, 0), states, [None, None])
    batches = [batch for _, mine in first + second + third + fourth for batch in mine]
    seen = numbers(batches)
    assert seen.total() == len(seen) == (40 if drop_last else 41)
    _, fifth = run.go_on((2, 0), states, [None, None])
    assert {epoch for epoch, _ in fifth} == {1}
    whole = numbers([batch for _, mine in fifth for batch in mine])
    assert whole.total() == len(whole) == (40 if drop_last else 41)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_on_the_new_grid_is_exact(folders, workers):
    """Once shared out, every state of the epoch resumes with the batches and draws that came."""
    run = Run(folders, 60, 4)
    states, _ = run.go_on((3, 1), [], [2, 1, 3])
    with rank_of(1, 2):
        loader = run.loader(workers)
        loader.load_state_dict(states)
        before = [through_json(loader.state_dict())]
        batches = []
        for batch in loader:
            batches.append(batch)
            before.append(through_json(loader.state_dict()))
        assert len(batches) == len(loader) - before[0]["batches"]
        for done in (0, 1, 2, len(batches) - 1):
            resumed = run.loader(workers, elastic=False)
            resumed.load_state_dict(before[done])
            assert len(resumed) == len(loader)
            assert list(resumed) == batches[done:]
            assert resumed.epoch == 1
        assert before[-1]["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_pass_begins_the_epoch_anew_with_every_file(folders, workers):
    """As on one grid: iter() in the middle of a pass goes back to the epoch's start."""
    run = Run(folders)
    states, _ = run.go_on((2, 0), [], [2, 2])
    loader = run.loader(workers)
    loader.load_state_dict(states)
    take(loader, 1)
    assert numbers(list(loader)) == Counter(range(24))
    assert numbers(list(loader)) == Counter(range(24))
    assert loader.epoch == 2


def test_set_epoch_keeps_what_is_left_of_that_epoch_only(folders):
    """After a load, set_epoch to the same epoch changes nothing, to another one gives it whole."""
    run = Run(folders)
    states, consumed = run.go_on((2, 0), [], [2, 2])
    done = sum((numbers(mine) for _, mine in consumed), Counter())
    loader = run.loader()
    loader.load_state_dict(states)
    loader.set_epoch(0)
    assert done + numbers(list(loader)) == Counter(range(24))
    loader.load_state_dict(states)
    loader.set_epoch(3)
    assert numbers(list(loader)) == Counter(range(24))


def test_the_position_before_the_first_batch_can_be_saved_and_moved_again(folders):
    """Three changes of grid without a batch in between leave the files and the record as is."""
    run = Run(folders)
    states, consumed = run.go_on((2, 0), [], [2, 1])
    moved = states
    for grid in ((3, 0), (1, 2), (2, 1)):
        moved, nothing = run.go_on(grid, moved, [0] * grid[0])
        assert not any(mine for _, mine in nothing)
        assert len(moved[0]["before"]) == 1
    _, rest = run.go_on((1, 0), moved, [None])
    batches = [batch for _, mine in consumed + rest for batch in mine]
    assert numbers(batches) == Counter(range(24))


def test_the_state_of_batches_ago_is_of_the_new_grid_too(folders):
    """A loop that fetches ahead after a change of grids saves the position of its step."""
    run = Run(folders)
    states, _ = run.go_on((2, 0), [], [2, 2])
    loader = run.loader()
    loader.load_state_dict(states)
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    ahead = next(iterator)
    assert loader.state_dict(batches_ago=1) == state
    resumed = run.loader()
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == ahead


def test_another_batch_size_is_counted_in_batches_of_the_new_one(folders):
    """Half the ranks with twice the batch size: a warning, and as many batches as are left."""
    run = Run(folders)
    states, consumed = run.go_on((2, 0), [], [2, 2])
    loader = run.loader(batch_size=6)
    with pytest.warns(UserWarning, match="batch_size=3.*batch_size=6"):
        loader.load_state_dict(states)
    assert (len(loader), loader.state_dict()["batches"]) == (4, 2)
    done = sum((numbers(mine) for _, mine in consumed), Counter())
    assert done + numbers(list(loader)) == Counter(range(24))


def test_a_rank_that_had_ended_the_epoch_leaves_nothing(folders):
    """One rank at the next epoch's start, one in the middle: what the second did not consume."""
    run = Run(folders, 13, 2)
    states, consumed = run.go_on((2, 0), [], [None, 1])
    assert [state["epoch"] for state in states] == [1, 0]
    states, rest = run.go_on((3, 0), states, [None] * 3)
    batches = [batch for _, mine in consumed + rest for batch in mine]
    assert numbers(batches) == Counter(range(13))


def test_a_rank_for_which_nothing_is_left_has_an_empty_pass(folders):
    """Fewer files left than ranks: those without deliver none, and are in step at the next."""
    run = Run(folders, 13, 4)
    states, consumed = run.go_on((1, 0), [], [3])
    for rank, left in enumerate((1, 0, 0)):
        with rank_of(rank, 3):
            loader = run.loader()
            loader.load_state_dict(states)
            assert (loader.epoch, len(loader) - loader.state_dict()["batches"]) == (0, left)
            mine = list(loader)
            assert len(mine) == left
            consumed.append((0, mine))
            assert loader.epoch == 1
    assert numbers([batch for _, mine in consumed for batch in mine]) == Counter(range(13))


@pytest.mark.parametrize(("drop_last", "uneven"), [(True, "keep"), (False, "drop")])
def test_nothing_left_for_any_rank_is_the_next_epochs_start(folders, drop_last, uneven):
    """What is left is less than a batch, or a file, for each: every rank begins the next epoch."""
    run = Run(folders, 13, 3, drop_last=drop_last, uneven=uneven)
    states, _ = run.go_on((1, 0), [], [4 if uneven == "drop" else 3])
    for rank in range(2):
        with rank_of(rank, 2):
            loader = run.loader()
            loader.load_state_dict(states)
            assert (loader.epoch, loader.state_dict()["batches"]) == (1, 0)


def test_cutting_what_is_left_may_leave_nothing(folders):
    """A resume with uneven="drop" of one file for three streams is an empty pass, no error."""
    run, dropping = Run(folders, 13, 4), Run(folders, 13, 4, uneven="drop")
    states, _ = run.go_on((1, 0), [], [3])
    states, _ = run.go_on((3, 0), states, [0, 0, 0])
    with rank_of(0, 3):
        loader = dropping.loader()
        loader.load_state_dict(states[0])
        assert list(loader) == []
        assert loader.epoch == 1


def test_a_little_less_than_an_epoch_is_still_the_middle_of_it(folders):
    """As many batches are left as an epoch has: list and order are pinned all the same."""
    states, consumed = Run(folders, 24, 3).go_on((2, 0), [], [1, 0])
    run = Run(folders, 24, 5)
    loader = run.loader()
    with pytest.warns(UserWarning, match="batch_size"):
        loader.load_state_dict(states)
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["batches"], len(loader)) == (0, 0, 5)
    for options in ({"count": 41}, {"seed": 6}):
        with pytest.raises(StateError, match="middle of epoch 0"):
            Run(folders, batch_size=5, **options).loader().load_state_dict(state)
    _, rest = run.go_on((2, 1), [state], [None, None])
    batches = [batch for _, mine in consumed + rest for batch in mine]
    assert numbers(batches) == Counter(range(24))


def test_the_record_of_other_grids_is_kept_once_for_all_workers(folders):
    """A rank's state has it at the top, and not again in the state of each of its workers."""
    run = Run(folders, 60)
    states, _ = run.go_on((2, 0), [], [2, 2])
    (state,), _ = run.go_on((1, 3), states, [3])
    assert len(state["before"]) == 1
    assert len(state["workers"]) == 3
    assert not any("before" in stream for stream in state["workers"].values())


@pytest.mark.parametrize("grid", [(1, 0), (3, 0), (1, 2)])
def test_at_an_epochs_end_any_grid_begins_the_next(folders, grid):
    """States after the last batch go on at the next epoch, with every file, on every grid."""
    run = Run(folders)
    states, _ = run.go_on((2, 1), [], [None, None])
    _, consumed = run.go_on(grid, states, [None] * grid[0])
    assert {epoch for epoch, _ in consumed} == {1}
    assert numbers([batch for _, mine in consumed for batch in mine]) == Counter(range(24))


def test_on_the_same_grid_the_states_of_all_ranks_give_each_its_own(folders):
    """A list of all ranks' states resumes each rank exactly, elastic or not."""
    run = Run(folders)
    states, _ = run.go_on((2, 0), [], [1, 3])
    for rank, batches in enumerate((1, 3)):
        with rank_of(rank, 2):
            whole = list(run.loader())
            resumed = run.loader(elastic=False)
            resumed.load_state_dict(shuffled(states))
            assert list(resumed) == whole[batches:]


def test_the_state_of_one_rank_is_complete(folders):
    """A single dict of a run of one rank is enough for any grid."""
    run = Run(folders)
    states, consumed = run.go_on((1, 2), [], [3])
    for rank in range(2):
        with rank_of(rank, 2):
            loader = run.loader()
            loader.load_state_dict(states[0])
            consumed.append((0, list(loader)))
    assert numbers([batch for _, mine in consumed for batch in mine]) == Counter(range(24))


def test_a_bad_file_is_replaced_after_a_change_of_grids(folders, tmp_path):
    """on_error="skip" keeps the number of items, counts, and takes a file of what is left."""
    for i in range(24):
        (tmp_path / "24").mkdir(exist_ok=True)
        (tmp_path / "24" / f"{i:03}.txt").write_text(f"{i:03}")
    run = Run(tmp_path, on_error="skip")
    states, consumed = run.go_on((2, 0), [], [2, 2])
    done = sum((numbers(mine) for _, mine in consumed), Counter())
    bad = min(set(range(24)) - set(done))
    (tmp_path / "24" / f"{bad:03}.txt").write_text("bad")
    loader = run.loader()
    loader.load_state_dict(states)
    seen = numbers(list(loader))
    assert loader.dataset.skipped == 1
    assert seen.total() == 12
    assert set(seen) == set(range(24)) - set(done) - {bad}


# ---- what is refused


def two_ranks(folders: Path, **options: Any) -> list[State]:
    """The states of two ranks in the middle of an epoch."""
    return Run(folders, **options).go_on((2, 0), [], [2, 1])[0]


def test_another_grid_is_refused_unless_asked_for(folders):
    """Without elastic=True both grids are named, and the way out."""
    loader = Run(folders).loader(elastic=False)
    for given_states in (two_ranks(folders), two_ranks(folders)[0]):
        with pytest.raises(
            GridMismatchError, match=r"(?s)world_size=2, .*world_size=1, .*elastic=True"
        ):
            loader.load_state_dict(given_states)
    assert numbers(list(loader)) == Counter(range(24))


def test_one_rank_of_several_is_not_enough(folders):
    """A single dict of two ranks' run is refused, with what to pass instead."""
    with pytest.raises(GridMismatchError, match="all 2 ranks, as a list"):
        Run(folders).loader().load_state_dict(two_ranks(folders)[0])


def many(workers: int, files: int) -> list[Any]:
    """The record of one rank's grid, of so many workers that delivered so many files each."""
    return [{"world_size": 1, "num_workers": workers, "delivered": [[1, [[workers, files]]]]}]


def altered(states: list[State], rank: int, **change: Any) -> list[State]:
    """The states, with that of one rank changed."""
    return [{**s, **(change if s["rank"] == rank else {})} for s in states]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda states: [], r"ranks \[\].*missing: \[0\]"),
        (lambda states: states[:1], r"ranks \[0\].*all 2 ranks.*missing: \[1\]"),
        (lambda states: [states[0]] * 2, r"ranks \[0, 0\].*missing: \[1\]"),
        (lambda states: altered(states, 1, world_size=3), r"grids.*\(2, 0\) and \(3, 0\)"),
        (lambda states: altered(states, 1, files={"count": 3}), "file lists"),
        (lambda states: altered(states, 1, version=2), "version 2"),
        (lambda states: altered(states, 1, world_size="2"), "world_size='2'"),
        (lambda states: altered(states, 1, epoch=4, workers={}, items={}), "batches=1"),
        (
            lambda states: altered(states, 1, epoch=2, batches=0, workers={}, items={}),
            "rank 1 was in epoch 2.*rank 0 in epoch 0",
        ),
        (
            lambda states: altered(
                states,
                1,
                before=[{"world_size": 1, "num_workers": 1, "delivered": [[1, [[1, 2]]]]}],
            ),
            "rank 1 was in epoch 0, after 1 other grids.*after 0",
        ),
        (lambda states: altered(states, 0, before=[5]), "malformed record"),
        (lambda states: [5, *states], "A int was given"),
        (lambda states: [states[0], {**states[1], "rank": [1]}], r"rank=\[1\]"),
        (lambda states: altered(states, 1, order=[1]), r"order=\[1\]"),
        (lambda states: altered(states, 1, batches=2**63), "malformed"),
        (lambda states: altered(states, 1, items={"0": 2**63}), "malformed"),
        (lambda states: [{**s, "num_workers": 10**30} for s in states], "num_workers=10{30}"),
        (lambda states: [{**s, "world_size": 10**30} for s in states], "world_size=10{30}"),
        (lambda states: altered(states, 1, before=many(2, 2**63)), "malformed record"),
        (lambda states: altered(states, 1, before=many(10**30, 1)), "malformed record"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(folders, change, said):
    """Ranks that are missing, doubled, of another grid, list or moment: named; nothing changes."""
    loader = Run(folders).loader()
    with pytest.raises(StateError, match=f"(?s){said}"):
        loader.load_state_dict(change(two_ranks(folders)))
    assert numbers(list(loader)) == Counter(range(24))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 6}, "'seed': 5.*'seed': 6"),
        ({"shuffle": False}, "'shuffle': True.*'shuffle': False"),
        ({"count": 41}, "24 files then, 41 now"),
    ],
)
def test_another_order_or_list_is_refused(folders, options, said):
    """What is left is meant in the order of the checkpoint: another seed or list is refused."""
    with pytest.raises(StateError, match=said):
        Run(folders, **options).loader().load_state_dict(two_ranks(folders))


def test_what_pads_or_cuts_may_not_change_on_the_same_grid(folders):
    """Streams that go on are as long as they were: another uneven= is refused at once."""
    state = Run(folders).go_on((1, 0), [], [2])[0]
    with pytest.raises(StateError, match="'uneven': 'keep'.*'uneven': 'pad'"):
        Run(folders, uneven="pad").loader().load_state_dict(state)


def test_what_pads_or_cuts_may_change_with_the_grid(folders):
    """One rank with "keep" goes on from two with "pad": AirDataModule's defaults."""
    run, alone = Run(folders, 13, uneven="pad"), Run(folders, 13)
    states, consumed = run.go_on((2, 0), [], [2, 1])
    _, rest = alone.go_on((1, 0), states, [None])
    assert numbers([b for _, mine in consumed + rest for b in mine]) == Counter(range(13))


class Numbers(IterableDataset):
    """A user's own dataset, which knows nothing of other grids."""

    def __init__(self) -> None:
        self.delivered = 0

    def state_dict(self) -> State:
        return {"delivered": self.delivered}

    def load_state_dict(self, state_dict: State) -> None:
        self.delivered = state_dict["delivered"]

    def __iter__(self) -> Iterator[int]:
        while self.delivered < 9:
            self.delivered += 1
            yield self.delivered


def test_datasets_that_cannot_share_out_say_so(folders):
    """A dataset without redistribute() is refused another grid, and an epoch of several."""
    loader = DataLoader(Numbers(), num_workers=0, elastic=True)
    take(loader, 2)
    state = {**loader.state_dict(), "num_workers": 1}
    with pytest.raises(GridMismatchError, match=r"redistribute\(\)"):
        loader.load_state_dict(state)
    states, _ = Run(folders).go_on((1, 0), two_ranks(folders), [1])
    with pytest.raises(StateError, match=r"redistribute\(\)"):
        loader.load_state_dict(states[0])


# ---- the argument, and the dataset alone


def test_elastic_survives_copies_and_lightnings_re_creation(folders):
    """A copy, a pickle and a loader that Lightning makes of the attributes are elastic, too."""
    plain = DataLoader(Numbers(), num_workers=0)
    assert fabric_data._update_dataloader(plain, sampler=None).elastic is False
    loader = DataLoader(Numbers(), num_workers=0, elastic=True)
    for twin in (
        copy.copy(loader),
        pickle.loads(pickle.dumps(loader)),
        fabric_data._update_dataloader(loader, sampler=None),
    ):
        assert twin.elastic is True


def test_a_datasets_own_state_tells_of_the_grids_before(folders):
    """Without our loader: a stream's state in such an epoch resumes it, and then all files come."""
    run = Run(folders)
    states, consumed = run.go_on((2, 0), [], [2, 1])
    loader = run.loader()
    loader.load_state_dict(states)
    consumed.append((0, take(loader, 2)))
    state = through_json(loader.dataset.state_dict())
    done = sum((numbers(mine) for _, mine in consumed), Counter())
    dataset = run.loader().dataset
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
    assert done + numbers([list(dataset)]) == Counter(range(24))
    assert numbers([list(dataset)]) == Counter(range(24))
    assert dataset.epoch == 2
