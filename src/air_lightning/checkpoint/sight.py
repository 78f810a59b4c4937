"""Reading a checkpoint that another rank found, perhaps before this one's mount tells of it.

Each node caches what its mount was told of a volume, for some seconds: one may have chosen what
another does not see yet, or sees without some of its files. So a read that fails is tried again,
for a bounded time, for as long as the checkpoint is not whole here; what is wrong with a whole one
is raised at once.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.errors import (
    AirError,
    CheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
)

_log = logging.getLogger("air_lightning")
UNSEEN_S = 60.0  # that a checkpoint which rank 0 sees may be out of another one's sight
_T = TypeVar("_T")

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 2.0


def when_seen(
    read: Callable[[], _T], path: str, options: dict[str, Any] | None, bound_s: float
) -> _T:
    """Read a checkpoint once it is whole here.

    Args:
        read: Reads it; safe to repeat.
        path: The checkpoint, which is whole in another rank's sight.
        options: Passed to fsspec.
        bound_s: Seconds to wait at most.

    Raises:
        CheckpointError: It was not whole here in that time.
    """
    began, poll, was_whole = time.monotonic(), _FIRST_POLL_S, False
    while True:
        try:
            return read()
        except (CheckpointMismatchError, UnsafeCheckpointError):
            raise
        except (AirError, OSError) as error:
            if was_whole:
                raise
            unseen = _unseen(path, options)
            was_whole = unseen is None  # it may have become so since: read once more
            waited = time.monotonic() - began
            if unseen is not None and waited + poll > bound_s:
                raise CheckpointError(
                    f"Rank 0 chose {path}, and this rank has not seen it whole in {waited:.0f} s: "
                    f"{unseen} Do all nodes mount the same volume? Its cache on this node may be "
                    "outdated; start again, or mount it anew."
                ) from error
        if not was_whole:
            if poll == _FIRST_POLL_S:
                _log.warning("Waiting for %s, which rank 0 sees and this rank does not.", path)
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL_S)


def _unseen(path: str, options: dict[str, Any] | None) -> str | None:
    """What is not here of a checkpoint; None when it is whole."""
    try:
        verify_checkpoint(path, storage_options=options)
    except (AirError, OSError) as error:
        return str(error)
    return None
