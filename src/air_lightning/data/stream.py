"""Which file goes where: the grid of streams, and the slice rule.

File ``i`` of an epoch's order belongs to slot ``i mod (world_size * num_workers)``, and each
``(rank, worker)`` owns one slot: every file is delivered once per epoch, whatever the grid. The
order is a pure function of seed, epoch and the number of files. After a change of grids within an
epoch the same rule deals what the grids before left (layers.py).

This is the one place that asks torch which rank and worker this is, at the moment of use.
"""

import os
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch.distributed
from torch.utils.data import get_worker_info

from air_lightning.data.layers import Layer, left, left_count

Indices: TypeAlias = npt.NDArray[np.int64]
Uneven: TypeAlias = Literal["keep", "pad", "drop"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Grid(NamedTuple):
    """The place of one stream among all streams.

    Attributes:
        rank: This process's rank, among those that read different files.
        world_size: Number of such ranks.
        worker: The worker within the rank.
        num_workers: Workers of each rank; 1 where the process itself makes the items.
    """

    rank: int
    world_size: int
    worker: int
    num_workers: int

    @property
    def slot(self) -> int:
        """The number of this stream among all."""
        return self.rank * self.num_workers + self.worker

    @property
    def slots(self) -> int:
        """The number of streams."""
        return self.world_size * self.num_workers


@runtime_checkable
class Checkpointable(Protocol):
    """A dataset whose position can be saved and restored.

    Inside a worker both methods are about that worker's stream alone.
    """

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass where ``state_dict`` says."""


def current_rank() -> tuple[int, int]:
    """This process's rank and the number of ranks; ``(0, 1)`` outside of torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def data_rank() -> tuple[int, int]:
    """Which share of the data this process reads, and of how many; by default its rank's."""
    return current_rank() if _share is None else _share


# (share, shares), inherited by forked workers.
_share: tuple[int, int] | None = None


def set_share(share: tuple[int, int] | None) -> None:
    """Let this process read what other ranks read too: those that hold parts of one layer.

    Args:
        share: The share and the number of shares; None for one of each rank's own.
    """
    global _share  # noqa: PLW0603 - who a process is, is a fact about the process
    _share = share


def current_grid() -> Grid:
    """The stream that the calling process stands for right now."""
    rank, world_size = data_rank()
    if _override is not None and _override[0] == os.getpid():
        return Grid(rank, world_size, *_override[1:])
    info = get_worker_info()
    if info is None:
        return Grid(rank, world_size, 0, 1)
    return Grid(rank, world_size, info.id, info.num_workers)


# (pid, worker, num_workers): a fork must not inherit the worker that its parent stood for.
_override: tuple[int, int, int] | None = None


class set_worker:  # noqa: N801 - used as a function and as a context manager, like torch.set_grad_enabled
    """Let a logical worker id rule in this process; as a context manager, for the block only.

    Args:
        worker: The worker whose stream this process delivers.
        num_workers: Workers of each rank.
    """

    def __init__(self, worker: int, num_workers: int) -> None:
        global _override  # noqa: PLW0603 - who a process is, is a fact about the process
        self._previous = _override
        _override = (os.getpid(), worker, num_workers)

    def __enter__(self) -> "set_worker":
        return self

    def __exit__(self, *exception: object) -> None:
        global _override  # noqa: PLW0603 - see above
        _override = self._previous


def slice_length(
    count: int, grid: Grid, uneven: Uneven = "keep", before: tuple[Layer, ...] = ()
) -> int:
    """How many of ``count`` files the grid's slot delivers in one epoch.

    Args:
        count: Number of files.
        grid: Whose slice.
        uneven: As of ``slice_indices``.
        before: What earlier grids delivered: the slice is one of what they left.
    """
    left_over = left_count(count, before)
    return len(range(grid.slot, _total(left_over, grid.slots, uneven), grid.slots))


def rank_length(count: int, grid: Grid, uneven: Uneven = "keep") -> int:
    """How many of ``count`` files the grid's rank delivers in one epoch, over all its workers."""
    workers = range(grid.num_workers)
    return sum(slice_length(count, grid._replace(worker=w), uneven) for w in workers)


def slice_indices(
    count: int,
    grid: Grid,
    *,
    uneven: Uneven = "keep",
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    before: tuple[Layer, ...] = (),
) -> Indices:
    """The file numbers that the grid's slot delivers in one epoch, in order.

    Args:
        count: Number of files.
        grid: Whose slice.
        uneven: ``"pad"`` repeats files from the list's start until all slices are equally long,
            ``"drop"`` leaves out files at its end, ``"keep"`` does neither.
        shuffle: Whether the epoch's order is shuffled.
        seed: Seed of the shuffle.
        epoch: The epoch.
        before: What earlier grids delivered of it: what they left, in order, is dealt.

    Returns:
        An array of int64, of length ``slice_length(count, grid, uneven, before)``.
    """
    dealt = left_count(count, before)
    positions = np.arange(grid.slot, _total(dealt, grid.slots, uneven), grid.slots, dtype=np.int64)
    if dealt:
        positions %= dealt
    if before:
        positions = left(count, before)[positions]
    return shuffled(count, seed, epoch)[positions] if shuffle else positions


def shuffled(count: int, seed: int, epoch: int) -> Indices:
    """The numbers below ``count`` in an order that depends on these three arguments alone.

    Not numpy's ``permutation``: its algorithm may change with a release, and a resumed epoch would
    then silently repeat and skip files.
    """
    key = _splitmix(_splitmix(seed & _MASK) ^ (epoch & _MASK))
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable").astype(np.int64, copy=False)


def _splitmix(number: int) -> int:
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _total(count: int, slots: int, uneven: Uneven) -> int:
    """The length of a list once it is padded or cut."""
    if uneven == "pad":
        return -(-count // slots) * slots
    return count // slots * slots if uneven == "drop" else count
