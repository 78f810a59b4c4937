"""Going on with a run on another grid: other numbers of ranks or of workers than it was saved with.

Each file of the epoch still comes once, and the epoch ends when none is left::

    refuse     a loader with a position that may not or cannot be shared out        rank 0
    read       the blobs of all ranks of then; their loader states go to all ranks  rank 0
    share out  each loader takes the states of all, one of each share               elastic.py
    count      Lightning's batches of the epoch become those of this grid: an epoch of full
               length, less what is left

One rank reads for all: a thousand ranks that each read a thousand blobs would ask storage for a
million. A rank that raised alone would leave the others waiting, so its error goes to all.

On the same grid with another batch size there is only to count: the loaders go on by themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from air_lightning.data.loader import DataLoader
from air_lightning.data.stream import data_rank
from air_lightning.errors import GridMismatchError, StateError
from air_lightning.integrations.loaders import is_begun

_COUNTS = ("ready", "started", "processed", "completed")

ReadBlobs = Callable[[Iterable[int]], list[Any]]
"""Reads the blobs of these ranks; None for a rank without one."""


class Then(NamedTuple):
    """What all ranks of a checkpoint's run knew together.

    Attributes:
        states: For each train loader its states, one of each share; None for one without.
        epoch_done: Whether the Trainer's epoch was over.
    """

    states: list[list[Any] | None]
    epoch_done: bool


def is_elsewhere(loader: Any, state: Any) -> bool:
    """Whether a state is of another grid than its loader, one that shares out what is left."""
    if not (isinstance(loader, DataLoader) and loader.elastic and isinstance(state, Mapping)):
        return False
    grid = state.get("world_size"), state.get("num_workers")
    return grid != (data_rank()[1], loader.num_workers)


def read_states(
    read: ReadBlobs, loaders: Sequence[Any], own: Sequence[Any], world_size: int, here: int
) -> Then:
    """Read what the loaders need to go on here; one rank does, for all.

    Args:
        read: Reads blobs.
        loaders: The train loaders here.
        own: This rank's state of each.
        world_size: Ranks of the checkpoint.
        here: Ranks of this run.

    Raises:
        GridMismatchError: A loader cannot or may not be continued here.
        StateError: A rank's part of the checkpoint is missing, or of other loaders.
    """
    shared = [_is_shared(x, state, world_size, here) for x, state in zip(loaders, own, strict=True)]
    blobs = read(range(world_size))
    for rank, blob in enumerate(blobs):
        if not blob or len(blob.get("loaders") or ()) != len(loaders):
            raise StateError(
                f"The checkpoint was taken with {world_size} ranks, and has no positions of "
                f"{len(loaders)} train loaders for rank {rank}: what is left cannot be shared out. "
                "Resume from another checkpoint, or begin an epoch from its weights alone."
            )
    states = [
        _one_of_each_share(blob["loaders"][i] for blob in blobs) if wanted else None
        for i, wanted in enumerate(shared)
    ]
    return Then(states, all(blob["epoch_done"] for blob in blobs))


def _is_shared(loader: Any, state: Any, world_size: int, here: int) -> bool:
    """Whether a loader takes the states of all ranks; False where its own one will do."""
    if state is None or (isinstance(loader, DataLoader) and loader.elastic):
        return state is not None
    if world_size == here:
        return False  # the loader itself refuses what is not of its grid
    raise GridMismatchError(
        f"The checkpoint was taken with {_words(world_size, state)}, and this run has "
        f"{_words(here, {'num_workers': getattr(loader, 'num_workers', None)})}: the loader "
        f"positions of another grid would skip and repeat files. Start with {world_size} ranks, "
        f"{_remedy(loader)}, or begin a new epoch from the checkpoint's weights alone."
    )


def _remedy(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return (
            "or give AirDataModule, air_lightning.DataLoader or AirResume elastic=True, to share "
            "out what is left over this grid"
        )
    return (
        f"or use air_lightning.DataLoader with elastic=True: a {type(loader).__name__} cannot "
        "share out what other grids left"
    )


def _words(ranks: int, state: Any) -> str:
    workers = state.get("num_workers") if isinstance(state, Mapping) else None
    return f"{ranks} ranks" if workers is None else f"{ranks} ranks (num_workers={workers})"


def _one_of_each_share(states: Iterable[Any]) -> list[Any]:
    # The ranks of one tensor parallel group read the same files, and saved the same position.
    shares: dict[Any, Any] = {}
    for state in states:
        shares.setdefault(state.get("rank") if isinstance(state, Mapping) else None, state)
    return list(shares.values())


def recount(trainer: Any, loaders: Sequence[Any], then: Then, stage: dict[str, Any]) -> bool:
    """Make Lightning's batches of the epoch those of this grid; the loaders were loaded.

    The batches of the whole run, and the optimizer's steps, stay what they were.

    Args:
        trainer: The Trainer.
        loaders: The train loaders here.
        then: What ``read_states`` gave.
        stage: The moment of the save (stages.py); where nothing is left it becomes an epoch's end.

    Returns:
        Whether the epoch is over: it was when it was saved, or nothing is left for this grid.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    combined = trainer.fit_loop._combined_loader
    epoch = _Epoch.of(combined, loaders, then.states)
    if epoch is None:  # what decides its length has no position, and begins anew
        return then.epoch_done
    done = epoch.length if then.epoch_done else epoch.done(progress, trainer.limit_train_batches)
    if done >= epoch.length and not then.epoch_done:
        _end_at_last_batch(trainer.fit_loop.epoch_loop, stage)
    _shift(trainer, done - progress.current.processed, ended=bool(stage.get("batch_ended")))
    # Batches of the validation that was under way on another grid: it begins anew.
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.reset()
    return bool(done >= epoch.length)


def recount_sizes(
    trainer: Any, loaders: Sequence[Any], own: Sequence[Any] | None, stage: dict[str, Any]
) -> bool:
    """The same for the same grid, where loaders go on in batches of another size.

    An epoch has another number of these. Nothing is done where all are of the size that they were.

    Args:
        trainer: The Trainer.
        loaders: The train loaders here, which were loaded.
        own: This rank's state of each.
        stage: As ``recount`` takes it.

    Returns:
        Whether the epoch is over, since nothing is left.
    """
    known = [
        [state] if isinstance(loader, DataLoader) and state else None
        for loader, state in zip(loaders, own or [None] * len(loaders), strict=True)
    ]
    changed = [
        states is not None
        and is_begun(states[0])
        and states[0].get("batch_size") != loader.batch_size
        and loader.batches_left is not None
        for loader, states in zip(loaders, known, strict=True)
    ]
    if not any(changed):
        return False
    return recount(trainer, loaders, Then(known, epoch_done=False), stage)


def _shift(trainer: Any, batches: int, *, ended: bool) -> None:
    loop = trainer.fit_loop.epoch_loop
    progress, every = loop.batch_progress, trainer.accumulate_grad_batches
    current = progress.current
    then = current.ready
    for name in _COUNTS:
        setattr(current, name, getattr(current, name) + batches)
    if ended and not progress.is_last_batch:
        # The step of the loggers. After the batch Lightning adds one if the number of batches is
        # that of an optimizer step, which it may be on one of the grids only.
        loop._batches_that_stepped += (then % every == 0) - (current.ready % every == 0)


def _end_at_last_batch(epoch_loop: Any, stage: dict[str, Any]) -> None:
    """Let it be a save after an epoch's last batch, whose end is yet to come."""
    epoch_loop.batch_progress.is_last_batch = True
    # Done by Lightning within the last batch, before the save that this looks like.
    epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    if not stage.get("batch_ended"):
        epoch_loop._batches_that_stepped -= 1  # what follows a batch will count it
    stage.update(is_last_batch=True, batch_ended=True, validation_due=True)


class _Epoch(NamedTuple):
    """An epoch of the Trainer's here, and what its loaders have left of it.

    Attributes:
        length: Batches that the Trainer takes.
        whole: Batches of the loader that decides when it ends, without the Trainer's limit.
        left: Batches that are left of it.
    """

    length: int
    whole: int
    left: int

    @classmethod
    def of(
        cls, combined: CombinedLoader, loaders: Sequence[Any], states: Sequence[list[Any] | None]
    ) -> "_Epoch | None":
        shortest = combined._mode == "min_size"
        limits = combined.limits or [float("inf")] * len(loaders)
        lengths = [_length(loader) for loader in loaders]
        taken = [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]
        length = min(taken) if shortest else max(taken)
        left = [
            _left(loader, of_all)
            for loader, of_all, batches in zip(loaders, states, taken, strict=True)
            # Where the longest decides, others begin again within the epoch.
            if of_all is not None and (shortest or batches == length)
        ]
        if not left or length == float("inf"):
            return None
        whole = next(n for n, batches in zip(lengths, taken, strict=True) if batches == length)
        return cls(int(length), int(whole), min(left) if shortest else max(left))

    def done(self, progress: Any, limit: Any) -> int:
        """How many of its batches count as trained on."""
        done = self.whole - self.left
        if type(limit) is int and self.length < self.whole:
            # So many steps make an epoch, whatever the grid; as many of them as were taken.
            done = max(progress.current.processed, self.length - self.left)
        return max(0, min(done, self.length))


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def _left(loader: Any, states: list[Any]) -> int:
    here = loader.state_dict()
    # It went to the next epoch by itself where nothing was left for it.
    is_next = here["epoch"] > min(state["epoch"] for state in states)
    left = loader.batches_left
    return 0 if is_next else len(loader) - here["batches"] if left is None else int(left)
