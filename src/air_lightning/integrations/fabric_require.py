"""What a Fabric loop's state must be: told before anything is saved, read or changed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from air_lightning.checkpoint.restore import Stored
from air_lightning.errors import CheckpointMismatchError, InvalidArgumentError, InvalidTypeError
from air_lightning.integrations.fabric_position import is_loader


def require_state(state: Any) -> None:
    """Refuse what has no keys, before it is asked for them.

    Raises:
        InvalidTypeError: It is no dict.
    """
    if not isinstance(state, Mapping):
        raise InvalidTypeError(
            f"The state is a {type(state).__name__}; a dict is wanted, with a key for each object: "
            'fabric.save(path, {"model": model, "optimizer": optimizer, "step": step}).'
        )


def require_savable(key: Any, value: Any) -> None:
    """Refuse a key that is this package's, and an object whose state nobody would ask for.

    Raises:
        InvalidArgumentError: Names the key.
    """
    if not isinstance(key, str) or key == "air" or key.startswith("air."):
        raise InvalidArgumentError(
            f"The state has the key {key!r}; text is wanted that is not 'air' and does not begin "
            "with 'air.', which this package uses itself."
        )
    for inner in _nested(value):
        if isinstance(inner, torch.nn.Module | torch.optim.Optimizer) or is_loader(inner):
            raise InvalidArgumentError(
                f"The state has a {type(inner).__name__} within the {type(value).__name__} under "
                f"{key!r}. Its state dict is taken only where it is a value of the state itself: "
                "give it a key of its own."
            )


def _nested(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        return
    for item in items:
        yield item
        yield from _nested(item)


def no_such_key(key: Any, stored: Stored) -> CheckpointMismatchError:
    """The error about a key that the checkpoint has not."""
    there = ", ".join(repr(known) for known in stored.checkpoint)
    return CheckpointMismatchError(
        f"{stored.where} has nothing under {key!r}, which the state wants; it has {there}. Name "
        "the state's keys as when it was saved, or load with strict=False to leave out what is "
        "missing."
    )


def require_dict(key: Any, stored: Stored, what: str) -> None:
    """Refuse a plain value in an object's place.

    Raises:
        CheckpointMismatchError: Names the key and what is there.
    """
    if not isinstance(stored.checkpoint[key], Mapping):
        raise CheckpointMismatchError(
            f"{stored.where} has a {type(stored.checkpoint[key]).__name__} under {key!r}, where "
            f"{what} is wanted. Name the state's keys as when it was saved."
        )


def require_groups(optimizer: torch.optim.Optimizer, stored: Stored, key: Any) -> None:
    """Refuse the state of an optimizer of other parameters.

    Raises:
        CheckpointMismatchError: Tells the numbers of both.
    """
    saved = [len(group["params"]) for group in stored.checkpoint[key].get("param_groups", ())]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise CheckpointMismatchError(
            f"{stored.where} has under {key!r} the state of an optimizer with {saved} parameters "
            f"per group; this one has {here}. Make the optimizer as when it was saved."
        )
