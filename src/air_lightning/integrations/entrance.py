"""Every rank comes to a save, or those that did learn who did not.

A save takes part of every rank. Where one of them raised, or skipped the call (``if rank == 0:
trainer.save_checkpoint(...)``), the others would wait in the first collective until the process
group's timeout, without a word. The store of the process group can be waited for with a bound, and
it knows who is missing.
"""

import logging
import time
from typing import Any

import torch.distributed as dist

from air_lightning.errors import SaveFailedError

_log = logging.getLogger("air_lightning")

_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_WARN_AFTER_S = 30.0


class Entrance:
    """The door of one run's saves.

    Args:
        timeout_s: Seconds that ranks wait for each other.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: object | None = None
        self._count = 0

    def enter(self, timeout_s: float | None = None) -> None:
        """Wait until every rank is here.

        Args:
            timeout_s: At most so many seconds; the constructor's by default.

        Raises:
            SaveFailedError: Some did not come; it names them.
        """
        store, world_size = default_store()
        if store is None:
            return
        if dist.group.WORLD is not self._group:
            self._group, self._count = dist.group.WORLD, 0
        self._count += 1
        key, rank = f"air_save/{self._count}", dist.get_rank()
        store.set(f"{key}/{rank}", "")
        store.add(f"{key}/here", 1)
        limit = self._timeout_s if timeout_s is None else timeout_s
        begun, poll, warned = time.monotonic(), _FIRST_POLL_S, False
        while store.add(f"{key}/here", 0) < world_size:
            waited = time.monotonic() - begun
            if waited > limit:
                raise _missing(store, key, world_size, waited)
            if waited > _WARN_AFTER_S and not warned:
                warned = True
                _log.warning("%s", _missing(store, key, world_size, waited))
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL_S)
        # All are here, so nobody looks at the one before any more.
        store.delete_key(f"air_save/{self._count - 1}/{rank}")
        if rank == 0:
            store.delete_key(f"air_save/{self._count - 1}/here")


def _missing(store: Any, key: str, world_size: int, waited: float) -> SaveFailedError:
    absent = [rank for rank in range(world_size) if not store.check([f"{key}/{rank}"])]
    return SaveFailedError(
        f"A checkpoint is to be saved, and of {world_size} ranks these have not come to it in "
        f"{waited:.0f} s: {', '.join(map(str, absent))}. Call trainer.save_checkpoint on every "
        "rank, outside of any `if` on the rank; where a rank failed, see its own error."
    )


def default_store() -> tuple[Any, int]:
    """The store of the default process group, and its size; None where there are no others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None, 1
    try:
        # Private, and the only way: a process group made by torchrun keeps its store to itself.
        return dist.distributed_c10d._get_default_store(), dist.get_world_size()
    except Exception as error:  # noqa: BLE001 - whatever another torch raises
        _log.debug("Whether every rank comes to a save is not checked: %s", error)
        return None, 1
