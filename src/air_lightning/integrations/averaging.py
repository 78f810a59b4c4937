"""Saves within a validation of averaged weights (Lightning's ``WeightAveraging``).

That callback lets the average and the weights change places for the time of a validation, and saves
each under its own name only outside of it. A resume runs a validation that was broken off again,
from its beginning, so a save within one is made with both in their places.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import callbacks


class Places:
    """Knows whether a WeightAveraging callback has let weights change places.

    Args:
        callback: The callback; one of Lightning's, or of a class derived from it.
    """

    def __init__(self, callback: Any) -> None:
        self._swap = callback._swap_models
        self._is_swapped = False
        callback._swap_models = self._swap_noted

    def _swap_noted(self, pl_module: Any) -> None:
        self._swap(pl_module)
        self._is_swapped = not self._is_swapped

    @contextlib.contextmanager
    def own(self, pl_module: Any) -> Iterator[None]:
        """Have everything in its own place for the time of the block."""
        if not self._is_swapped:
            yield
            return
        self._swap(pl_module)
        try:
            yield
        finally:
            self._swap(pl_module)


def keep_places_in_saves(trainer: Any) -> None:
    """Let this Trainer save each of the weights under its own name, whenever it does."""
    # Lightning before 2.6 has no such callback.
    kind = getattr(callbacks, "WeightAveraging", ())
    places = [Places(x) for x in trainer.callbacks if isinstance(x, kind)]
    if not places:
        return
    save = trainer.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            for each in places:
                stack.enter_context(each.own(trainer.lightning_module))
            save(*args, **kwargs)

    trainer.save_checkpoint = save_checkpoint
