"""A run that is asked to end saves once, and ends: SIGTERM, and SIGUSR1 as SLURM sends it.

    signal on any rank         noted (signals.py)
      on_train_batch_start,
      on_before_backward       published: this step is the last one
    end of an optimizer step,
    of a validation batch, of
    an epoch                   all ranks stop at the same one (halt.py)
      save                     unless just that was saved, or nothing was trained since the start
      wait                     published
      raise Preempted          a SystemExit with status 143, on every rank

Between optimizer steps of accumulated gradients nobody stops: a save there has to hold them. In a
validation the state is that from before it, and the restart runs it from its beginning.
"""

import logging
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from air_lightning.data.board import group_store
from air_lightning.errors import SaveFailedError
from air_lightning.integrations.attach import bound
from air_lightning.integrations.halt import Halt, Point
from air_lightning.integrations.signals import EXIT_STATUS, Preempted, Signals
from air_lightning.volumes import path as volume_path

_log = logging.getLogger("air_lightning")

_EPOCH_END = 1 << 60  # in place of a validation's number: after all of that step


class Preemption(Checkpoint):
    """Ends one Trainer's fits on a signal; a Checkpoint, so that Lightning asks it last.

    Args:
        roots: Where AirResume looks for checkpoints; the first is where this one saves.
    """

    def __init__(self, roots: Callable[[Any], list[str]]) -> None:
        self._roots = roots
        self._signals = Signals(())
        self._halt = Halt(None, 1, "")
        self._steps = self._batches = self._validations = 0
        self._ended = False

    def begin(self, trainer: Any) -> None:
        """Take the signals over, for one fit; the last callback of its Trainer from now on."""
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)
            self._wrap(trainer)
        world_size = trainer.world_size
        # A name of this fit alone: a restart by torchrun may have the store of the start before it,
        # and would obey the signal that ended that one.
        name = trainer.strategy.broadcast(f"air_halt/{uuid.uuid4().hex}")
        store = group_store() if world_size > 1 else None
        if store is None and world_size > 1:
            _log.warning("Signals are not noted: this process group has no store to agree through.")
            return
        self._halt = Halt(store, world_size, name, self._terminated_at)
        self._steps = self._batches = self._validations = 0
        self._ended = False
        environment = trainer._accelerator_connector.cluster_environment
        requeue = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        self._signals = Signals({signal.SIGTERM, requeue})
        self._signals.take()
        binding = bound(trainer)
        if binding is not None:
            binding.entrance.terminated_at = self._terminated_at

    def _terminated_at(self) -> float | None:
        return self._signals.terminated_at

    def _wrap(self, trainer: Any) -> None:
        connector, validation = trainer._signal_connector, trainer.fit_loop.epoch_loop.val_loop
        register, teardown, validate = (
            connector.register_signal_handlers,
            connector.teardown,
            validation.run,
        )

        def register_and_take() -> None:
            register()
            if trainer.state.fn == "fit":
                self._signals.take()

        def teardown_and_give_back() -> None:
            teardown()
            self._signals.give_back(ending=self._ended)

        def stop_or_validate() -> Any:
            if trainer.state.fn == "fit":
                self._validations += 1
                self._at_validation(trainer, 0)
            return validate()

        connector.register_signal_handlers = register_and_take
        connector.teardown = teardown_and_give_back
        validation.run = stop_or_validate

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Make this step the last one."""
        self._halt.propose((self._steps + 1, 0, 0), self._signals.received)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Make this step the last one: no other rank can end it without our gradients."""
        self._halt.propose((self._steps + 1, 0, 0), self._signals.received)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop, at an optimizer step after which the next batch would follow."""
        loop = trainer.fit_loop.epoch_loop
        self._batches += 1
        if loop._should_accumulate():
            return
        self._steps += 1
        validates = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if not loop._num_ready_batches_reached() and not validates:
            self._at(trainer, (self._steps, 0, 0), (self._steps + 1, 0, 0), logs=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, where the last step of an epoch cannot: its end is yet to be counted."""
        self._at(trainer, (self._steps, _EPOCH_END, 0), (self._steps + 1, 0, 0))

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Make this batch the last one."""
        if trainer.state.fn == "fit" and not self._accumulates(trainer):
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            point = (self._steps, self._validations, progress.current.ready)
            self._halt.propose(point, self._signals.received)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop, unless it was the last one: others may wait in the collective at the end."""
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        if trainer.state.fn == "fit":
            batches = progress.current.ready
            self._at_validation(trainer, batches, last=bool(progress.is_last_batch))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for the last time: rank 0 may be gone soon, and the store with it."""
        self._halt.close()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a run that was asked to in its last moments, too."""
        if self._signals.received is not None or self._halt.target() is not None:
            self._end(trainer)

    def _at_validation(self, trainer: Any, batch: int, *, last: bool = False) -> None:
        if self._accumulates(trainer):
            return
        point = (self._steps, self._validations, batch)
        if last:
            self._halt.leave(point)
        else:
            self._at(trainer, point, (*point[:2], batch + 1), validating=True)

    def _accumulates(self, trainer: Any) -> bool:
        return self._batches > 0 and trainer.fit_loop.epoch_loop._should_accumulate()

    def _at(
        self,
        trainer: Any,
        point: Point,
        after: Point,
        *,
        validating: bool = False,
        logs: bool = False,
    ) -> None:
        # A lone rank stops here; others may have passed this point.
        alone = trainer.world_size == 1
        self._halt.propose(point if alone else after, self._signals.received)
        if self._halt.at(point):
            self._save(trainer, validating=validating)
            if logs:
                _log_step(trainer)
            self._end(trainer)

    def _save(self, trainer: Any, *, validating: bool) -> None:
        binding, roots = bound(trainer), self._roots(trainer)
        if binding is None or self._batches == 0:
            return  # a restart begins where this run began
        if not roots:
            _log.warning(
                "Asked to end, and nothing is saved: no ModelCheckpoint that saves more than "
                "weights has a directory."
            )
            return
        if not validating and binding.has_saved(roots):
            try:
                binding.io.wait()
                return
            except SaveFailedError as error:
                _log.error("%s It is tried once more.", error, exc_info=error)
        name = f"preempted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        with binding.validating(validating):
            trainer.save_checkpoint(volume_path.join(roots[0], name))
        binding.io.wait()

    def _end(self, trainer: Any) -> None:
        self._halt.close()
        number = self._halt.signal() or self._signals.received
        self._ended = True
        if trainer.is_global_zero:
            _log.warning("Signal %s: the run ends, and can be resumed.", number)
            _requeue(trainer, number)
        try:
            self._signals.chain()
        except SystemExit as asked:
            # Of the kind that callbacks know to have been saved on.
            raise Preempted(asked.code) from None
        raise Preempted(_status(trainer))


def _log_step(trainer: Any) -> None:
    """Tell loggers of the step that has ended: Lightning does so next, and a restart does not."""
    try:
        trainer._logger_connector.update_train_step_metrics()
    except Exception:  # noqa: BLE001 - the checkpoint is there, and the run is to end
        _log.exception("A logger failed when it was told of the last step.")


def _status(trainer: Any) -> int:
    """143; 0 in children of Lightning's launcher, which kills rank 0 where one of them has more."""
    environment = trainer._accelerator_connector.cluster_environment
    is_child = isinstance(environment, LightningEnvironment) and not trainer.is_global_zero
    return 0 if is_child else EXIT_STATUS


def _requeue(trainer: Any, number: int | None) -> None:
    """Have SLURM start the job again, as Lightning does on that signal."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return
    if number != (environment.requeue_signal or signal.SIGUSR1):
        return
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task, plain = os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ.get("SLURM_JOB_ID")
    job = f"{array}_{task}" if array else plain
    if job is None:
        _log.error("SLURM_JOB_ID is not set, so the job is not queued again. Start it again.")
        return
    scontrol = shutil.which("scontrol") or "scontrol"
    try:
        subprocess.run(  # noqa: S603 - both come from the scheduler
            [scontrol, "requeue", job], check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.error(
            "scontrol requeue %s failed: %s. The checkpoint is there; start it again.", job, error
        )
