"""Where in the Trainer's loops a save was made, and how these go on from exactly there.

Lightning's own restart leaves out what was yet to come of a moment: the validation and the
epoch's end after a save at a batch's end, a whole epoch after one at an epoch's start, learning
rates that follow a metric. So the moment is saved, and Lightning's counters are made to say one of
two things::

    between epochs     save at an epoch's start, or at its end: the next epoch begins anew
    within an epoch    the batches that were trained on are complete
      a step is open     the first thing is to fetch the next batch
      a batch ended      the first thing is what follows a batch: the validation, if it is due, the
                         learning rates, and then the next batch or the epoch's end
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loops.loop import _Loop


def note(trainer: Any, *, validates: bool, has_validated: bool) -> dict[str, Any] | None:
    """The moment of a save; None where there are no loaders yet.

    Args:
        trainer: The Trainer.
        validates: Whether a validation is under way.
        has_validated: Whether it has come to its last hook.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit._combined_loader is None:
        return None
    epoch, batch = fit.epoch_progress.current, loop.batch_progress.current
    is_open = batch.ready > batch.processed
    is_closed = epoch.ready == epoch.started == epoch.processed
    # Ended by max_steps, or by should_stop: a run that is told to go on has the rest before it.
    is_cut = is_closed and batch.ready > 0 and not is_open and not _is_last(loop)
    between = epoch.ready > epoch.started or (is_closed and not is_cut)
    is_last = not between and not is_open and batch.ready > 0 and _is_last(loop)
    stepped = loop._batches_that_stepped
    within = not between and not is_open and batch.ready > 0
    # Between two batches: what follows a batch is over, unless its hooks are still running.
    ended = within and (batch.completed < batch.processed or validates)
    if within and not ended and is_last:
        ended, has_validated = True, True
        stepped -= not loop._should_accumulate()
    return {
        "between_epochs": between,
        "cut_short": is_cut,
        "is_last_batch": is_last,
        "batch_ended": ended,
        "validation_due": ended and not has_validated,
        "batches_that_stepped": stepped,
        # Of an epoch whose end is under way: learning rates that follow its metrics.
        "plateau_due": between and epoch.completed < epoch.processed and _is_last(loop),
    }


def is_epoch_over(trainer: Any) -> bool:
    """Whether no batch is left of the epoch."""
    stage = note(trainer, validates=False, has_validated=False)
    return stage is None or bool(stage["between_epochs"] or stage["is_last_batch"])


def _is_last(loop: Any) -> bool:
    return bool(loop._num_ready_batches_reached())


@contextmanager
def begun(trainer: Any, stage: Mapping[str, Any], go_on: Callable[[], None]) -> Iterator[None]:
    """Make Lightning's loops, which were restored, go on from a moment; they are run in the block.

    Args:
        trainer: The Trainer.
        stage: What ``note`` gave.
        go_on: Called when the moment is reached.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = stage["batches_that_stepped"]
    loop.val_loop._has_run = False
    _settle(loop.batch_progress, is_open=False)
    if stage["cut_short"]:
        for counts in (fit.epoch_progress.total, fit.epoch_progress.current):
            counts.processed -= 1
    _settle(fit.epoch_progress, is_open=not stage["between_epochs"])
    # The setter of FitLoop itself would turn it on again under max_steps.
    _Loop.restarting.fset(fit, not stage["between_epochs"])
    if stage["between_epochs"]:
        if stage["plateau_due"]:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        with _first_call(fit, "on_advance_start", _after(go_on)):
            yield
        return
    loop.batch_progress.is_last_batch = stage["is_last_batch"]
    limit = loop.max_steps
    if 0 <= limit <= loop.global_step and not stage["cut_short"]:
        # The end of the last step is yet to come: the loops would not be entered.
        loop.max_steps = loop.global_step + 1
    try:
        with _first_call(loop, "advance", _advance(trainer, stage, limit, go_on)):
            yield
    finally:
        loop.max_steps = limit


def _settle(progress: Any, *, is_open: bool) -> None:
    """Count as begun what was done, and one more where one is open."""
    for counts in (progress.total, progress.current):
        done = counts.processed
        counts.completed = done
        counts.ready = counts.started = done + is_open


@contextmanager
def _first_call(loop: Any, name: str, method: Callable[..., None]) -> Iterator[None]:
    """Let the first call of a loop's method in the block be one of ours, which gets the method."""

    def first(*args: Any) -> None:
        delattr(loop, name)
        method(getattr(loop, name), *args)

    setattr(loop, name, first)
    try:
        yield
    finally:
        if vars(loop).get(name) is first:
            delattr(loop, name)


def _after(go_on: Callable[[], None]) -> Callable[..., None]:
    def method(own: Callable[..., None], *args: Any) -> None:
        go_on()
        own(*args)

    return method


def _advance(
    trainer: Any, stage: Mapping[str, Any], max_steps: int, go_on: Callable[[], None]
) -> Callable[..., None]:
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

    def advance(own: Callable[..., None], data_fetcher: Any) -> None:
        loop.max_steps = max_steps
        # From here on Lightning has nothing to leave out.
        fit._restarting = loop._restarting = loop.val_loop._restarting = False
        if not stage["batch_ended"]:
            own(data_fetcher)
            return
        go_on()
        # No batch was trained on here, where another grid's batches are fewer of this one's.
        if not stage["validation_due"] or loop.batch_progress.current.ready == 0:
            _skip_one_validation(loop)

    return advance


def _skip_one_validation(loop: Any) -> None:
    """Let the batch that ended before the save not be validated after: that was done."""

    def should_check_val(*_: Any) -> bool:
        del loop._should_check_val_fx
        return False

    loop._should_check_val_fx = should_check_val


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
