"""The train loaders of a Trainer, and where each of them is between two of its passes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from air_lightning.data.loader import DataLoader
from air_lightning.errors import NotCheckpointableError, StateError


def start_next_pass(trainer: Any) -> None:
    """Move every train loader that was left in the middle of a pass to its next epoch.

    ``limit_train_batches`` ends an epoch early. Without this, the next pass would begin the same
    epoch again, and the files past the limit would never be seen.
    """
    loop = trainer.fit_loop
    for loader in loaders_of(loop):
        state = state_of(loader, batches_ahead(loop))
        if not isinstance(loader, DataLoader) or state is None:
            continue
        if trainer.overfit_batches > 0:
            loader.set_epoch(0)  # the same batches again and again are what was asked for
        elif is_begun(state):
            loader.set_epoch(loader.epoch + 1)
        elif trainer.reload_dataloaders_every_n_epochs and loader.epoch < trainer.current_epoch:
            loader.set_epoch(trainer.current_epoch)  # a new loader begins at epoch 0


def end_passes(trainer: Any) -> None:
    """Leave no loader in a pass that the Trainer ended before it did (limit_train_batches)."""
    for loader in loaders_of(trainer.fit_loop):
        if isinstance(loader, DataLoader) and not trainer.overfit_batches:
            state = state_of(loader, 0)
            if state is not None and is_begun(state):
                loader.set_epoch(state["epoch"] + 1)


def made_in(fit_loop: Any) -> list[float]:
    """The epochs in which the train and the validation loaders were made."""
    validation = validation_loop(fit_loop)
    return [fit_loop._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch]


def restore_made_in(fit_loop: Any, epochs: Sequence[float]) -> bool:
    """Let loaders that this start made be made anew when those of the save would have been.

    Returns:
        Whether the validation loaders of the save would have been by now: these are new.
    """
    validation = validation_loop(fit_loop)
    here = made_in(fit_loop)
    fit_loop._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch = epochs
    # Those that were due by now have just been made.
    if fit_loop._should_reload_train_dl:
        fit_loop._last_train_dl_reload_epoch = here[0]
    is_due: bool = validation._should_reload_val_dl
    if is_due:
        validation._last_val_dl_reload_epoch = here[1]
    return is_due


def load(loader: Any, state: Any) -> None:
    """Give a loader its state.

    Raises:
        StateError: It takes none.
    """
    if not hasattr(loader, "load_state_dict"):
        raise StateError(
            f"The checkpoint has the position of a train loader, and this run's "
            f"{type(loader).__name__} takes none; use air_lightning.DataLoader, as when it was "
            "saved."
        )
    loader.load_state_dict(state)


def is_begun(state: Mapping[str, Any]) -> bool:
    """Whether a loader's state is within a pass, be it one that another grid began."""
    return state["batches"] > 0 or bool(state.get("before"))


def loaders_of(loop: Any) -> Iterator[Any]:
    """The loaders of one of Lightning's loops."""
    combined = loop._combined_loader
    return iter(()) if combined is None else iter(combined.flattened)


def validation_loop(fit_loop: Any) -> Any:
    """The loop of the validations within fit."""
    return fit_loop.epoch_loop.val_loop


def batches_ahead(fit_loop: Any) -> int:
    """Batches that the loader gave away and that were not trained on to their end."""
    return len(getattr(fit_loop._data_fetcher, "batches", ())) + open_batches(fit_loop)


def open_batches(fit_loop: Any) -> int:
    """Whether a batch is being trained on, as a number."""
    progress = fit_loop.epoch_loop.batch_progress.current
    return int(progress.ready - progress.processed)


def state_of(loader: Any, batches_ago: int) -> dict[str, Any] | None:
    """A loader's state as of so many batches ago; None where it has none."""
    if isinstance(loader, DataLoader):
        try:
            ours: dict[str, Any] = loader.state_dict(batches_ago=batches_ago)
            return ours
        except NotCheckpointableError:
            return None
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        state: dict[str, Any] = loader.state_dict()
        return state
    return None
