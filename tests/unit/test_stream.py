"""The slice rule: each file once per epoch on every grid, in an order that never changes."""

from collections import Counter

import numpy as np
import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.data.stream import (
    Checkpointable,
    Grid,
    current_grid,
    current_rank,
    rank_length,
    set_worker,
    shuffled,
    slice_indices,
    slice_length,
)
from ranks import run_ranks

counts = st.integers(0, 300)
sizes = st.integers(1, 9)


def grids(world_size: int, num_workers: int) -> list[Grid]:
    return [
        Grid(r, world_size, w, num_workers) for r in range(world_size) for w in range(num_workers)
    ]


@settings(deadline=None, max_examples=150)
@given(
    count=counts,
    world_size=sizes,
    num_workers=sizes,
    shuffle=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**6),
)
def test_each_file_belongs_to_one_slot(count, world_size, num_workers, shuffle, seed, epoch):
    """The slices of a grid are the epoch's order, dealt out one by one."""
    order = shuffled(count, seed, epoch) if shuffle else np.arange(count)
    for grid in grids(world_size, num_workers):
        mine = slice_indices(count, grid, shuffle=shuffle, seed=seed, epoch=epoch)
        assert mine.tolist() == order[grid.slot :: grid.slots].tolist()
        assert len(mine) == slice_length(count, grid)
    assert sorted(order.tolist()) == list(range(count))


@settings(deadline=None, max_examples=100)
@given(count=st.integers(1, 300), world_size=sizes, num_workers=sizes, shuffle=st.booleans())
def test_padding_makes_slices_equal_and_leaves_no_file_out(count, world_size, num_workers, shuffle):
    """Every slice is ceil(n / slots) long; every file comes, none more often than it must."""
    slices = [
        slice_indices(count, grid, uneven="pad", shuffle=shuffle)
        for grid in grids(world_size, num_workers)
    ]
    slots = world_size * num_workers
    assert {len(mine) for mine in slices} == {-(-count // slots)}
    times = Counter(np.concatenate(slices).tolist())
    assert set(times) == set(range(count))
    assert max(times.values()) - min(times.values()) <= 1


@settings(deadline=None, max_examples=100)
@given(count=counts, world_size=sizes, num_workers=sizes, shuffle=st.booleans())
def test_dropping_makes_slices_equal_and_repeats_no_file(count, world_size, num_workers, shuffle):
    """Every slice is floor(n / slots) long, and no file comes twice."""
    slices = [
        slice_indices(count, grid, uneven="drop", shuffle=shuffle)
        for grid in grids(world_size, num_workers)
    ]
    assert {len(mine) for mine in slices} == {count // (world_size * num_workers)}
    assert max(Counter(np.concatenate(slices).tolist()).values(), default=1) == 1


@given(count=counts, world_size=sizes, num_workers=sizes)
def test_a_rank_delivers_what_its_workers_do(count, world_size, num_workers):
    """The length of a rank's epoch is the sum over its workers."""
    total = sum(
        rank_length(count, Grid(rank, world_size, 0, num_workers)) for rank in range(world_size)
    )
    assert total == count


def test_the_shuffle_is_the_same_in_every_release():
    """These orders are written down: a change would break the resume of running jobs."""
    assert shuffled(10, 0, 0).tolist() == GOLDEN[(0, 0)]
    assert shuffled(10, 42, 3).tolist() == GOLDEN[(42, 3)]


def test_epochs_and_seeds_give_orders_of_their_own():
    """No two of them agree, and every place is about equally likely for a file."""
    orders = {tuple(shuffled(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    places = Counter(order.index(0) for order in orders)
    assert max(places.values()) < 30


def test_the_grid_outside_of_workers_and_ranks():
    """One rank, one worker; an override rules, in its block and this process only."""
    assert current_rank() == (0, 1)
    assert current_grid() == Grid(0, 1, 0, 1)
    with set_worker(2, 5):
        assert current_grid() == Grid(0, 1, 2, 5)
        assert run_ranks(_assert_grid, Grid(0, 1, 0, 1)) == [0]
        with set_worker(3, 5):
            assert current_grid().worker == 3
        assert current_grid().worker == 2
    assert current_grid() == Grid(0, 1, 0, 1)


def _assert_grid(grid: Grid) -> None:
    assert current_grid() == grid


def test_the_grid_of_real_ranks_and_workers():
    """Two gloo ranks with two torch workers each see four places of one grid."""
    assert run_ranks(_see_all_places, world_size=2) == [0, 0]


def _see_all_places() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    # Workers are forked from a rank: as in training, they know its rank from the group's state.
    loader = torch.utils.data.DataLoader(_Places(), batch_size=None, num_workers=2)
    assert sorted(tuple(place) for place in loader) == [(rank, 2, 0, 2), (rank, 2, 1, 2)]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _Places(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield tuple(current_grid())


def test_checkpointable_is_a_matter_of_two_methods():
    """Whatever has both methods is one; a list is not."""

    class Own:
        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    assert isinstance(Own(), Checkpointable)
    assert not isinstance([], Checkpointable)


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_no_files_make_empty_slices(uneven):
    """An empty list is no division by zero."""
    assert len(slice_indices(0, Grid(0, 2, 0, 2), uneven=uneven, shuffle=True)) == 0


GOLDEN = {
    (0, 0): [0, 7, 8, 2, 5, 9, 4, 6, 3, 1],
    (42, 3): [8, 0, 3, 7, 1, 4, 2, 9, 6, 5],
}
