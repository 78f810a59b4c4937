"""Where one stream stands, as a dict, and whether a dict fits here.

Checked in this order: version, identity (stream, grid, order of files), count, file list. A state
at the start or the end of an epoch takes a changed file list, since volumes grow; in the middle of
an epoch the same count means other files.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from air_lightning.data import layers
from air_lightning.data.layers import Layer
from air_lightning.data.stream import Grid, Indices, Uneven, slice_length
from air_lightning.errors import GridMismatchError, StateError

VERSION = 1


class Order(NamedTuple):
    """What decides which file is the i-th of an epoch, but for the list itself."""

    shuffle: bool
    seed: int
    uneven: Uneven


class Position(NamedTuple):
    """Files delivered by a stream in an epoch, and whether these are all.

    Attributes:
        epoch: The epoch.
        delivered: Files delivered on this grid.
        finished: Whether the stream has no more.
        before: What other grids delivered of the epoch, before this one.
        good: The place of the file that was delivered last, where bad ones are replaced.
    """

    epoch: int
    delivered: int
    finished: bool = False
    before: tuple[Layer, ...] = ()
    good: int | None = None


class StreamPass:
    """One pass of one stream; ``delivered`` counts from the epoch's start on this grid.

    Attributes:
        before: What other grids delivered of the epoch, before this one.
        good: The place of the file that was delivered last, None before the first one.
        loaded: The position that was loaded for it, None where none was.
    """

    def __init__(
        self,
        epoch: int,
        delivered: int,
        indices: Indices,
        before: tuple[Layer, ...],
        good: int | None = None,
    ) -> None:
        self.epoch = epoch
        self.delivered = delivered
        self.indices = indices
        self.before = before
        self.ended = False
        self.good = good
        self.loaded: Position | None = None


def to_state(
    position: Position, grid: Grid, order: Order, files: Mapping[str, Any]
) -> dict[str, Any]:
    """The state dict of a stream, of plain JSON types."""
    state = {
        "version": VERSION,
        "delivered": position.delivered,
        "rank": grid.rank,
        "worker_id": grid.worker,
        "epoch": position.epoch,
        "grid": {"world_size": grid.world_size, "num_workers": grid.num_workers},
        "order": order._asdict(),
        "files": dict(files),
        "before": layers.to_json(position.before),
    }
    return state if position.good is None else {**state, "good": position.good}


def from_state(
    state: Mapping[str, Any], here: Position, grid: Grid, order: Order, files: Mapping[str, Any]
) -> Position:
    """The position that a state dict gives to the stream here.

    Args:
        state: At least ``version``, ``delivered``, ``rank`` and ``worker_id``.
        here: Where the stream would begin: has the epoch of a state that names none, and the
            earlier grids of a state of that epoch that does not speak of them.
        grid: The stream here.
        order: The order here.
        files: The file list here.

    Raises:
        StateError: It has an unknown version, a count that cannot be, another stream's identity,
            or, mid-epoch, another order or file list.
        GridMismatchError: It was taken mid-epoch on another grid.
    """
    _check_version(state)
    delivered = _count(state, "delivered")
    epoch = _count(state, "epoch") if "epoch" in state else here.epoch
    _check_stream(state, grid)
    taken_files = _mapping(state, "files") or files
    taken_order = _mapping(state, "order") or order._asdict()
    before = here.before if epoch == here.epoch else ()
    if "before" in state:
        before = layers.from_json(state["before"], _count(taken_files, "count"))
    length = _length(taken_files, taken_order, grid, before)
    if delivered == 0 and not before:
        return Position(epoch, 0)
    if delivered > 0:
        _check_grid(state, grid)
        if delivered == length:
            return Position(epoch, delivered, finished=True, before=before)
    _check_order(taken_order, order, epoch)
    _check_files(taken_files, files, epoch, delivered)
    if delivered > length:
        raise StateError(
            f"The dataset state says that {delivered} files were delivered, and the stream of rank "
            f"{grid.rank}, worker {grid.worker} has {length} per epoch. Load it on the grid and "
            "with the options it was taken with."
        )
    return Position(epoch, delivered, before=before, good=_good(state, length))


def _check_version(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise StateError(
            f"A {type(state).__name__} was given as dataset state; the dict that state_dict() "
            "returned is wanted."
        )
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"The dataset state has version {version!r}; this release reads version {VERSION}. "
            "Load it with the release of air-lightning that wrote it."
        )


def _count(state: Mapping[str, Any], key: str) -> int:
    number = state.get(key)
    if type(number) is not int or not 0 <= number < layers.COUNTS:
        raise StateError(
            f"The dataset state has {key}={number!r}; wanted is a number from 0 on. Load the dict "
            "that state_dict() returned, unaltered or through JSON and back."
        )
    return number


def _good(state: Mapping[str, Any], length: int) -> int | None:
    if state.get("good") is None:
        return None
    good = _count(state, "good")
    if good >= length:
        raise StateError(
            f"The dataset state has good={good}, and its stream has {length} files. Load the dict "
            "that state_dict() returned, unaltered or through JSON and back."
        )
    return good


def _mapping(state: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = state.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise StateError(
            f"The dataset state has {key}={value!r}; wanted is a dict. Load the dict that "
            "state_dict() returned, unaltered or through JSON and back."
        )
    return value


def _length(
    files: Mapping[str, Any], order: Mapping[str, Any], grid: Grid, before: tuple[Layer, ...]
) -> int:
    """Files per epoch of the stream, as it was when the state was taken."""
    return slice_length(_count(files, "count"), grid, order.get("uneven", "keep"), before)


def _check_stream(state: Mapping[str, Any], grid: Grid) -> None:
    taken = (_count(state, "rank"), _count(state, "worker_id"))
    if taken != (grid.rank, grid.worker):
        raise StateError(
            f"The dataset state is that of rank {taken[0]}, worker {taken[1]}, and this is rank "
            f"{grid.rank}, worker {grid.worker}: their files differ. Load each stream's own state "
            "(air_lightning.DataLoader does)."
        )


def _check_grid(state: Mapping[str, Any], grid: Grid) -> None:
    taken = _mapping(state, "grid")
    here = {"world_size": grid.world_size, "num_workers": grid.num_workers}
    if taken is not None and dict(taken) != here:
        raise GridMismatchError(
            f"The dataset state was taken with world_size={taken.get('world_size')}, "
            f"num_workers={taken.get('num_workers')}, and this stream runs with "
            f"world_size={here['world_size']}, num_workers={here['num_workers']}: its position "
            "would skip and repeat files. Resume on the same grid, or begin an epoch without "
            "loading the state."
        )


def _check_order(taken: Mapping[str, Any], order: Order, epoch: int) -> None:
    here = order._asdict()
    changed = [f"{key}={taken[key]!r}" for key in here if key in taken and taken[key] != here[key]]
    if changed:
        raise StateError(
            f"The dataset state was taken in the middle of epoch {epoch} with "
            f"{', '.join(changed)}, and this dataset has {order}: the files come in another order "
            "here. Construct it as it was, or begin the next epoch without loading the state "
            f"(set_epoch({epoch + 1}))."
        )


def _check_files(
    taken: Mapping[str, Any], files: Mapping[str, Any], epoch: int, delivered: int
) -> None:
    if taken.get("fingerprint") == files.get("fingerprint") or "fingerprint" not in taken:
        return
    then, now = _count(taken, "count"), files["count"]
    if then == now:
        change = f"as many files ({now}), but some were replaced by others or renamed"
    else:
        more, what = abs(now - then), "added" if now > then else "removed"
        change = f"{then} files then, {now} now: {more} {what} (or more, if some also went or came)"
    raise StateError(
        f"The dataset state was taken in the middle of epoch {epoch}, after {delivered} files of "
        f"this stream, and the file list is no longer that of the checkpoint ({change}). Positions "
        "in the old list mean other files in this one. Restore the list (pattern= can leave new "
        "files out), or begin the next epoch with all files, without loading the state "
        f"(set_epoch({epoch + 1}))."
    )
