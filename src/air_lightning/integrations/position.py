"""What each rank alone knows of a training run: loader positions and random generators.

Lightning saves rank 0's loader state and gives it to every rank, loads it only where its own
progress says that an epoch was interrupted, and, for a loader without length, has fetched one
batch that was not trained on. Here every rank keeps its own, in one blob of the same commit:

    save     position(trainer)      loader states less what the fetcher holds ahead, and RNG
    restore  Restorer.arm(blob)
               loader states        where Lightning would load its own: before ``iter()``; on
                                    another grid from the states of all ranks (regrid.py)
               RNG                  after the first batch was fetched, before anything uses it:
                                    creating iterators draws from torch's generator
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
from air_lightning.data.loader import DataLoader
from air_lightning.errors import NotCheckpointableError, StateError
from air_lightning.integrations import regrid
from air_lightning.integrations.foreign import begin_without_position

BLOB_VERSION = 1


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
    loaders: int | None  # number of train loaders; None where there were none yet
    has_positions: bool  # of loaders, which belong to that world size
    epoch_done: bool

    @classmethod
    def of(cls, blob: Mapping[str, Any] | None) -> "Origin | None":
        """As a rank's blob tells it; None without a blob."""
        if not blob:
            return None
        states = blob.get("loaders")
        has_positions = any(state is not None for state in states or ())
        count = None if states is None else len(states)
        return cls(
            version=blob.get("version"),
            world_size=blob.get("world_size", 0),
            loaders=count,
            has_positions=has_positions,
            epoch_done=bool(blob.get("epoch_done")),
        )


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
        elif _is_begun(state):
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

    def __init__(self, trainer: Any, agree: Callable[[Callable[[], Any]], Any]) -> None:
        """Take the place of Lightning's own restoring.

        Args:
            trainer: The Trainer.
            agree: Gives rank 0's answer to a question, or its error, to every rank.
        """
        self.elastic = False  # whether every loader of ours may go on on another grid
        self._trainer = trainer
        self._agree = agree
        self._origin: Origin | None = None
        self._is_foreign = False  # whether what was loaded is a checkpoint of Lightning's own
        self._loaders_due: Mapping[str, Any] | None = None
        self._read_blobs: regrid.ReadBlobs | None = None
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

    def arm(
        self,
        blob: Mapping[str, Any] | None,
        origin: Origin | None,
        read_blobs: regrid.ReadBlobs,
    ) -> None:
        """Keep a loaded blob until the loaders and the first batch are there.

        Args:
            blob: This rank's blob, or None when the checkpoint has none of this rank.
            origin: What rank 0's blob says, so that every rank decides alike: one that the
                checkpoint does not know would else wait for those that raised. None where there
                is no blob, as in Lightning's own files.
            read_blobs: Reads those of other ranks, where they are needed.

        Raises:
            StateError: The blob has a version that is not known here.
        """
        self._is_foreign = origin is None
        if origin is None:
            return
        if origin.version != BLOB_VERSION:
            raise StateError(
                f"The per-rank state has version {origin.version!r}; this release reads "
                f"version {BLOB_VERSION}. Load it with the release that wrote it."
            )
        self._origin, self._read_blobs = origin, read_blobs
        self._loaders_due = blob or {}
        self._rng_due = blob["rng"] if blob else None
        if origin.world_size != self._trainer.world_size:
            self._tell_of_other_ranks(origin)
        elif blob:
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

    def _tell_of_other_ranks(self, origin: Origin) -> None:
        rank_zero_info(
            f"The checkpoint was taken with {origin.world_size} ranks, and this run has "
            f"{self._trainer.world_size}. Random generators go on on ranks that were there; those "
            "of others are as this start seeded them. Validation loaders begin anew."
        )

    def _load_loaders(self) -> None:
        blob, self._loaders_due = self._loaders_due, None
        origin, self._origin = self._origin, None
        loop = self._trainer.fit_loop
        loaders = list(_loaders(loop))
        is_foreign, self._is_foreign = self._is_foreign, False
        if blob is None or origin is None:
            if not (is_foreign and begin_without_position(loop, loaders)):
                self._load_lightnings()
            return
        for loader in loaders:
            if isinstance(loader, DataLoader):
                loader.elastic = loader.elastic or self.elastic
        if origin.loaders is not None and len(loaders) != origin.loaders:
            raise StateError(
                f"The checkpoint has the positions of {origin.loaders} train loaders, and "
                f"this run has {len(loaders)}; give the same loaders in the same order."
            )
        then = self._agree(lambda: self._states_of_all(blob, origin, loaders))
        own = blob.get("loaders") or [None] * len(loaders)
        for loader, state, of_all in zip(loaders, own, then.states, strict=True):
            if (of_all or state) is not None:
                _load(loader, of_all or state)
        is_over = bool(blob.get("epoch_done", origin.epoch_done))
        if any(then.states):
            is_over = regrid.recount(self._trainer, loaders, then)
        if is_over:
            _begin_next_epoch(loop)
            self._end_passes(loaders)

    def _states_of_all(
        self, blob: Mapping[str, Any], origin: Origin, loaders: list[Any]
    ) -> regrid.Then:
        """What the loaders need to go on on another grid; nothing on the one they were on."""
        own, here = blob.get("loaders") or [], self._trainer.world_size
        if origin.world_size == here and not any(map(regrid.is_elsewhere, loaders, own)):
            return regrid.Then([None] * len(loaders), epoch_done=False)
        if not origin.has_positions:
            return regrid.Then([None] * len(loaders), epoch_done=False)
        assert self._read_blobs is not None
        return regrid.read_states(self._read_blobs, loaders, own, origin.world_size, here)

    def _end_passes(self, loaders: list[Any]) -> None:
        """Leave no loader in a pass that the Trainer ended before it did (limit_train_batches)."""
        for loader in loaders:
            if isinstance(loader, DataLoader) and not self._trainer.overfit_batches:
                state = _state(loader, 0)
                if state is not None and _is_begun(state):
                    loader.set_epoch(state["epoch"] + 1)

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


def _load(loader: Any, state: Any) -> None:
    if not hasattr(loader, "load_state_dict"):
        raise StateError(
            f"The checkpoint has the position of a train loader, and this run's "
            f"{type(loader).__name__} takes none; use air_lightning.DataLoader, as when it was "
            "saved."
        )
    loader.load_state_dict(state)


def _is_begun(state: Mapping[str, Any]) -> bool:
    """Whether a loader's state is within a pass, be it one that another grid began."""
    return state["batches"] > 0 or bool(state.get("before"))


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
