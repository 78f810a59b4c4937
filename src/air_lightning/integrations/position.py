"""What each rank alone knows of a training run: loader positions and random generators.

Lightning saves rank 0's loader state and gives it to every rank, loads it only where its own
progress says that an epoch was interrupted, and, for a loader without length, has fetched one
batch that was not trained on. Here every rank keeps its own, in one blob of the same commit:

    save     position(trainer)      loader states less what the fetcher holds ahead, and RNG
    restore  Restorer.arm(blob)
               the loops' counters  before they are run (stages.py)
               loader states        where Lightning would load its own: before ``iter()``; on
                                    another grid from the states of all ranks (regrid.py)
               RNG                  when the moment of the save is reached; in a step, after its
                                    batch was fetched: creating iterators draws from torch's
                                    generator
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
from air_lightning.data.loader import DataLoader
from air_lightning.errors import StateError
from air_lightning.integrations import metrics, regrid, stages
from air_lightning.integrations.buffers import Buffers
from air_lightning.integrations.foreign import begin_without_position
from air_lightning.integrations.gradients import Gradients
from air_lightning.integrations.loaders import (
    batches_ahead,
    end_passes,
    load,
    loaders_of,
    made_in,
    open_batches,
    restore_made_in,
    state_of,
    validation_loop,
)
from air_lightning.integrations.several import Ends, ended, left_out, restore_ended
from air_lightning.integrations.validation import Validation

BLOB_VERSION = 1


def position(trainer: Any, ends: Ends) -> dict[str, Any]:
    """The blob of this rank, as of the last batch that was trained on."""
    loop = trainer.fit_loop
    # The learning-rate finder saves before there are loaders, and goes on from there.
    loaders = None
    if loop._combined_loader is not None:
        ago = ends.batches_ago(loop, batches_ahead(loop))
        loaders = [state_of(loader, n) for loader, n in zip(loaders_of(loop), ago, strict=True)]
    is_over = loop._combined_loader is not None and stages.is_epoch_over(trainer)
    return {
        "version": BLOB_VERSION,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "epoch_done": is_over,
        "loaders": loaders,
        "ended": [] if is_over else ended(loop, loaders or []),
        "made_in": made_in(loop),
        "validation_epochs": [getattr(x, "epoch", None) for x in loaders_of(validation_loop(loop))],
        "rng": capture_rng_state(),
    }


class Origin(NamedTuple):
    """What all ranks must know of the run that saved a checkpoint."""

    version: Any
    world_size: int
    loaders: int | None  # number of train loaders; None where there were none yet
    has_positions: bool  # of loaders, which belong to that world size
    stage: Mapping[str, Any] | None  # as stages.py has it
    epoch_done: bool
    put_off: tuple[bool, ...]  # of each ModelCheckpoint: its save waits for a validation
    syncs_buffers: bool  # whether DDP was to copy rank 0's before the next forward pass

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
            stage=blob.get("stage"),
            epoch_done=bool(blob.get("epoch_done")),
            put_off=tuple(blob.get("put_off") or ()),
            syncs_buffers=bool(blob.get("syncs_buffers", True)),
        )


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
        self._blob: Mapping[str, Any] = {}
        self._is_foreign = False  # whether what was loaded is a checkpoint of Lightning's own
        self._read_blobs: regrid.ReadBlobs | None = None
        self._rng_due: Mapping[str, Any] | None = None
        self._validation_due: list[int | None] = []
        self._made_in: list[float] | None = None  # as loaders.py has it
        self._rng_before_batch: Mapping[str, Any] | None = None
        self._is_run = False
        self._stage: dict[str, Any] = {}  # of the save that was loaded
        self.gradients, self.buffers = Gradients(trainer), Buffers(trainer)
        self.ends = Ends()
        self._left_out = contextlib.ExitStack()
        loop = trainer.fit_loop
        self._validation = Validation(validation_loop(loop), self._before_validation)
        self._run_loop = loop.run
        self._load_lightnings = loop._load_combined_loader_states
        self._after_fetch = loop.epoch_loop._on_after_fetch
        # On these instances only: the loader states that Lightning would put into the checkpoint
        # are rank 0's, and a loader of a dataset that has no state would raise there.
        loop.on_save_checkpoint = dict
        loop.run = self._run
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
        self._blob = blob or {}
        self._rng_due = self._blob.get("rng")
        self._made_in = self._blob.get("made_in")
        if origin.world_size != self._trainer.world_size:
            self._tell_of_other_ranks(origin)
        elif blob:
            self._validation_due = blob["validation_epochs"]

    def position(self) -> dict[str, Any]:
        """The blob of this rank; the batch being trained on, if one is, counts as not begun."""
        validation = self._validation
        is_open = open_batches(self._trainer.fit_loop) > 0
        before = {"rng": self._rng_before_batch} if is_open else validation.before
        now = {
            "metrics": None if validation.before else metrics.capture(self._trainer),
            "gradients": self.gradients.capture(is_open=is_open),
        }
        stage = stages.note(
            self._trainer, validates=validation.is_running, has_validated=validation.has_ended
        )
        return {**position(self._trainer, self.ends), **now, **(before or {}), "stage": stage}

    @contextlib.contextmanager
    def validating(self, is_so: bool) -> Iterator[None]:
        """Let positions of the block be those from before the validation under way."""
        self._validation.is_forced = is_so
        try:
            yield
        finally:
            self._validation.is_forced = False

    @property
    def has_validated(self) -> bool:
        """Whether the last hook of a validation is being run."""
        return self._validation.has_ended

    def restore_validation(self) -> None:
        """Let validation loaders go on with the epoch, so with the random draws, they were at."""
        due, self._validation_due = self._validation_due, []
        epochs, self._made_in = self._made_in, None
        if epochs is not None and restore_made_in(self._trainer.fit_loop, epochs):
            return
        for loader, epoch in zip(
            loaders_of(validation_loop(self._trainer.fit_loop)), due, strict=False
        ):
            if isinstance(loader, DataLoader) and epoch is not None:
                loader.set_epoch(epoch)

    def _before_validation(self) -> dict[str, Any]:
        return {"rng": capture_rng_state(), "metrics": metrics.capture(self._trainer)}

    def _run(self) -> None:
        """Run the fit loop, from the moment of the save where one was loaded."""
        origin = self._origin
        self._is_run = True
        self._validation.forget()
        try:
            if origin is None or origin.stage is None:
                self._set_up_and_run()
            else:
                self._restore_what_is_open(origin, between_epochs=origin.stage["between_epochs"])
                self._stage = dict(origin.stage)
                with stages.begun(self._trainer, self._stage, self._restore_rng):
                    self._set_up_and_run()
            self._restore_rng()  # of a run that was over: its loops are not entered
        finally:
            self._is_run = False

    def _set_up_and_run(self) -> None:
        loop = self._trainer.fit_loop
        has_ended = self._blob.get("ended") or []
        with self._left_out:
            # Asking for trainer.estimated_stepping_batches makes the loaders, and their iterators,
            # before there is anything to restore.
            is_early = loop._combined_loader is not None
            if is_early and (self._origin is not None or self._is_foreign):
                self._load_loaders()
                iter(loop._data_fetcher)
            loop.setup_data()
        restore_ended(loop._combined_loader, has_ended)
        self._run_loop()

    def _restore_what_is_open(self, origin: Origin, *, between_epochs: bool) -> None:
        if origin.world_size != self._trainer.world_size:
            return
        self.buffers.go_on(syncs=origin.syncs_buffers)
        if not self._blob:
            return
        metrics.restore(self._trainer, self._blob["metrics"], within_epoch=not between_epochs)
        self.gradients.restore(self._blob["gradients"])
        self.buffers.restore(self._blob)

    def _restore_rng(self) -> None:
        rng, self._rng_due = self._rng_due, None
        if rng is not None:
            restore_rng_state(rng)

    def _tell_of_other_ranks(self, origin: Origin) -> None:
        rank_zero_info(
            f"The checkpoint was taken with {origin.world_size} ranks, and this run has "
            f"{self._trainer.world_size}. Random generators go on on ranks that were there; those "
            "of others are as this start seeded them. Validation loaders begin anew."
        )

    def _load_loaders(self) -> None:
        if not self._is_run:
            return
        blob, self._blob = self._blob, {}
        origin, self._origin = self._origin, None
        loop = self._trainer.fit_loop
        loaders = list(loaders_of(loop))
        is_foreign, self._is_foreign = self._is_foreign, False
        if origin is None:
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
        is_over = origin.epoch_done
        # Overfitting trains on the same batches in each epoch, from the first on.
        if not (is_over and self._trainer.overfit_batches):
            _load_all(loaders, blob.get("loaders"), then.states)
        if any(then.states):
            is_over = regrid.recount(self._trainer, loaders, then, self._stage)
        else:
            self._left_out.enter_context(left_out(loop._combined_loader, blob.get("ended") or []))
            own = blob.get("loaders")
            is_over = is_over or regrid.recount_sizes(self._trainer, loaders, own, self._stage)
        if is_over:
            end_passes(self._trainer)

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

    def _on_after_fetch(self) -> None:
        self._after_fetch()
        self.ends.note(self._trainer.fit_loop)
        self.gradients.on_batch_start()
        self._restore_rng()
        # For a save in the middle of this batch, as on an exception: it will be done again.
        self._rng_before_batch = capture_rng_state()


def _load_all(loaders: list[Any], own: list[Any] | None, of_all: list[Any]) -> None:
    """Give each loader the states of all ranks where it goes on on another grid, else its own."""
    for loader, state, states in zip(loaders, own or [None] * len(loaders), of_all, strict=True):
        if (states or state) is not None:
            load(loader, states or state)
