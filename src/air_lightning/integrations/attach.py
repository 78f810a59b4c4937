"""Binds a Trainer's strategy to AirCheckpointIO, so that every rank takes part.

Lightning's strategies call a CheckpointIO on rank 0 alone. What is bound here is bound on the
*instances* of one Trainer; no class of Lightning's is changed, and nothing happens at import:

    Trainer(plugins=[AirCheckpointIO()])
      callbacks_factory()  (Lightning's entry point)  ->  AirAttach, a callback
        setup: process group is up, nothing is restored yet  ->  bind(trainer)
          strategy.save_checkpoint            every rank's state and position -> AirCheckpointIO
          strategy.load_checkpoint            the checkpoint; this rank's blob -> Restorer
          strategy.load_model_state_dict      a checkpoint of another model names the keys
          strategy.load_optimizer_state_dict  likewise
        on_train_start: an epoch that was resumed at its last step is over
        on_train_epoch_start: a loader left in mid-pass goes to its next epoch
        on_fit_end: the last save is published, or its error raised

``remove_checkpoint`` needs no binding: the strategy asks the CheckpointIO on rank 0, as wanted.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from air_lightning.checkpoint.state import optimizer_names
from air_lightning.errors import (
    AirError,
    CheckpointMismatchError,
    InvalidArgumentError,
    SaveFailedError,
)
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.position import (
    Restorer,
    enter_next_epoch,
    start_next_pass,
)
from air_lightning.volumes import path as volume_path

logger = logging.getLogger("air_lightning")

_BINDING = "_air_lightning_binding"


def callbacks_factory() -> list[Callback]:
    """Lightning calls this for every Trainer, through the package's entry point."""
    return [AirAttach()]


class AirAttach(Callback):
    """Binds a Trainer whose CheckpointIO is an AirCheckpointIO; does nothing to any other."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bind before anything is restored."""
        bind(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct Lightning's count of epochs after a resume at an epoch's last step."""
        binding = bound(trainer)
        if binding is not None:
            enter_next_epoch(trainer)
            binding.restore_validation()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no loader in the middle of an epoch that the Trainer has ended.

        Also where the Trainer saves through another IO: the files past ``limit_train_batches``
        would never be seen.
        """
        if self is next(c for c in _callbacks(trainer) if isinstance(c, AirAttach)):
            start_next_pass(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Have memory for the first save ready, once the optimizers have their states."""
        binding = bound(trainer)
        if binding is not None:
            binding.prepare_once()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return from fit only when the last save is published.

        Raises:
            SaveFailedError: It failed.
        """
        binding = bound(trainer)
        if binding is not None:
            binding.io.wait()


def _callbacks(trainer: Any) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks
    return callbacks


def bound(trainer: Trainer) -> "Binding | None":
    """The binding of this Trainer's present strategy, if there is one."""
    binding: Binding | None = getattr(trainer.strategy, _BINDING, None)
    return binding


def bind(trainer: Trainer) -> "Binding | None":
    """Bind a Trainer's strategy to its AirCheckpointIO, once; None when it has another IO.

    Raises:
        InvalidArgumentError: The strategy is one whose state this release cannot save.
    """
    strategy = trainer.strategy
    if not _uses_ours(strategy):
        return None
    binding = bound(trainer)
    if binding is None:
        binding = Binding(trainer)
        setattr(strategy, _BINDING, binding)
    binding.io.connect()
    return binding


def _uses_ours(strategy: Any) -> bool:
    # Strategies that refuse CheckpointIO plugins raise from the property.
    checkpoint_io = getattr(strategy, "_checkpoint_io", None)
    inner = getattr(checkpoint_io, "checkpoint_io", None)
    if isinstance(inner, AirCheckpointIO):
        raise InvalidArgumentError(
            f"AirCheckpointIO was given inside {type(checkpoint_io).__name__}, which would call it "
            "on rank 0 alone. Give Trainer(plugins=[AirCheckpointIO()]): it is asynchronous itself."
        )
    return isinstance(checkpoint_io, AirCheckpointIO)


def as_written(dirpath: str) -> str:
    """The path that was given as ``ModelCheckpoint(dirpath=...)``.

    Lightning takes ``dbfs:/...`` and ``file:///...`` for relative paths, and would save below the
    working directory: on a cluster, on a disk that goes with the machine.
    """
    prefix = os.getcwd().rstrip("/") + "/"
    rest = dirpath.removeprefix(prefix)
    if rest == dirpath:
        return dirpath
    if rest.startswith("dbfs:/"):
        return volume_path.normalize(rest)
    if rest.startswith("file:/"):
        return rest.removeprefix("file:")
    return dirpath


class Binding:
    """The methods that replace those of one strategy instance."""

    def __init__(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise InvalidArgumentError(
                f"AirCheckpointIO was given to a Trainer with {type(strategy).__name__}; this "
                "release saves under SingleDeviceStrategy and DDPStrategy. Choose one of these, "
                "or leave the plugin out."
            )
        self.io: AirCheckpointIO = strategy.checkpoint_io
        self._trainer: Any = trainer
        self._strategy = strategy
        self._restorer = Restorer(trainer)
        self._load_model = strategy.load_model_state_dict
        self._load_optimizers = strategy.load_optimizer_state_dict
        self._prepared = False
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._adopt(callback)
        strategy.save_checkpoint = self.save_checkpoint
        strategy.load_checkpoint = self.load_checkpoint
        strategy.load_model_state_dict = self.load_model_state_dict
        strategy.load_optimizer_state_dict = self.load_optimizer_state_dict

    def _adopt(self, callback: Any) -> None:
        """Correct what a ModelCheckpoint does only right with files that are there at once."""
        if callback.dirpath is not None:
            callback.dirpath = as_written(callback.dirpath)
        # Lightning links at the call, when the directory of an asynchronous save is not there.
        callback._link_checkpoint = self._link

    def _link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and filepath != linkpath:
            self.io.link(filepath, linkpath)
        trainer.strategy.barrier()

    def restore_validation(self) -> None:
        """Put the validation loaders where they were, once they are there."""
        self._restorer.restore_validation()

    def prepare_once(self) -> None:
        """Allocate staging memory in the background, once the optimizers have their states."""
        optimizers = self._strategy.optimizers
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        if self._prepared or not states:
            return
        self._prepared = True
        weights = self._strategy.lightning_module.state_dict().values()
        moments = [value for state in states for value in state.values()]
        self.io.prepare(
            [
                value
                for value in [*weights, *moments]
                if isinstance(value, torch.Tensor) and value.dim() > 0
            ]
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Every rank's part of a save."""
        self._wait_for_last_save()
        try:
            target = self._agree_on_target(filepath)
        except SaveFailedError as error:
            self._raise_unless_interrupted(error)
            return
        named = list(self._strategy.lightning_module.named_parameters())
        states = checkpoint.get("optimizer_states", ())
        optimizers = self._strategy.optimizers[: len(states)]
        self.io.save_on_all_ranks(
            checkpoint,
            target,
            optimizer_names=[optimizer_names(named, optimizer) for optimizer in optimizers],
            rank_blob=self._restorer.position(),
            storage_options=storage_options,
        )
        if self._trainer.state.finished:
            # Nothing of the Trainer's comes after this that could raise a background error.
            self.io.wait()

    def _agree_on_target(self, filepath: Any) -> str:
        """Rank 0's choice, or its error, on every rank.

        The name may hold a metric that differs in the last digit, or a time; and whether a
        complete checkpoint is in the way must look the same to all.
        """
        chosen: str | Exception | None = None
        if self._trainer.is_global_zero:
            try:
                chosen = self.io.choose_target(filepath)
            except (AirError, OSError) as error:
                # Sent like a path: the others would wait for ever for a rank that raised.
                chosen = error
        chosen = self._strategy.broadcast(chosen)
        if isinstance(chosen, Exception):
            raise chosen
        assert chosen is not None
        return chosen

    def _wait_for_last_save(self) -> None:
        try:
            self.io.wait()
        except SaveFailedError as error:
            self._raise_unless_interrupted(error)

    def _raise_unless_interrupted(self, error: SaveFailedError) -> None:
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            raise error
        # A checkpoint on exception is being saved: the user's own error must not be masked.
        logger.error("%s", error, exc_info=error)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Every rank's part of a load."""
        checkpoint, blob = self.io.load_on_this_rank(checkpoint_path, weights_only=weights_only)
        if self._trainer.state.fn == "fit":
            # A rank that the checkpoint has no blob of must fail like the others, which see in
            # theirs that the world was smaller; alone, it would wait for them in its first step.
            there = self.io.world_size_of(checkpoint_path) if blob is None else None
            self._restorer.arm(blob, there)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights.

        Raises:
            CheckpointMismatchError: They are another model's; names keys and shapes.
        """
        try:
            self._load_model(checkpoint, strict=strict)
        except RuntimeError as error:
            wanted = self._strategy.lightning_module.state_dict()
            raise CheckpointMismatchError(
                _difference(wanted, checkpoint["state_dict"], self._trainer.ckpt_path)
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states.

        Raises:
            CheckpointMismatchError: They are of other optimizers.
        """
        states, optimizers = checkpoint["optimizer_states"], self._strategy.optimizers
        try:
            if len(states) != len(optimizers):
                raise ValueError(f"{len(states)} optimizers in the checkpoint")
            self._load_optimizers(checkpoint)
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
