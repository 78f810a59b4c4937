"""Binds a Trainer's strategy to AirCheckpointIO, so that every rank takes part.

Lightning's strategies call a CheckpointIO on rank 0 alone. What is bound here is bound on the
*instances* of one Trainer; no class of Lightning's is changed, and nothing happens at import:

    Trainer(plugins=[AirCheckpointIO()])
      callbacks_factory()  (Lightning's entry point)  ->  AirAttach, a callback
        setup: tensor parallel ranks will read the same files
        setup: process group is up, nothing is restored yet  ->  bind(trainer)
          the strategy's methods that save and load  ->  those of binding.Binding
          where the Trainer goes to restore a path   ->  AirResume's choice, or what "last" is
        on_train_start: an epoch that was resumed at its last step is over
        on_train_epoch_start: a loader left in mid-pass goes to its next epoch
        on_fit_end: the last save is published, or its error raised

``remove_checkpoint`` needs no binding: the strategy asks the CheckpointIO on rank 0, as wanted.
"""

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from air_lightning.data.stream import set_share
from air_lightning.errors import InvalidArgumentError
from air_lightning.integrations import files
from air_lightning.integrations.binding import Binding
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.last import agreed, asked, newest_last
from air_lightning.integrations.loaders import start_next_pass
from air_lightning.integrations.other_name import refuse_callbacks
from air_lightning.integrations.stages import enter_next_epoch
from air_lightning.integrations.strategies import data_share

_BINDING = "_air_lightning_binding"


def callbacks_factory() -> list[Callback]:
    """Lightning calls this for every Trainer, through the package's entry point."""
    return [AirAttach()]


class AirAttach(Callback):
    """Binds a Trainer whose CheckpointIO is an AirCheckpointIO; does nothing to any other."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bind before anything is restored."""
        set_share(data_share(trainer.strategy))
        bind(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what the strategy has just wrapped."""
        binding = bound(trainer)
        if binding is not None:
            binding.note_alike()
            binding.gradients.watch()

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
        binding = bound(trainer)
        if binding is not None:
            binding.ends.forget()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that gradients are no longer those of whole batches alone."""
        binding = bound(trainer)
        if binding is not None:
            binding.gradients.on_backward()

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
            binding.notices.give()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return from fit only when the last save is published.

        Raises:
            SaveFailedError: It failed.
        """
        binding = bound(trainer)
        if binding is not None:
            binding.io.wait()
            binding.notices.give()


def _callbacks(trainer: Any) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks
    return callbacks


def bound(trainer: Trainer) -> Binding | None:
    """The binding of this Trainer's present strategy, if there is one."""
    binding: Binding | None = getattr(trainer.strategy, _BINDING, None)
    return binding


def bind(trainer: Trainer) -> Binding | None:
    """Bind a Trainer's strategy to its AirCheckpointIO, once; None when it has another IO.

    Raises:
        InvalidArgumentError: The strategy is one whose state this release cannot save, or a
            callback is another package's that saves.
    """
    strategy = trainer.strategy
    if not _uses_ours(strategy):
        return None
    refuse_callbacks(_callbacks(trainer))
    binding = bound(trainer)
    if binding is None:
        binding = Binding(trainer)
        setattr(strategy, _BINDING, binding)
    binding.weights_only = _weights_only_of_run(trainer)
    binding.asked = asked(trainer)
    _bind_choice(trainer)
    binding.io.connect()
    return binding


def _bind_choice(trainer: Any) -> None:
    connector = trainer._checkpoint_connector
    if "resume_start" in vars(connector):
        return
    resume_start = connector.resume_start

    def resume_from_choice(checkpoint_path: Any = None, weights_only: Any = None) -> None:
        resume_start(_chosen(trainer, checkpoint_path), **files.told(weights_only))

    connector.resume_start = resume_from_choice


def _chosen(trainer: Any, given: Any) -> Any:
    """What to restore, where Lightning found ``given``."""
    binding = bound(trainer)
    if binding is None:
        return given
    is_first = trainer.state.fn == "fit" and trainer.global_step == 0
    if is_first and binding.resume is not None:
        return binding.resume(given, binding.asked)
    if binding.asked != "last":
        return given

    def choose() -> Any:
        found, is_ours = newest_last(trainer, given, binding.io.storage_options)
        if is_ours:
            binding.take(found)
        return found

    return agreed(trainer, choose, 'the directories that ckpt_path="last" means')


def _weights_only_of_run(trainer: Trainer) -> bool | None:
    """What ``fit(weights_only=...)`` and the like were told.

    Strategies that restore after set-up are not told: ``Trainer._run`` drops the value at that
    call, and has it in a local variable only. This is called from one of its set-up hooks.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            told: bool | None = frame.f_locals.get("weights_only")
            return told
        frame = frame.f_back  # type: ignore[assignment]
    return None


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
