"""The loader's arguments that differ from torch's: checked, and defaults filled in."""

import multiprocessing
import operator
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch

from air_lightning.errors import InvalidArgumentError

PREFETCH_FACTOR = 4
_WORKERS_PER_RANK = 6
_WORKERS_ALONE = 48
EPOCHS = 2**62  # what the workers are told it in has 63 bits


def whole(given: Any) -> int | None:
    """The int that was given, NumPy's included; None for anything else, booleans included."""
    if isinstance(given, bool | np.bool_):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def resolve_epoch(given: Any) -> int:
    """The epoch that set_epoch was given."""
    epoch = whole(given)
    if epoch is None or not 0 <= epoch < EPOCHS:
        raise InvalidArgumentError(
            f"set_epoch was given {given!r}; a whole number from 0 and below 2**62 is wanted."
        )
    return epoch


def resolve_workers(given: Any) -> int:
    """The number of workers: as given, or for -1 chosen by whether there are other ranks."""
    workers = whole(given)
    if workers is None or workers < -1:
        raise InvalidArgumentError(
            f"num_workers={given!r} was given; -1 (choose for me), 0 (none) or a positive number "
            "is wanted."
        )
    if workers >= 0:
        return workers
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _WORKERS_PER_RANK if distributed else _WORKERS_ALONE


def resolve_prefetch(given: Any, workers: int) -> int | None:
    """Batches that each worker prepares ahead; None without workers."""
    if workers == 0:
        return None
    if given is None:
        return PREFETCH_FACTOR
    prefetch = whole(given)
    if prefetch is None or prefetch < 1:
        raise InvalidArgumentError(
            f"prefetch_factor={given!r} was given; batches per worker, 1 or more, are wanted."
        )
    return prefetch


def resolve_context(given: Any, workers: int) -> Any:
    """The fork context, unless something else was asked for."""
    if workers == 0:
        return given
    available = multiprocessing.get_all_start_methods()
    if "fork" not in available:
        raise InvalidArgumentError(
            f"num_workers={workers} was given on a platform that cannot fork (it offers "
            f"{', '.join(available)}); workers must be forked. Use num_workers=0 here."
        )
    method = _method_asked_for(given, default=available[0])
    if method in ("spawn", "forkserver"):
        raise InvalidArgumentError(
            f"The start method {method!r} was asked for; workers must be forked, since they share "
            "one cache directory that a spawned worker would delete at its exit. Leave "
            "multiprocessing_context and multiprocessing.set_start_method alone, say 'fork', or "
            "use num_workers=0."
        )
    return given if given is not None else multiprocessing.get_context("fork")


def _method_asked_for(given: Any, *, default: str) -> str | None:
    if isinstance(given, BaseContext):
        return given.get_start_method()
    if given is not None:
        return given if isinstance(given, str) else None
    method = multiprocessing.get_start_method(allow_none=True)
    # Any queue that a library makes settles the platform's default (forkserver from Python 3.14
    # on), and a child settles the way it was started itself, as a rank of ddp_spawn: that is not a
    # wish.
    own = getattr(multiprocessing.current_process(), "_start_method", None)
    return None if method in (default, own) else method
