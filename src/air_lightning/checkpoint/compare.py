"""Say before anything is loaded that a checkpoint is another model's, and in what they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from air_lightning.errors import CheckpointMismatchError

_SHOWN = 8  # names in a message; a model has thousands


def compare_models(
    saved: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    live: Mapping[str, Any],
    *,
    strict: bool,
    where: str,
) -> None:
    """Compare a checkpoint's model with the one that it is to be loaded into.

    Args:
        saved: All names of the saved state dict.
        shapes: The shapes of those that are tensors.
        live: The live model's state dict.
        strict: Whether missing and unexpected names are errors; other shapes always are.
        where: The checkpoint's path, for the message.

    Raises:
        CheckpointMismatchError: They differ; the message lists in what.
    """
    wrong = []
    if strict:
        known = set(saved)
        wrong += _listed("missing in the checkpoint", [name for name in live if name not in known])
        wrong += _listed("unexpected", [name for name in saved if name not in live])
    wrong += _listed(
        "of another shape",
        [
            f"{name} (saved {_text(shape)}, wanted {_text(live[name].shape)})"
            for name, shape in shapes.items()
            if isinstance(live.get(name), torch.Tensor) and tuple(live[name].shape) != tuple(shape)
        ],
    )
    if wrong:
        raise CheckpointMismatchError(
            f"{where} is a checkpoint of another model: {'; '.join(wrong)}. Build the model with "
            "the arguments of the saved run, or start in a new directory."
        )


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
