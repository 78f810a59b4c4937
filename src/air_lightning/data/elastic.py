"""Where a loader goes on: from its own state, or from what all ranks of another grid left.

A state has the streams of one rank only. On the grid that it was taken on, that is what this rank
needs. On another grid, what is left of the epoch follows from the states of all ranks together::

    in order     the states of every rank once, all of one grid and of one pass
    layer        what each stream delivered, added to the layers of the grids before   layers.py
    deal         what all of them left, over this grid, by the rule of every epoch     stream.py

Ranks need not have stood at the same batch. A rank that had finished the epoch delivered its share.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from air_lightning.data.layers import Layer, layer_of
from air_lightning.data.progress import (
    WANTED,
    Identity,
    Position,
    check_version,
    from_state,
    to_state,
    warn_batch_size,
)
from air_lightning.data.stream import Grid, slice_length
from air_lightning.errors import GridMismatchError, StateError

_State = Mapping[str, Any]

_MOST_RANKS, _MOST_WORKERS = 1 << 20, 1 << 12


def position_from(
    given: _State | Sequence[_State], dataset: Any, identity: Identity, *, elastic: bool
) -> Position:
    """The position that a rank's state, or the states of all ranks, give to a loader.

    Args:
        given: What was loaded.
        dataset: The loader's.
        identity: Of the loader.
        elastic: Whether another grid's states are taken.

    Raises:
        StateError: A state does not fit; the message says why and what to do.
        GridMismatchError: It is of another grid, and cannot be or must not be continued here.
    """
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        states = _in_order(given)
        own = states[identity.rank] if _grid(states[0]) == _here(identity) else None
    else:
        check_version(given)
        states = [given]
        own = given if not elastic or _grid(given) == _here(identity) else None
    if own is not None:
        return from_state(own, identity)
    _check_continues(states, identity, elastic=elastic, able=hasattr(dataset, "redistribute"))
    epoch, before = _left_by(states, identity)
    if before:
        warn_batch_size(states[0], identity)
    return _dealt(dataset, Position(epoch, before=before), identity)


def batches_left(dataset: Any, position: Position, identity: Identity) -> int:
    """Batches that a rank still delivers in the epoch of a position."""
    streams = max(1, identity.num_workers)
    batches = 0
    for worker in range(streams):
        grid = Grid(identity.rank, identity.world_size, worker, streams)
        # Datasets of the user's own have no second argument.
        before = (position.before,) if position.before else ()
        items = dataset.slice_length(grid, *before)
        standing = position.standings.get(worker)
        left = (items - (standing.items if standing else 0)) / (identity.batch_size or 1)
        batches += math.floor(left) if identity.drop_last else math.ceil(left)
    return batches


def _dealt(dataset: Any, position: Position, identity: Identity) -> Position:
    # No stream has more than rank 0's first. If that has nothing, all ranks begin the next epoch;
    # if only some ranks have nothing, they deliver nothing, since their epochs would diverge.
    if position.before and batches_left(dataset, position, identity._replace(rank=0)) == 0:
        position = Position(position.epoch + 1)
    if position.before:
        # A whole epoch has no fewer files for any stream: this is never below 0.
        whole = batches_left(dataset, Position(position.epoch), identity)
        position = replace(position, batches=whole - batches_left(dataset, position, identity))
    return replace(position, loaded=to_state(position, identity))


def _left_by(states: Sequence[_State], identity: Identity) -> tuple[int, tuple[Layer, ...]]:
    """The epoch that states of all ranks are of, and all that was delivered of it, by grid."""
    positions = _of_one_moment(states, identity)
    under_way = min(positions, key=lambda position: position.epoch)
    world_size, streams = len(states), max(1, _grid(states[0])[1])
    order = states[0].get("order")  # a dict, or checked to be nothing
    uneven: Any = order.get("uneven", "keep") if isinstance(order, Mapping) else "keep"

    def delivered(grid: Grid) -> int:
        position = positions[grid.rank]
        if position.epoch > under_way.epoch:
            count = (identity.files or {})["count"]
            return slice_length(count, grid, uneven, under_way.before)
        standing = position.standings.get(grid.worker)
        return standing.items if standing else 0

    counts = [
        [delivered(Grid(rank, world_size, worker, streams)) for worker in range(streams)]
        for rank in range(world_size)
    ]
    last = (layer_of(counts),) if any(map(any, counts)) else ()
    return under_way.epoch, (*under_way.before, *last)


def _of_one_moment(states: Sequence[_State], identity: Identity) -> list[Position]:
    """The positions of all ranks: in one epoch, or at the next one's start if a rank was done."""
    world_size, num_workers = _grid(states[0])
    then = identity._replace(world_size=world_size, num_workers=num_workers)
    positions = [
        # Each with its own batch size: one warning of another one is enough.
        from_state(
            state, then._replace(rank=rank, batch_size=state.get("batch_size")), goes_on=False
        )
        for rank, state in enumerate(states)
    ]
    under_way = min(positions, key=lambda position: position.epoch)
    for rank, position in enumerate(positions):
        done = position.epoch == under_way.epoch + 1 and not position.begun
        same = (position.epoch, position.before) == (under_way.epoch, under_way.before)
        if not (done or same):
            raise StateError(
                f"The loader states are not of one moment: rank {rank} was in epoch "
                f"{position.epoch}, after {len(position.before)} other grids, and rank "
                f"{positions.index(under_way)} in epoch {under_way.epoch}, after "
                f"{len(under_way.before)}. Load the states that all ranks saved at the same time."
            )
    return positions


def _in_order(states: Sequence[_State]) -> list[_State]:
    """The states in the order of ranks, if they are those of all ranks of one grid."""
    for state in states:
        check_version(state)
    _check_alike("grids (world_size, num_workers)", [_grid(state) for state in states])
    _check_alike("file lists", [state.get("files") for state in states])
    world_size = _grid(states[0])[0] if states else 1
    for state in states:
        if type(state.get("rank")) is not int:
            raise StateError(f"A loader state has rank={state.get('rank')!r}. {WANTED}")
    ranks = Counter(state["rank"] for state in states)
    if ranks != Counter(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        raise StateError(
            f"Loader states of the ranks {sorted(ranks.elements(), key=str)} were given; wanted "
            f"are those of all {world_size} ranks, each once (missing: {missing[:8]}). Load the "
            "states that all ranks saved at the same time."
        )
    return sorted(states, key=lambda state: int(state["rank"]))


def _check_alike(what: str, values: list[Any]) -> None:
    other = next((value for value in values if value != values[0]), None)
    if other is not None:
        raise StateError(
            f"The {len(values)} loader states that were given are of different {what}: "
            f"{values[0]} and {other}. Load the states that all ranks of one run saved at the same "
            "time."
        )


def _check_continues(
    states: Sequence[_State], identity: Identity, *, elastic: bool, able: bool
) -> None:
    """Refuse another grid's states, unless they can be and may be continued here."""
    taken, here = _grid(states[0]), _here(identity)
    if not elastic:
        remedy = "give the loader elastic=True, to share out what is left over this grid"
    elif not able:
        remedy = (
            "use UCVolumeDataset or its map(): this loader's dataset has no redistribute(), and "
            "cannot go on from what other grids left"
        )
    elif len(states) != taken[0]:
        remedy = (
            f"pass the states of all {taken[0]} ranks, as a list, to load_state_dict: what is left "
            "follows from all of them together"
        )
    else:
        return
    raise GridMismatchError(
        f"The loader state was taken with world_size={taken[0]}, num_workers={taken[1]}, and this "
        f"loader runs with world_size={here[0]}, num_workers={here[1]}: its positions would skip "
        f"and repeat files. Resume with {taken[0]} ranks and num_workers={taken[1]}, or {remedy}."
    )


def _here(identity: Identity) -> tuple[int, int]:
    return identity.world_size, identity.num_workers


def _grid(state: _State) -> tuple[int, int]:
    world_size, num_workers = state.get("world_size"), state.get("num_workers")
    if (
        type(world_size) is int
        and type(num_workers) is int
        # No more than any grid has: what follows counts up to them.
        and (0 < world_size <= _MOST_RANKS and 0 <= num_workers <= _MOST_WORKERS)
    ):
        return world_size, num_workers
    raise StateError(
        f"The loader state has world_size={world_size!r}, num_workers={num_workers!r}. {WANTED}"
    )
