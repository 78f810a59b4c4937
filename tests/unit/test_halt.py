"""Ranks of any pace stop at one point."""

import random
import threading
import time
from collections.abc import Iterable

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.errors import SaveFailedError
from air_lightning.integrations.halt import Halt, Point

STEPS, BATCHES = 12, 6  # where nobody is told


def walk(
    halt: Halt, seed: int, told_at: Point | None, batches: int, steps_to_do: Iterable[int]
) -> Point | None:
    """One rank that waits for no other: steps, with a validation after every fourth."""
    pace = random.Random(seed)
    for steps in steps_to_do:
        points = [((steps, 0, 0), (steps + 1, 0, 0))]
        run = steps // 4
        if steps % 4 == 0:
            points = [((steps, run, batch), (steps, run, batch + 1)) for batch in range(batches)]
        for point, after in points:
            time.sleep(pace.random() * 0.002)
            if told_at is not None and point >= told_at:
                halt.propose(after, 15)
            if halt.at(point):
                return point
        if steps % 4 == 0:
            halt.leave((steps, run, batches))
    return None


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    told=st.lists(
        st.one_of(st.none(), st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(0, 5))),
        min_size=2,
        max_size=4,
    ),
    uneven=st.booleans(),
)
def test_all_stop_at_one_point(seed: int, told: list[Point | None], uneven: bool) -> None:
    """Whoever is told, and whoever is ahead: all stop at the same point, or none was told."""
    store, world_size = dist.HashStore(), len(told)
    # A rank that came to the end before another one was told could not stop with it any more, and
    # how far one gets ahead is up to the machine: where any is told, the run is as good as endless.
    is_told = any(point is not None for point in told)
    steps = range(1, 50_000 if is_told else STEPS + 1)
    stopped: list[Point | None] = [None] * world_size

    def run(rank: int) -> None:
        # Nobody goes on for having waited long: who passed a point is to tell those who wait there.
        halt = Halt(store, world_size, "test", patience_s=600)
        batches = BATCHES - rank if uneven else BATCHES
        stopped[rank] = walk(halt, seed + rank, told[rank], batches, steps)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), stopped
    assert len(set(stopped)) == 1, stopped
    assert (stopped[0] is not None) is is_told


def test_a_lone_rank_stops_where_it_is() -> None:
    """One rank needs no store, and stops at the first point after the signal."""
    halt = Halt(None, 1, "")
    assert not halt.at((1, 0, 0))
    halt.propose((2, 0, 0), 15)
    assert halt.at((2, 0, 0))
    assert halt.signal() == pytest.approx(15)


def test_a_rank_that_never_comes_is_not_waited_for_long() -> None:
    """After SIGTERM, a rank that is alone at each point goes on a few times, then ends by an error.

    As in a validation, in which no collective of the training tells of a rank that was killed.
    """
    batch, asked = 1, time.monotonic()

    def terminated_at() -> float:
        # A moment ago, at the first point: however long the machine was busy with other things.
        return asked if batch > 1 else time.monotonic()

    halt = Halt(dist.HashStore(), 2, "test", terminated_at, patience_s=0.1)
    halt.propose((1, 1, 1), 15)
    with pytest.raises(SaveFailedError, match="1 of 2 ranks came to where"):
        for batch in range(1, 1000):
            assert not halt.at((1, 1, batch))
    assert 1 < batch < 10
