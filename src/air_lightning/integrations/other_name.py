"""Lightning's other import name, ``pytorch_lightning``: clear errors where it is mixed with ours.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same code, and both are there
wherever ``lightning`` is installed. No class of one is a class of the other. Most mixtures fail in
Lightning's own checks of types; these do not, and would quietly save or resume less than was asked:

    a Trainer of pytorch_lightning    its strategy calls an AirCheckpointIO on rank 0 alone
      Guard.setup                     raises, before anything is trained
    a Trainer of lightning            does not know the other package's ModelCheckpoint for one:
      refuse_callbacks                adds its own, and AirResume looks there

Nothing here imports either package before the user does: it costs seconds.
"""

import sys
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from air_lightning.errors import InvalidArgumentError

_OTHER = "pytorch_lightning"
_REMEDY = (
    "Import from lightning in the whole program: `import lightning.pytorch as pl` instead of "
    "`import pytorch_lightning as pl` is all, the code of both is the same."
)


def callbacks_factory() -> list[Any]:
    """The other package calls this for every Trainer of its own, through our entry point."""
    from pytorch_lightning import Callback  # the caller's: it is imported already

    class Guard(Callback):
        """Refuses a Trainer of pytorch_lightning that would save through an AirCheckpointIO."""

        @override
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Raise before anything is restored or trained."""
            refuse_trainer(trainer)

    return [Guard()]


def refuse_trainer(trainer: Any) -> None:
    """Do nothing to a Trainer of lightning, nor to one that has nothing of ours.

    Raises:
        InvalidArgumentError: A Trainer of the other package has our plugin or callback.
    """
    if not any(kind.__module__.startswith(f"{_OTHER}.") for kind in type(trainer).__mro__):
        return
    checkpoint_io = getattr(trainer.strategy, "_checkpoint_io", None)
    inner = getattr(checkpoint_io, "checkpoint_io", None)
    ours = [x for x in (checkpoint_io, inner, *trainer.callbacks) if _is_ours(x)]
    if ours:
        raise InvalidArgumentError(
            f"{type(ours[0]).__name__} was given to a Trainer of {_OTHER}, which would save and "
            f"restore on rank 0 alone, without positions. {_REMEDY}"
        )


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Do nothing unless one is a callback of the other package that saves checkpoints.

    Raises:
        InvalidArgumentError: One is.
    """
    other = sys.modules.get(f"{_OTHER}.callbacks")
    theirs = () if other is None else other.Checkpoint
    for callback in callbacks:
        if isinstance(callback, theirs):
            raise InvalidArgumentError(
                f"{type(callback).__name__} of {_OTHER} was given to a Trainer of lightning, which "
                "does not know it for a checkpoint callback: it adds one of its own, and AirResume "
                f"does not look where this one saves. {_REMEDY}"
            )


def _is_ours(thing: Any) -> bool:
    return any(
        kind.__module__.startswith("air_lightning.integrations.") and kind.__module__ != __name__
        for kind in type(thing).__mro__
    )
