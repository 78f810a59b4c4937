"""What earlier grids left of an epoch: each file once over any sequence of grids."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.data.layers import Layer, from_json, layer_of, left, left_count, to_json
from air_lightning.data.stream import Grid, slice_indices, slice_length
from air_lightning.errors import StateError

unevens = st.sampled_from(["keep", "pad", "drop"])


@st.composite
def stays(draw: Any) -> tuple[int, int]:
    """Numbers of ranks and workers of one grid."""
    return draw(st.integers(1, 5)), draw(st.integers(1, 4))


def streams(world_size: int, num_workers: int) -> list[Grid]:
    """All places of a grid, by slot."""
    return [
        Grid(r, world_size, w, num_workers) for r in range(world_size) for w in range(num_workers)
    ]


def stay(data: Any, grid: tuple[int, int], files: dict[str, Any]) -> tuple[Layer, list[list[int]]]:
    """Some of each stream is delivered on a grid, as much as the example says."""
    parts = []
    for place in streams(*grid):
        mine = slice_indices(grid=place, **files).tolist()
        parts.append(mine[: data.draw(st.integers(0, len(mine)))])
    workers = grid[1]
    by_rank = [list(map(len, parts[i : i + workers])) for i in range(0, len(parts), workers)]
    return layer_of(by_rank), parts


@settings(max_examples=400, deadline=None)
@given(data=st.data(), count=st.integers(0, 60), uneven=unevens, shuffle=st.booleans())
def test_any_sequence_of_grids_delivers_each_file_once(data, count, uneven, shuffle):
    """Whatever was delivered where: keep is exact, pad only repeats, drop loses at its end only."""
    files = {"count": count, "uneven": uneven, "shuffle": shuffle, "seed": 3, "epoch": 2}
    before: tuple[Layer, ...] = ()
    seen: Counter[int] = Counter()
    repeats = 0
    for grid in data.draw(st.lists(stays(), max_size=3)):
        layer, parts = stay(data, grid, {**files, "before": before})
        there = left_count(count, before)
        exact = [len(range(slot, there, layer.slots)) for slot in range(layer.slots)]
        repeats += sum(max(0, len(part) - n) for part, n in zip(parts, exact, strict=True))
        for part in parts:
            seen.update(part)
        before = from_json(json.loads(json.dumps(to_json((*before, layer)))), count)
    last = data.draw(stays())
    lengths = set()
    for place in streams(*last):
        mine = slice_indices(grid=place, before=before, **files)
        assert len(mine) == slice_length(count, place, uneven, before)
        lengths.add(len(mine))
        seen.update(mine.tolist())
    slots = last[0] * last[1]
    repeats += -left_count(count, before) % slots if uneven == "pad" else 0
    missing = left_count(count, before) % slots if uneven == "drop" else 0
    assert len(seen) == count - missing
    assert seen.total() - len(seen) == (repeats if count else 0)
    assert uneven == "keep" or len(lengths) == 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(0, 60), grids=st.lists(stays(), max_size=3))
def test_what_is_left_is_never_more_than_an_epoch(data, count, grids):
    """For every stream of every grid, in every mode, what is left is no longer than an epoch."""
    before: tuple[Layer, ...] = ()
    for grid in grids:
        layer, _ = stay(data, grid, {"count": count, "before": before})
        before = (*before, layer)
    assert len(left(count, before)) == left_count(count, before)
    for place in streams(*data.draw(stays())):
        for uneven in ("keep", "pad", "drop"):
            assert slice_length(count, place, uneven, before) <= slice_length(count, place, uneven)


def test_files_that_are_left_stay_in_the_order_of_the_epoch():
    """Two of three streams that delivered two and one file leave the others, in order."""
    before = (layer_of([[2], [1], [0]]),)
    assert left(8, before).tolist() == [2, 4, 5, 6, 7]
    assert left(8, (*before, layer_of([[1, 0]]))).tolist() == [4, 5, 6, 7]


def test_the_record_of_a_large_grid_is_small():
    """1,000 ranks of 48 workers: some dozen bytes in step, and some dozen per rank else."""
    in_step = layer_of([[12] * 17 + [8] * 31] * 1000)
    assert len(json.dumps(to_json([in_step]))) < 100
    apart = layer_of([[4 * r + 4] * 17 + [4 * r] * 31 for r in range(1000)])
    assert len(json.dumps(to_json([apart]))) < 40_000
    assert in_step.counts().tolist() == ([12] * 17 + [8] * 31) * 1000


def record(**change: Any) -> dict[str, Any]:
    """Two ranks with one worker each, that delivered two files each."""
    return {"world_size": 2, "num_workers": 1, "delivered": [[2, [[1, 2]]]], **change}


@pytest.mark.parametrize(
    "value",
    [
        5,
        [5],
        [{}],
        [record(world_size=0)],
        [record(world_size=3)],
        [record(num_workers=2)],
        [record(delivered=[])],
        [record(delivered=[[2, [[1, -1]]]])],
        [record(delivered=[[2, [[1, "2"]]]])],
        [record(delivered=[[2, [[0, 2]]]])],
        [record(delivered=[[2, [[1, 4]]]])],
        [record(), record()],
    ],
)
def test_a_record_that_cannot_be_is_refused(value):
    """Counts of another number of streams, of more files than there are, or no counts at all."""
    assert from_json([record()], 6)
    with pytest.raises(StateError, match="state"):
        from_json(value, 6)
