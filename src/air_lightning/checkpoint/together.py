"""Do a step on every rank, and let a failure of one be the failure of all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from air_lightning.errors import CheckpointError

_T = TypeVar("_T")


def together(step: Callable[[], _T], what: str, group: dist.ProcessGroup | None) -> _T:
    """Return what ``step`` returns, once it is done on every rank.

    Args:
        step: Runs without collectives.
        what: What it does, for the message.
        group: The ranks; None where this process is alone.

    Raises:
        Exception: This rank's own failure, as it is.
        CheckpointError: It failed on another rank.
    """
    done: list[_T] = []
    failure: Exception | None = None
    try:
        done.append(step())
    except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    failures: list[str | None] = [told]
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, told, group=group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {text}")
    return done[0]
