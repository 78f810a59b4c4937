"""What earlier grids left of an epoch, as layers of delivered counts.

Each grid that worked on an epoch is a layer. Element ``i`` of the layer's list belongs to slot
``i mod slots``, and was delivered if ``i // slots`` is below that slot's count. What was not
delivered, in order, is the list of the next layer. The first list is the epoch's order without
padding; the last one is dealt over the present grid. So grids may follow each other any number of
times within an epoch, and no file's number is ever stored. Repeats that pad a list stand beyond its
end, and what a list was cut by is not delivered: a layer need not know which was asked for.

Counts are kept as runs of runs, since every rank saves them: the workers of a rank take turns, so
their counts have two values, and ranks in step stand alike. 1,000 ranks of 48 workers in step are
then 60 bytes of JSON instead of 150,000; ranks that are not in step cost some 20 bytes each.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from air_lightning.errors import StateError

_T = TypeVar("_T")
COUNTS = 2**62  # any number of files is below it; what is counted in has 63 bits
_MOST_SLOTS = 1 << 26  # of a grid: each has a place in memory
_Runs: TypeAlias = tuple[tuple[int, _T], ...]  # (how often in a row, what)
_Indices: TypeAlias = npt.NDArray[np.int64]


class Layer(NamedTuple):
    """What one grid delivered of its list.

    Attributes:
        world_size: Number of ranks.
        num_workers: Workers of each rank; 1 where the process itself makes the items.
        delivered: The count of each worker, in runs, of each rank, in runs.
    """

    world_size: int
    num_workers: int
    delivered: _Runs[_Runs[int]]

    @property
    def slots(self) -> int:
        """The number of streams."""
        return self.world_size * self.num_workers

    def counts(self) -> _Indices:
        """What each slot delivered."""
        ranks = [
            np.tile(np.repeat([n for _, n in workers], [times for times, _ in workers]), alike)
            for alike, workers in self.delivered
        ]
        return np.concatenate(ranks).astype(np.int64, copy=False)


def layer_of(counts: Sequence[Sequence[int]]) -> Layer:
    """The layer of a grid, from what each worker of each rank delivered."""
    return Layer(len(counts), len(counts[0]), _runs(_runs(workers) for workers in counts))


def left_count(count: int, before: tuple[Layer, ...]) -> int:
    """How many of ``count`` files the layers left."""
    return _left_count(count, before) if before else count


def left(count: int, before: tuple[Layer, ...]) -> _Indices:
    """The places in the epoch's order of the files that the layers left, in order."""
    places = np.arange(count, dtype=np.int64)
    for layer in before:
        rows = np.arange(-(-len(places) // layer.slots))
        # One byte per file: a place divided by slots would be eight, in each of many workers.
        stays = (rows[:, None] >= layer.counts()).ravel()[: len(places)]
        places = places[stays]
    return places


def to_json(before: Iterable[Layer]) -> list[dict[str, Any]]:
    """The layers in plain JSON types."""
    return [
        {
            "world_size": layer.world_size,
            "num_workers": layer.num_workers,
            "delivered": [
                [alike, [list(run) for run in workers]] for alike, workers in layer.delivered
            ],
        }
        for layer in before
    ]


def from_json(value: Any, count: int) -> tuple[Layer, ...]:
    """The layers that ``to_json`` wrote, checked against the number of files.

    Raises:
        StateError: It is something else, or the counts cannot be those of so many files.
    """
    try:
        before = tuple(_layer(entry) for entry in value)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"The state has a malformed record of the grids before this one "
            f"({type(error).__name__}: {error}). Load the dict that state_dict() returned, "
            "unaltered or through JSON and back."
        ) from error
    for number, layer in enumerate(before):
        there = left_count(count, before[:number])
        longest = -(-there // layer.slots)
        if max(n for _, workers in layer.delivered for _, n in workers) > longest:
            raise StateError(
                f"The state contradicts itself: a stream of {layer.world_size} ranks with "
                f"{layer.num_workers} workers is said to have delivered more than its share of "
                f"{there} files, {longest}. Load the dict that state_dict() returned, unaltered "
                "or through JSON and back."
            )
    return before


@functools.lru_cache(maxsize=16)
def _left_count(count: int, before: tuple[Layer, ...]) -> int:
    # Remembered: a loader's length asks for each of its workers.
    for layer in before:
        lengths = (count - np.arange(layer.slots) + layer.slots - 1) // layer.slots
        count -= int(np.minimum(lengths, layer.counts()).sum())
    return count


def _runs(values: Iterable[_T]) -> _Runs[_T]:
    return tuple((len(list(group)), value) for value, group in itertools.groupby(values))


def _layer(entry: Mapping[str, Any]) -> Layer:
    delivered = tuple(
        (_positive(alike), tuple((_positive(times), _count(n)) for times, n in workers))
        for alike, workers in entry["delivered"]
    )
    layer = Layer(_positive(entry["world_size"]), _positive(entry["num_workers"]), delivered)
    per_rank = {sum(times for times, _ in workers) for _, workers in delivered}
    if per_rank != {layer.num_workers} or sum(n for n, _ in delivered) != layer.world_size:
        raise ValueError("the counts are not those of its ranks and workers")
    if layer.slots > _MOST_SLOTS:
        raise ValueError(f"{layer.slots} streams where {_MOST_SLOTS} are too many")
    return layer


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < COUNTS:
        raise ValueError(f"{number!r} where a count")
    return number


def _positive(number: Any) -> int:
    if _count(number) == 0:
        raise ValueError("0 where 1 or more")
    return int(number)
