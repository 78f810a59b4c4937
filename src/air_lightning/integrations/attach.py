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

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from typing_extensions import override

from air_lightning.checkpoint.state import optimizer_names
from air_lightning.errors import CheckpointMismatchError, InvalidArgumentError
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.position import (
    Restorer,
    enter_next_epoch,
    position,
    start_next_pass,
)

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
        if bound(trainer) is not None:
            enter_next_epoch(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no loader in the middle of an epoch that the Trainer has ended."""
        binding = bound(trainer)
        if binding is not None:
            binding.once_per_epoch()

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
    return isinstance(getattr(strategy, "_checkpoint_io", None), AirCheckpointIO)


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
        self._epoch_started: int | None = None
        self._prepared = False
        strategy.save_checkpoint = self.save_checkpoint
        strategy.load_checkpoint = self.load_checkpoint
        strategy.load_model_state_dict = self.load_model_state_dict
        strategy.load_optimizer_state_dict = self.load_optimizer_state_dict

    def once_per_epoch(self) -> None:
        """Both AirAttach and AirResume may call this for one epoch; the first does the work."""
        if self._epoch_started != self._trainer.current_epoch:
            self._epoch_started = self._trainer.current_epoch
            start_next_pass(self._trainer)

    def prepare_once(self) -> None:
        """Allocate staging memory in the background, if the Trainer is going to save."""
        optimizers = self._strategy.optimizers
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        if self._prepared or not states or not self._trainer.checkpoint_callbacks:
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
        named = list(self._strategy.lightning_module.named_parameters())
        states = checkpoint.get("optimizer_states", ())
        optimizers = self._strategy.optimizers[: len(states)]
        self.io.save_on_all_ranks(
            checkpoint,
            # Rank 0's: the name may hold a metric that differs in the last digit, or a time.
            self._strategy.broadcast(filepath),
            optimizer_names=[optimizer_names(named, optimizer) for optimizer in optimizers],
            rank_blob=position(self._trainer),
            storage_options=storage_options,
        )

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
