"""Where a loader stands: what was consumed, as a value and as a state dict.

A state dict is checked in this order: version, grid, shape of the payload, rank, file list. Every
check comes before anything is changed, so a refused state leaves the loader as it was.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from air_lightning.data import layers
from air_lightning.data.layers import Layer
from air_lightning.data.options import EPOCHS
from air_lightning.data.worker import Standing
from air_lightning.errors import GridMismatchError, StateError

VERSION = 1

WANTED = "Load the dict that state_dict() returned, unaltered or through JSON and back."


class Identity(NamedTuple):
    """What a state belongs to: this loader's place in the grid, batch size and file list.

    ``tells_epoch``: whether the loader tells its dataset the epoch. ``order``: what decides which
    file is the i-th of an epoch; None for a dataset that cannot go on from what other grids left.
    """

    rank: int
    world_size: int
    num_workers: int
    batch_size: int | None
    files: Mapping[str, Any] | None
    tells_epoch: bool = False
    order: Mapping[str, Any] | None = None
    drop_last: bool = False


@dataclass(frozen=True)
class Position:
    """A place between two batches of one epoch.

    Attributes:
        epoch: The epoch that the batches belong to.
        batches: Batches consumed of it by this rank. After a change of grids: those of a whole
            epoch on this grid, less those that are left.
        next_worker: The worker whose turn it is; batches go round robin.
        standings: Where each stream stands that has delivered anything.
        origins: For a dataset that counts epochs itself, where each stream stood at the end of
            the epoch before: a fresh one would begin with the shuffle of its first epoch.
        finished: Whether nothing of this epoch is left.
        before: What other grids delivered of the epoch, before this one.
        loaded: The state dict that this position came from, until something was consumed.
    """

    epoch: int
    batches: int = 0
    next_worker: int = 0
    standings: Mapping[int, Standing] = field(default_factory=dict)
    origins: Mapping[int, Standing] = field(default_factory=dict)
    finished: bool = False
    before: tuple[Layer, ...] = ()
    loaded: Mapping[str, Any] | None = field(default=None, compare=False)

    def after(self, worker: int, standing: Standing, *, streams: int) -> "Position":
        """The position after one more batch, of ``worker``, one of ``streams``."""
        standings = {**self.standings, worker: standing}
        return Position(
            epoch=self.epoch,
            batches=self.batches + 1,
            next_worker=(worker + 1) % streams,
            standings=standings,
            origins=self.origins,
            finished=len(standings) == streams and all(s.ended for s in standings.values()),
            before=self.before,
        )

    @property
    def known(self) -> dict[int, Standing]:
        """What a fresh worker must be told, by worker."""
        return {**self.origins, **self.standings}

    @property
    def begun(self) -> bool:
        """Whether anything of the epoch was consumed, be it on another grid."""
        return self.batches > 0 or bool(self.before)

    def end(self) -> "Position":
        """The same position, known to be the end of its epoch."""
        return replace(self, finished=True, loaded=None)

    def settled(self, *, carry: bool = False) -> "Position":
        """The start of the next epoch if this one is finished, else the position itself.

        Args:
            carry: Keep ``origins``: the loader cannot tell the dataset the epoch.
        """
        if not self.finished:
            return self
        origins = {
            worker: standing._replace(items=0)
            for worker, standing in self.known.items()
            if carry and "epoch" in standing.state
        }
        return Position(self.epoch + 1, origins=origins)


def epoch_of(dataset: Any) -> int:
    """The dataset's own ``epoch`` if it has one, else 0."""
    epoch = getattr(dataset, "epoch", 0)
    return epoch if type(epoch) is int and epoch >= 0 else 0


def to_state(position: Position, identity: Identity, *, carry: bool = False) -> dict[str, Any]:
    """The state dict of a position, of plain JSON types if the dataset's own states are.

    Args:
        position: The position.
        identity: Of the loader.
        carry: As of ``Position.settled``.
    """
    position = position.settled(carry=carry)
    if position.loaded is not None:
        return copy.deepcopy(dict(position.loaded))
    state: dict[str, Any] = {
        "version": VERSION,
        "world_size": identity.world_size,
        "num_workers": identity.num_workers,
        "rank": identity.rank,
        "batch_size": identity.batch_size,
        "epoch": position.epoch,
        "batches": position.batches,
        "next_worker": position.next_worker,
        "files": None if identity.files is None else dict(identity.files),
        "workers": {str(w): copy.deepcopy(s.state) for w, s in position.known.items()},
        "items": {str(w): s.items for w, s in position.known.items()},
        "ended": sorted(w for w, s in position.known.items() if s.ended),
    }
    if identity.order is not None:
        state["order"] = dict(identity.order)
        state["before"] = layers.to_json(position.before)
        # It is the same for all, and may be long: a loader can have 48 workers.
        for stream in state["workers"].values():
            stream.pop("before", None)
    return state


def from_state(state: Mapping[str, Any], identity: Identity, *, goes_on: bool = True) -> Position:
    """The position that a state dict describes, for the loader of this identity.

    Args:
        state: The state dict.
        identity: Of the loader.
        goes_on: Whether its streams go on here; otherwise what they left is dealt anew.

    Raises:
        StateError: The state has an unknown version, is another rank's, is malformed, or was taken
            mid-epoch of another file list.
        GridMismatchError: It was taken with other numbers of ranks or workers.
    """
    check_version(state)
    _check_grid(state, identity)
    position = _parse(state, identity)
    position = replace(position, before=_before(state, identity))
    _check_counts(position)
    if identity.tells_epoch:
        _check_epochs(position, identity)
    if position.begun:
        _check_rank(state, identity)
        _check_files(state, identity)
        _check_order(state, identity, uneven=goes_on and bool(position.standings))
        warn_batch_size(state, identity)
    return position


def check_version(state: Any) -> None:
    """Refuse what is no loader state, or one of an unknown version."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"A {type(state).__name__} was given as loader state; the dict that state_dict() "
            "returned is wanted."
        )
    if type(state.get("version")) is not int or state["version"] != VERSION:
        raise StateError(
            f"The loader state has version {state.get('version')!r}; this release reads version "
            f"{VERSION}. Load it with the release of air-lightning that wrote it."
        )


def _check_grid(state: Mapping[str, Any], identity: Identity) -> None:
    taken = (state.get("world_size"), state.get("num_workers"))
    here = (identity.world_size, identity.num_workers)
    if taken != here:
        raise GridMismatchError(
            f"The loader state was taken with world_size={taken[0]}, num_workers={taken[1]}, and "
            f"this loader runs with world_size={here[0]}, num_workers={here[1]}: its positions "
            f"would skip and repeat files. Resume with {taken[0]} ranks and "
            f"num_workers={taken[1]}, give the loader elastic=True and the states of all "
            f"{taken[0]} ranks to share out what is left, or begin an epoch without loading."
        )


def _before(state: Mapping[str, Any], identity: Identity) -> tuple[Layer, ...]:
    value = state.get("before") or []
    if value and (identity.order is None or identity.files is None):
        raise StateError(
            "The loader state was taken in an epoch that other grids began, and this loader's "
            "dataset cannot go on from what they left (it has no redistribute()). Load it over a "
            "UCVolumeDataset, as when it was saved."
        )
    if not value:
        return ()
    files = state.get("files")
    count = files.get("count") if isinstance(files, Mapping) else None
    if type(count) is not int or not 0 <= count < EPOCHS:
        raise StateError(f"The loader state has files={state.get('files')!r}. {WANTED}")
    return layers.from_json(value, count)


def _check_rank(state: Mapping[str, Any], identity: Identity) -> None:
    if state.get("rank") != identity.rank:
        raise StateError(
            f"The loader state is that of rank {state.get('rank')}, and this is rank "
            f"{identity.rank}: each rank reads other files. Save every rank's own state_dict() "
            "and load it on the same rank (AirCheckpointIO does)."
        )


def _check_files(state: Mapping[str, Any], identity: Identity) -> None:
    taken, here = state.get("files"), identity.files
    if taken is None or here is None or dict(taken) == dict(here):
        return
    counts = f"{taken.get('count')} files then, {here.get('count')} now"
    raise StateError(
        f"The loader state was taken in the middle of epoch {state['epoch']}, and files were "
        f"added, removed or renamed since ({counts}): positions in the old list mean other files "
        "in this one. Restore the file list, or begin the next epoch without loading the state "
        f"(set_epoch({state['epoch'] + 1}))."
    )


def _check_order(state: Mapping[str, Any], identity: Identity, *, uneven: bool) -> None:
    taken, here = state.get("order"), identity.order
    if taken is None or here is None:
        return
    if not isinstance(taken, Mapping):
        raise StateError(f"The loader state has order={taken!r}; a dict is wanted. {WANTED}")
    # What a list was padded with or cut by is no part of what was delivered, and matters only to
    # streams that go on.
    keys = ("shuffle", "seed", "uneven") if uneven else ("shuffle", "seed")
    changed = [key for key in keys if taken.get(key) != here[key]]
    if changed:
        then, now = ({key: order.get(key) for key in changed} for order in (taken, here))
        raise StateError(
            f"The loader state was taken in the middle of epoch {state['epoch']} with {then}, and "
            f"this loader's dataset has {now}: the files come in another order here. Construct it "
            "as it was, or begin the next epoch without loading the state "
            f"(set_epoch({state['epoch'] + 1}))."
        )


def _check_counts(position: Position) -> None:
    """Every batch has an item at least, and what was delivered was delivered in batches."""
    batches, items = position.batches, sum(s.items for s in position.standings.values())
    # After a change of grids, batches count those that other grids consumed.
    if (batches > items and not position.before) or (batches == 0 and items > 0):
        raise StateError(
            f"The loader state contradicts itself: batches={batches}, and the items of its "
            f"workers are {items} in all. {WANTED}"
        )


def _check_epochs(position: Position, identity: Identity) -> None:
    if position.origins:
        raise StateError(
            f"The loader state has a worker that delivered no item ({min(position.origins)}); "
            f"such a worker has no entry. {WANTED}"
        )
    for worker, standing in position.standings.items():
        told = standing.state.get("epoch", position.epoch)
        # Other datasets than those of files may count their epochs in another way.
        if identity.files is not None and told != position.epoch:
            raise StateError(
                f"The loader state contradicts itself: epoch={position.epoch}, and its worker "
                f"{worker} was in epoch {told!r}. {WANTED}"
            )


def warn_batch_size(state: Mapping[str, Any], identity: Identity) -> None:
    """Say that batches were of another size; two calls below load_state_dict."""
    if state.get("batch_size") != identity.batch_size:
        warnings.warn(
            f"The loader state was taken with batch_size={state.get('batch_size')}, and this "
            f"loader has batch_size={identity.batch_size}: the epoch goes on with the files that "
            "are left, in batches of another size than those before.",
            stacklevel=5,
        )


def _parse(state: Mapping[str, Any], identity: Identity) -> Position:
    streams = max(1, identity.num_workers)
    files = state.get("files")
    if files is not None and not isinstance(files, Mapping):
        raise StateError(f"The loader state has files={files!r}; a dict is wanted. {WANTED}")
    try:
        ended = [_count(worker, below=streams) for worker in state.get("ended", ())]
        known = {
            _count(int(worker), below=streams): Standing(
                _count(state["items"][worker]),
                copy.deepcopy(dict(dataset_state)),
                int(worker) in ended,
            )
            for worker, dataset_state in state["workers"].items()
        }
        return Position(
            epoch=_count(state["epoch"], below=EPOCHS),
            batches=_count(state["batches"]),
            next_worker=_count(state["next_worker"], below=streams),
            standings={w: s for w, s in known.items() if s.items > 0},
            origins={w: s for w, s in known.items() if s.items == 0},
            loaded=copy.deepcopy(dict(state)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"The loader state is malformed ({type(error).__name__}: {error}); the dict that "
            "state_dict() returned is wanted, unaltered or through JSON and back."
        ) from error


def _count(number: Any, *, below: int = EPOCHS) -> int:
    if type(number) is not int or not 0 <= number < below:
        raise ValueError(f"{number!r} where a count below {below}")
    return number
