"""What rank 0 chooses, on every rank.

Ranks that ask storage may get different answers for some seconds, so one asks for all. An error of
that one goes to the others in the choice's place: they would wait for ever for a rank that raised.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from air_lightning.errors import AirError, CheckpointError

_T = TypeVar("_T")


def of_rank_zero(strategy: Any, choose: Callable[[], _T]) -> _T:
    """Return what ``choose`` returns on rank 0; every rank calls it.

    Args:
        strategy: The Trainer's or Fabric's.
        choose: Called on rank 0 alone.

    Raises:
        AirError: Rank 0's own error, or a ``CheckpointError`` that tells of one of another kind.
        OSError: Likewise.
    """
    failure: Exception | None = None
    told: Any = None
    if strategy.is_global_zero:
        try:
            told = choose()
        except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
            failure = error
    told, problem = strategy.broadcast((told, _for_others(failure)))
    if failure is not None:
        raise failure
    if problem is not None:
        raise problem
    chosen: _T = told
    return chosen


def _for_others(failure: Exception | None) -> Exception | None:
    if failure is None or isinstance(failure, AirError | OSError):
        return failure
    # Of any class, and so perhaps none that can be sent.
    return CheckpointError(f"Rank 0 failed, see its own error: {type(failure).__name__}: {failure}")
