"""Where ranks publish what they are about to read: records and counters in the group's store."""

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

_logger = logging.getLogger("air_lightning")

WAIT_S = 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05


class Board:
    """The keys of one agreement in the process group's store."""

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._world_size = world_size

    def publish(
        self,
        record: dict[str, Any],
        digests: tuple[str, ...],
        *,
        total: str = "total",
        count: int = 1,
    ) -> None:
        """Publish this rank's record; the total last, so that all of it is there when it counts."""
        self._store.set(f"{self._key}/rank{self._rank}", json.dumps(record))
        for name in (*digests, total):
            self._count(name, count)

    def withdraw(self, digests: tuple[str, ...]) -> bool:
        """Take it back, unless all ranks are here: then they count on it."""
        if self._count("total", -1) >= self._world_size - 1:
            self._count("total", 1)
            return False
        for name in digests:
            self._count(name, -1)
        return True

    def all_here(self, total: str = "total") -> bool:
        """Whether all ranks have published. Does not wait."""
        return self._count(total) >= self._world_size

    def wait_for_all(self) -> bool:
        """Wait for all ranks for a while; whether they are here."""
        return _wait_for(self.all_here)

    def wait_for_readers(self) -> None:
        """Note that this rank has read the records; on rank 0, wait a while until all have.

        The store mostly ends with rank 0: were that to fail first, the others would know no reason.
        """
        self._count("read", 1)
        if self._rank == 0:
            _wait_for(lambda: self.all_here("read"))

    def all_have(self, digest: str) -> bool:
        """Whether all ranks have published this."""
        return self._count(digest) >= self._world_size

    def records(self, *, wait: bool = True) -> dict[int, dict[str, Any]]:
        """The records by rank, as many as can be read in ``WAIT_S``.

        Args:
            wait: Whether all are known to be there. Otherwise, nothing if one is missing or closed.
        """
        deadline = time.monotonic() + WAIT_S
        keys = [f"{self._key}/rank{rank}" for rank in range(self._world_size)]
        records: dict[int, dict[str, Any]] = {}
        for rank, key in enumerate(keys):
            # Those of later ranks may be missing: each of very many ranks reads them all.
            if records and time.monotonic() > deadline:
                break
            # Of a key that is not there, the store would wait for minutes.
            if not wait and not self._store.check([key]):
                return {}
            records[rank] = json.loads(self._store.get(key))
            if not records[rank].get("open", True):
                return {}
        return records

    def _count(self, name: str, number: int = 0) -> int:
        return int(self._store.add(f"{self._key}/{name}", number))


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline, pause = time.monotonic() + WAIT_S, _FIRST_POLL_S
    while not condition():
        if time.monotonic() + pause > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
    return True


def group_store() -> Any:
    """The store of the default process group; None where this torch has no such way to it.

    It may hold what an earlier start left there: torchrun's agents give every restart the same one.
    """
    try:
        # Private, and the only way: a process group made by torchrun keeps its store to itself.
        return torch.distributed.distributed_c10d._get_default_store()
    except Exception as error:  # noqa: BLE001 - whatever another torch raises
        _logger.debug("What ranks tell each other without a collective is not told: %s", error)
        return None


def default_store() -> Any:
    """What of the group's store this start has for itself; None where that cannot be told.

    Asked without a word to the other ranks, so that a rank may ask alone.
    """
    asked = os.environ.get
    shared = asked("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or asked("TORCHELASTIC_MAX_RESTARTS") == "0":
        return group_store()
    if asked("GROUP_WORLD_SIZE") != "1":
        _logger.debug("Each node counts restarts of its own, so the agents' store is not used.")
        return None
    store = group_store()
    start = asked("TORCHELASTIC_RESTART_COUNT", "0")
    if store is None:
        return None
    return torch.distributed.PrefixStore(f"air_start/{start}", store)  # type: ignore[attr-defined]
