"""Resuming from a checkpoint of Lightning's own: where loaders of ours begin.

Such a checkpoint has the position of no loader of ours: none at all, as of torch's own loader, or
that of another package's. Lightning goes on with the number of batches that the epoch has left,
from the loader's first one on. So do we, in the order of that epoch, and say so: some files come
twice in this one epoch, and as many do not come. From the next epoch on all is as ever.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from air_lightning.data.loader import DataLoader


def begin_without_position(fit_loop: Any, loaders: Sequence[Any]) -> bool:
    """Begin the epoch that the Trainer is in, where all loaders are ours and no state is.

    Args:
        fit_loop: Of the Trainer, its progress restored.
        loaders: Its train loaders.

    Returns:
        Whether that was done; else the states are for Lightning to load.
    """
    states = fit_loop._combined_loader_states_to_load
    if not all(isinstance(loader, DataLoader) for loader in loaders) or any(map(_is_ours, states)):
        return False
    fit_loop._combined_loader_states_to_load = []
    progress = fit_loop.epoch_progress.current
    for loader in loaders:
        # Overfitting is on the same batches again and again.
        loader.set_epoch(0 if fit_loop.trainer.overfit_batches > 0 else progress.processed)
    done = fit_loop.epoch_loop.batch_progress.current.ready
    if progress.started > progress.processed and done > 0:
        rank_zero_warn(
            f"The checkpoint was taken after {done} batches of epoch {progress.processed}, and "
            "holds no position of an air_lightning.DataLoader: what is left of this epoch begins "
            "with its first files again. Resume from a checkpoint of an epoch's end to avoid that; "
            "checkpoints of AirCheckpointIO hold the position."
        )
    return True


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and {"version", "batches", "workers"} <= state.keys()
