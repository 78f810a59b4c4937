"""What each rank alone knows of a training run: loader positions and random generators.

Lightning saves rank 0's loader state and gives it to every rank, loads it only where its own
progress says that an epoch was interrupted, and, for a loader without length, has fetched one
batch that was not trained on. Here every rank keeps its own, in one blob of the same commit:

    save     position(trainer)      loader states less what the fetcher holds ahead, and RNG
    restore  Restorer.arm(blob)
               loader states        where Lightning would load its own: before ``iter()``
               RNG                  after the first batch was fetched, before anything uses it:
                                    creating iterators draws from torch's generator
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.loops.loop import _Loop

from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
from air_lightning.data.loader import DataLoader
from air_lightning.errors import GridMismatchError, NotCheckpointableError, StateError

BLOB_VERSION = 1

logger = logging.getLogger("air_lightning")


def position(trainer: Any, rng: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The blob of this rank, as of the last batch that was trained on.

    Args:
        trainer: The Trainer.
        rng: The generators' states before the batch that is being trained on, if one is.
    """
    loop = trainer.fit_loop
    ahead = _batches_ahead(loop)
    # The learning-rate finder saves before there are loaders, and goes on from there.
    loaders = None if loop._combined_loader is None else [_state(x, ahead) for x in _loaders(loop)]
    return {
        "version": BLOB_VERSION,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "epoch_done": loop.epoch_loop._num_ready_batches_reached() and not _open_batches(loop),
        "loaders": loaders,
        "validation_epochs": [getattr(x, "epoch", None) for x in _loaders(_validation(loop))],
        "rng": rng or capture_rng_state(),
    }


class Origin(NamedTuple):
    """What all ranks must know of the run that saved a checkpoint."""

    version: Any
    world_size: int
    has_positions: bool  # of loaders, which belong to that world size

    @classmethod
    def of(cls, blob: Mapping[str, Any] | None) -> "Origin | None":
        """As a rank's blob tells it; None without a blob."""
        if not blob:
            return None
        states = blob.get("loaders") or ()
        has_positions = any(state is not None for state in states)
        return cls(blob.get("version"), blob.get("world_size", 0), has_positions)


def start_next_pass(trainer: Any) -> None:
    """Move every train loader that was left in the middle of a pass to its next epoch.

    ``limit_train_batches`` ends an epoch early. Without this, the next pass would begin the same
    epoch again, and the files past the limit would never be seen.
    """
    loop = trainer.fit_loop
    for loader in _loaders(loop):
        state = _state(loader, _batches_ahead(loop))
        if not isinstance(loader, DataLoader) or state is None:
            continue
        if trainer.overfit_batches > 0:
            loader.set_epoch(0)  # the same batches again and again are what was asked for
        elif state["batches"] > 0:
            loader.set_epoch(loader.epoch + 1)
        elif trainer.reload_dataloaders_every_n_epochs and loader.epoch < trainer.current_epoch:
            loader.set_epoch(trainer.current_epoch)  # a new loader begins at epoch 0


def enter_next_epoch(trainer: Any) -> None:
    """Let a run that resumed at an epoch's last step count the next epoch as begun.

    Lightning moves its count of ended epochs on, and still takes the restart for one in the middle
    of an epoch: it never counts the next one as begun. A checkpoint of a later epoch's end then
    looks like one in the middle, and the resume from it trains that whole epoch again.
    """
    loop = trainer.fit_loop
    progress = loop.epoch_progress.current
    if loop.restarted_mid_epoch and progress.processed >= progress.ready:
        loop.reset_restart_stage()


class Validation:
    """Runs a validation that was broken off again, from its beginning.

    Lightning goes on after it where a checkpoint was taken within it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rng_due: Mapping[str, Any] | None = None
        self._rng: Mapping[str, Any] | None = None
        self.is_saved = False
        loop = _validation(trainer.fit_loop)
        self._run = loop.run
        loop.run = self._run_noted

    @property
    def rng_before(self) -> Mapping[str, Any] | None:
        """The generators' states before it, where that is what is saved."""
        return (self._rng or self._rng_due) if self.is_saved else None

    def arm(self, rng: Mapping[str, Any]) -> None:
        """Keep the generators' states for the validation that will be run again."""
        self._rng_due = rng

    def begin_again(self) -> None:
        """Have the epoch's loop run it first; once its stage of restarting is known."""
        if self._rng_due is None:
            return
        loop = _validation(self._trainer.fit_loop)
        loop.restarting = False
        with contextlib.suppress(ImportError):  # older releases run it again by themselves
            from lightning.pytorch.loops.evaluation_loop import RestartStage

            loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION

    def _run_noted(self) -> Any:
        rng, self._rng_due = self._rng_due, None
        if rng is not None:
            restore_rng_state(rng)
        if not self._trainer.sanity_checking:
            self._rng = capture_rng_state()
        try:
            return self._run()
        finally:
            self._rng = None


class Restorer:
    """Gives each rank its own loader states and generators back, at the moments that are right."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaders_due: Mapping[str, Any] | None = None
        self._rng_due: Mapping[str, Any] | None = None
        self._validation_due: list[int | None] = []
        self._rng_before_batch: Mapping[str, Any] | None = None
        self._validation = Validation(trainer)
        loop = trainer.fit_loop
        self._load_lightnings = loop._load_combined_loader_states
        self._after_fetch = loop.epoch_loop._on_after_fetch
        # On these instances only: the loader states that Lightning would put into the checkpoint
        # are rank 0's, and a loader of a dataset that has no state would raise there.
        loop.on_save_checkpoint = dict
        loop._load_combined_loader_states = self._load_loaders
        loop.epoch_loop._on_after_fetch = self._on_after_fetch

    def arm(self, blob: Mapping[str, Any] | None, origin: Origin | None) -> None:
        """Keep a loaded blob until the loaders and the first batch are there.

        Args:
            blob: This rank's blob, or None when the checkpoint has none of this rank.
            origin: What rank 0's blob says, so that every rank decides alike: one that the
                checkpoint does not know would else wait for those that raised. None where there
                is no blob, as in Lightning's own files.

        Raises:
            StateError: The blob has a version that is not known here.
            GridMismatchError: The loader positions are of another world size.
        """
        if origin is None:
            return
        if origin.version != BLOB_VERSION:
            raise StateError(
                f"The per-rank state has version {origin.version!r}; this release reads "
                f"version {BLOB_VERSION}. Load it with the release that wrote it."
            )
        here = self._trainer.world_size
        if origin.world_size != here:
            self._go_on_elsewhere(origin, here)
        elif blob:
            self._loaders_due, self._rng_due = blob, blob["rng"]
            self._validation_due = blob["validation_epochs"]
            if blob.get("in_validation"):
                self._rng_due = None
                self._validation.arm(blob["rng"])

    def position(self) -> dict[str, Any]:
        """The blob of this rank; the batch being trained on, if one is, counts as not begun."""
        is_open = _open_batches(self._trainer.fit_loop) > 0
        rng = self._rng_before_batch if is_open else self._validation.rng_before
        return {**position(self._trainer, rng), "in_validation": self._validation.is_saved}

    @contextlib.contextmanager
    def validating(self, is_so: bool) -> Iterator[None]:
        """Let positions of the block be those from before the validation under way."""
        self._validation.is_saved = is_so
        try:
            yield
        finally:
            self._validation.is_saved = False

    def restore_validation(self) -> None:
        """Let validation loaders go on with the epoch, so with the random draws, they were at."""
        due, self._validation_due = self._validation_due, []
        for loader, epoch in zip(_loaders(_validation(self._trainer.fit_loop)), due, strict=False):
            if isinstance(loader, DataLoader) and epoch is not None:
                loader.set_epoch(epoch)
        self._validation.begin_again()

    def _go_on_elsewhere(self, origin: "Origin", here: int) -> None:
        if origin.has_positions:
            raise GridMismatchError(
                f"The checkpoint was taken with {origin.world_size} ranks, and this run has "
                f"{here}: the loader positions of another grid would skip and repeat files. Start "
                f"with {origin.world_size} ranks, or begin a new epoch from its weights alone."
            )
        if self._trainer.is_global_zero:
            logger.info(
                "The checkpoint was taken with %d ranks, and this run has %d: random generators "
                "begin anew.",
                origin.world_size,
                here,
            )

    def _load_loaders(self) -> None:
        blob, self._loaders_due = self._loaders_due, None
        if blob is None:
            self._load_lightnings()
            return
        loop = self._trainer.fit_loop
        if blob["epoch_done"]:
            _begin_next_epoch(loop)
        if blob["loaders"] is None:
            return
        loaders = list(_loaders(loop))
        if len(loaders) != len(blob["loaders"]):
            raise StateError(
                f"The checkpoint has the positions of {len(blob['loaders'])} train loaders, and "
                f"this run has {len(loaders)}; give the same loaders in the same order."
            )
        for loader, state in zip(loaders, blob["loaders"], strict=True):
            if state is not None:
                next_epoch = blob["epoch_done"] and not self._trainer.overfit_batches
                _load(loader, state, epoch_done=next_epoch)

    def _on_after_fetch(self) -> None:
        self._after_fetch()
        rng, self._rng_due = self._rng_due, None
        if rng is not None:
            restore_rng_state(rng)
        # For a save in the middle of this batch, as on an exception: it will be done again.
        self._rng_before_batch = capture_rng_state()


def _begin_next_epoch(fit_loop: Any) -> None:
    """Let a Trainer with ``max_steps`` resume an ended epoch as one with ``max_epochs`` does.

    Lightning takes every restart under ``max_steps`` for one in the middle of an epoch, and trains
    one batch more in the epoch that was over; all later epochs are then shifted by one batch.
    """
    progress = fit_loop.epoch_progress.current
    if progress.ready == progress.started == progress.processed:
        # The setter of FitLoop itself would turn it on again.
        _Loop.restarting.fset(fit_loop, False)


def _load(loader: Any, state: dict[str, Any], *, epoch_done: bool) -> None:
    if not hasattr(loader, "load_state_dict"):
        raise StateError(
            f"The checkpoint has the position of a train loader, and this run's "
            f"{type(loader).__name__} takes none; use air_lightning.DataLoader, as when it was "
            "saved."
        )
    loader.load_state_dict(state)
    if epoch_done and isinstance(loader, DataLoader) and state["batches"] > 0:
        # The Trainer ended that epoch before the loader did (limit_train_batches).
        loader.set_epoch(state["epoch"] + 1)


def _loaders(loop: Any) -> Iterator[Any]:
    combined = loop._combined_loader
    return iter(()) if combined is None else iter(combined.flattened)


def _validation(fit_loop: Any) -> Any:
    return fit_loop.epoch_loop.val_loop


def _batches_ahead(fit_loop: Any) -> int:
    """Batches that the loader gave away and that were not trained on to their end."""
    return len(getattr(fit_loop._data_fetcher, "batches", ())) + _open_batches(fit_loop)


def _open_batches(fit_loop: Any) -> int:
    progress = fit_loop.epoch_loop.batch_progress.current
    return int(progress.ready - progress.processed)


def _state(loader: Any, batches_ahead: int) -> dict[str, Any] | None:
    if isinstance(loader, DataLoader):
        try:
            ours: dict[str, Any] = loader.state_dict(batches_ago=batches_ahead)
            return ours
        except NotCheckpointableError:
            return None
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        state: dict[str, Any] = loader.state_dict()
        return state
    return None
