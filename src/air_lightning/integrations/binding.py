"""The methods that replace those of one strategy instance, so that every rank saves and loads.

Each call of the host takes these steps, on every rank::

    save_checkpoint             wait for the save in flight; agree on the path; take this rank's
                                position; AirCheckpointIO stages, the rest is in the background
    load_checkpoint             rank 0 finds it; each rank reads it once it sees it, too;
                                if sharded its own part; this rank's blob -> Restorer
    load_model_state_dict       the weights; a checkpoint of another model names the keys
    load_optimizer_state_dict   the moments; sharded strategies are never asked by Lightning, and
                                get them with the weights

``strategies.py`` knows what differs between the strategies.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.trainer.states import TrainerStatus

from air_lightning.checkpoint.restore import read_rank_blobs
from air_lightning.checkpoint.sight import UNSEEN_S, when_seen
from air_lightning.checkpoint.together import together
from air_lightning.errors import (
    CheckpointMismatchError,
    InvalidArgumentError,
    SaveFailedError,
)
from air_lightning.integrations import files
from air_lightning.integrations.averaging import keep_places_in_saves
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.choice import of_rank_zero
from air_lightning.integrations.entrance import Entrance
from air_lightning.integrations.located import Located, locate, whole
from air_lightning.integrations.model_checkpoint import (
    Adopted,
    LoggerNotices,
    save_on_exception_quietly,
)
from air_lightning.integrations.position import Origin, Restorer
from air_lightning.integrations.strategies import ModelParallelState, ReplicatedState
from air_lightning.volumes import path as volume_path

logger = logging.getLogger("air_lightning")

_T = TypeVar("_T")

_SUPPORTED = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, FSDPStrategy)
# Subclasses of those above that keep their state elsewhere.
_REFUSED = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)


def state_of(strategy: Any) -> ReplicatedState:
    """Bind what belongs to the kind of this strategy.

    Raises:
        InvalidArgumentError: It is of no kind whose state this release can save.
    """
    if not isinstance(strategy, _SUPPORTED) or isinstance(strategy, _REFUSED):
        raise InvalidArgumentError(
            f"AirCheckpointIO was given to a Trainer with {type(strategy).__name__}; this release "
            f"saves under {', '.join(kind.__name__ for kind in _SUPPORTED)} and their subclasses "
            "(not DeepSpeed, not XLA). Choose one of these, or leave the plugin out."
        )
    if isinstance(strategy, FSDPStrategy):
        # Not at the top: it needs private classes of torch's that no other strategy does.
        from air_lightning.integrations.fsdp import FsdpState

        return FsdpState(strategy)
    is_sharded = isinstance(strategy, ModelParallelStrategy)
    return ModelParallelState(strategy) if is_sharded else ReplicatedState(strategy)


class Binding:
    """The methods that replace those of one strategy instance."""

    def __init__(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        self._state = state_of(strategy)
        self.weights_only: bool | None = None
        self.asked: Any = None  # the ckpt_path that the call under way was given
        self.resume: Callable[[Any, Any], Any] | None = None  # AirResume's choice, of all ranks
        self.io: AirCheckpointIO = strategy.checkpoint_io
        self._trainer: Any = trainer
        self._strategy = strategy
        self._restorer = Restorer(trainer, self._agree)
        self.gradients, self.ends = self._restorer.gradients, self._restorer.ends
        self._load_lightnings = strategy.load_checkpoint
        self._is_restored = False
        self._prepared = False
        self._saved: tuple[int, str] | None = None
        self._chosen: str | None = None
        self.entrance = Entrance(self.io.timeout_s)
        self.notices = LoggerNotices(self.io)
        self.io.at_teardown(self.notices.give_at_end)
        for lightnings in trainer.loggers:
            self.notices.defer(lightnings)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint):
                save_on_exception_quietly(callback)
        self._adopted = [
            Adopted(callback, self.io)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        ]
        keep_places_in_saves(trainer)
        strategy.save_checkpoint = self.save_checkpoint
        strategy.load_checkpoint = self.load_checkpoint
        strategy.load_model_state_dict = self.load_model_state_dict
        strategy.load_optimizer_state_dict = self.load_optimizer_state_dict

    def go_on_elsewhere(self) -> None:
        """Let every train loader of ours go on on another grid, whatever it was told itself."""
        self._restorer.elastic = True

    def take_torn_names(self) -> None:
        """Let ModelCheckpoints save over what a kill left of this run's saves."""
        for adopted in self._adopted:
            adopted.resumes = True

    def restore_validation(self) -> None:
        """Put the validation loaders where they were, once they are there."""
        self._restorer.restore_validation()

    def note_alike(self) -> None:
        """Note which parameters the strategy keeps equal on all ranks, before any is unfrozen."""
        self._state.note_alike()

    def prepare_once(self) -> None:
        """Allocate staging memory in the background, once the optimizers have their states."""
        states = [state for own in self._strategy.optimizers for state in own.state.values()]
        if self._prepared or not states:
            return
        self._prepared = True
        self.io.prepare(self._state.staged_here())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Every rank's part of a save."""
        interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED
        self.entrance.enter(interrupted=interrupted)
        source = next((adopted.source for adopted in self._adopted if adopted.source), None)
        if source is not None and self._agree(lambda: self.io.clone(source, filepath)):
            return
        self._wait_for_last_save()
        self.notices.give()
        position = self._restorer.position()  # calls the user's code, which may change tensors
        with self.io.begun(checkpoint):
            target = self._save_on_all_ranks(checkpoint, position, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            self._saved = (self._batches(), volume_path.parent(target))
        if self._trainer.state.finished:
            # Nothing of the Trainer's comes after this that could raise a background error.
            self.io.wait()

    def _save_on_all_ranks(
        self, checkpoint: dict[str, Any], position: dict[str, Any], filepath: Any, options: Any
    ) -> str:
        # The name may hold a metric that differs in the last digit, or a time; and whether a
        # complete checkpoint is in the way must look the same to all.
        buffers = self._restorer.buffers
        target, first = self._agree(
            lambda: (self.io.choose_target(filepath), buffers.prints(checkpoint))
        )
        optimizers = len(checkpoint.get("optimizer_states", ()))
        self.io.save_on_all_ranks(
            checkpoint,
            target,
            optimizer_names=self._state.optimizer_names(optimizers),
            rank_blob=position | buffers.capture(checkpoint, first) | {"put_off": self._put_off()},
            alike=self._state.alike,
            storage_options=options,
        )
        return target

    def has_saved(self, roots: list[str]) -> bool:
        """Whether the batch trained on last is in a checkpoint, or a save in flight, of these."""
        return self._saved is not None and (
            self._saved[0] == self._batches() and self._saved[1] in roots
        )

    def validating(self, is_so: bool) -> AbstractContextManager[None]:
        """Let what is saved run the validation under way from its beginning when it is resumed."""
        return self._restorer.validating(is_so)

    def _put_off(self) -> list[bool]:
        """Of each ModelCheckpoint, whether it saves at the end of a validation to come."""
        # In the last hook of one, what another callback is yet to save is not put off again.
        is_over = self._restorer.has_validated
        return [adopted.put_off and not is_over for adopted in self._adopted]

    def _batches(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _agree(self, choose: Callable[[], _T]) -> _T:
        """Rank 0's choice, or its error, on every rank."""
        return of_rank_zero(self._strategy, choose)

    def _wait_for_last_save(self) -> None:
        try:
            self.io.wait()
        except SaveFailedError as error:
            if self._trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            # A checkpoint on exception is being saved: the user's own error must not be masked.
            logger.error("%s", error, exc_info=error)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Every rank's part of a load."""
        is_fit = self._trainer.state.fn == "fit"
        self.io.wait()
        located = self._agree(lambda: self._locate(checkpoint_path, is_fit))
        if self._state.restores_all:
            told = self.weights_only if weights_only is None else weights_only
            checkpoint, blob = self._load_shards(located, told)
        else:
            checkpoint, blob = self._on_all(
                located, lambda: self.io.load(located, weights_only=weights_only)
            )
        files.require_trainers(checkpoint, checkpoint_path)
        if is_fit:

            def read_blobs(ranks: Iterable[int]) -> list[Any]:
                return self._read_blobs(located.target, ranks, weights_only)

            origin = self._agree(lambda: Origin.of(blob))
            self._restorer.arm(blob, origin, read_blobs)
            for adopted, is_so in zip(
                self._adopted, origin.put_off if origin else (), strict=False
            ):
                adopted.put_off = is_so
        return checkpoint

    def take(self, chosen: str) -> None:
        """Note what was found whole a moment ago: it need not be looked for again."""
        self._chosen = chosen

    def _locate(self, path: Any, is_fit: bool) -> Located:
        chosen, self._chosen = self._chosen, None
        if path == chosen:
            return whole(path)
        return locate(path, self.io.storage_options, resumable=is_fit)

    def _on_all(self, located: Located, read: Callable[[], _T]) -> _T:
        """Read on every rank: one that fails alone would leave the others in a collective."""
        step = read
        if located.is_whole and not self._trainer.is_global_zero:
            bound_s = min(UNSEEN_S, self.io.timeout_s / 2)  # others wait for it in a collective
            step = partial(when_seen, read, located.target, self.io.storage_options, bound_s)
        return together(step, f"Loading {located.target}", self.io.group)

    def _read_blobs(
        self, target: str, ranks: Iterable[int], weights_only: bool | None
    ) -> list[Any]:
        told = self.weights_only if weights_only is None else weights_only
        # Many small reads from as many files: what they cost is the wait for each.
        return read_rank_blobs(self.io.reader(target, thread_count=16), ranks, weights_only=told)

    def _load_shards(
        self, located: Located, weights_only: bool | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        self._is_restored = located.is_lightnings or located.is_file
        if self._is_restored:
            path = volume_path.local_dir(located.target) or located.target
            return self._load_lightnings(path, **files.told(weights_only)), None
        sharding = self._state.sharding()
        moments = self._trainer.state.fn == "fit"
        return self._on_all(
            located,
            lambda: self.io.read(located.target, weights_only, sharding=sharding, moments=moments),
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and the moments where Lightning takes that for the strategy's task.

        Raises:
            CheckpointMismatchError: They are another model's; names keys and shapes.
        """
        if self._is_restored:
            return
        try:
            self._state.load_model(checkpoint, strict)
        except RuntimeError as error:
            wanted = self._state.sharding()
            raise CheckpointMismatchError(
                _difference(wanted, checkpoint["state_dict"], self._trainer.ckpt_path)
            ) from error
        is_fitting = self._trainer.state.fn == "fit"
        if self._state.restores_all and is_fitting and "optimizer_states" in checkpoint:
            self.load_optimizer_state_dict(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states.

        Raises:
            CheckpointMismatchError: They are of other optimizers.
        """
        states, optimizers = checkpoint["optimizer_states"], self._strategy.optimizers
        try:
            if len(states) != len(optimizers):
                raise ValueError(f"{len(states)} optimizers in the checkpoint")
            self._state.load_optimizers(checkpoint)
        except ValueError as error:
            raise CheckpointMismatchError(
                f"The checkpoint {self._trainer.ckpt_path} holds {len(states)} optimizer states "
                f"with {[_group_sizes(state) for state in states]} parameters per group; this "
                f"model has {len(optimizers)} optimizers with "
                f"{[_group_sizes(optimizer.state_dict()) for optimizer in optimizers]}. Give "
                "configure_optimizers the groups that the checkpoint was taken with."
            ) from error


def _group_sizes(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def _difference(wanted: Mapping[str, Any], got: Mapping[str, Any], path: Any) -> str:
    missing = sorted(wanted.keys() - got.keys())
    unexpected = sorted(got.keys() - wanted.keys())
    shapes = [
        f"{key}: {tuple(got[key].shape)} in the checkpoint, {tuple(wanted[key].shape)} in the model"
        for key in sorted(wanted.keys() & got.keys())
        if getattr(wanted[key], "shape", None) != getattr(got[key], "shape", None)
    ]
    return (
        f"The checkpoint {path} is of another model. Missing keys (in the model, not in the "
        f"checkpoint): {missing}. Unexpected keys (in the checkpoint, not in the model): "
        f"{unexpected}. Other shapes: {shapes}. Build the model that was saved, or load with "
        "strict_loading=False on the LightningModule to leave out what differs in name."
    )
