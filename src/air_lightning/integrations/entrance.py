"""Every rank comes to a save, or those that did learn who did not.

A save takes part of every rank. Where one of them raised, or skipped the call (``if rank == 0:
trainer.save_checkpoint(...)``), the others would wait in the first collective until the process
group's timeout, without a word. The store of the process group can be waited for with a bound, and
it knows who is missing. After SIGTERM the bound is short: a launcher sends it to those that are
left when one rank was killed, and kills them, too, if they have not ended half a minute later.
"""

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from air_lightning.data.board import default_store
from air_lightning.errors import SaveFailedError
from air_lightning.integrations.signals import never

_log = logging.getLogger("air_lightning")

_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_WARN_AFTER_S = 30.0
_ENDING_WAIT_S = 10.0  # of a process on its way out, for ranks that may be gone
_COMPLETE, _ABANDONED = "complete", "abandoned"
_ON_SIGTERM = (
    "This process got SIGTERM, as launchers send it to the others when a rank was killed. It ends "
    "without this checkpoint; started again, the run goes on from the newest complete one. "
)

# The round that this process enters next, and the process group that counts them. Not kept by each
# Trainer: the keys of a second one in the same process would be those of the first.
_next_round: tuple[Callable[[], object], int] = (lambda: None, 0)


class Entrance:
    """The door of one run's saves.

    A round is complete when every rank has entered it, or abandoned when one stopped waiting before
    that: the store decides which came first, so that no rank goes in where another has left.

    Args:
        timeout_s: Seconds that ranks wait for each other.

    Attributes:
        terminated_at: When this process got SIGTERM, by ``time.monotonic``; None as long as not.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.terminated_at: Callable[[], float | None] = never
        self._came_alone = False

    def enter(self, *, interrupted: bool = False) -> None:
        """Wait until every rank is here.

        Args:
            interrupted: Whether this rank saves on an exception: others may not have failed, and
                go on without a word, so they are waited for some seconds only.

        Raises:
            SaveFailedError: Some did not come; it names them.
        """
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        store = default_store() if world_size > 1 else None
        if store is None:
            return
        if interrupted and self._came_alone:
            raise SaveFailedError(
                "Other ranks did not come to the save before this one: they are not waited for."
            )
        try:
            self._enter(store, world_size, interrupted=interrupted)
        except SaveFailedError:
            self._came_alone = True
            raise
        except RuntimeError as error:  # torch's own, of a connection that is closed
            self._came_alone = True
            raise SaveFailedError(
                "A checkpoint is to be saved, and rank 0, which keeps what ranks tell each other, "
                f"does not answer: {error}. It failed, see its own error, or was killed. Nothing "
                "is saved; started again, the run goes on from the newest complete checkpoint."
            ) from error

    def _enter(self, store: Any, world_size: int, *, interrupted: bool) -> None:
        number = _number(store)
        door = _Door(store, number, dist.get_rank(), world_size)
        limit_s = min(_ENDING_WAIT_S, self._timeout_s) if interrupted else self._timeout_s
        if not door.wait(limit_s, self.terminated_at):
            raise door.missing(was_terminated=self.terminated_at() is not None)
        self._came_alone = False
        # All are here, so nobody looks at the round before any more.
        _Door(store, number - 1, dist.get_rank(), world_size).forget()


class _Door:
    """One round, as one rank sees it."""

    def __init__(self, store: Any, number: int, rank: int, world_size: int) -> None:
        self._store = store
        self._key = f"air_save/{number}"
        self._rank = rank
        self._world_size = world_size
        self._begun = time.monotonic()

    @property
    def state(self) -> str:
        key = f"{self._key}/state"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def wait(self, limit_s: float, terminated_at: Callable[[], float | None]) -> bool:
        """Whether the round is complete."""
        self._store.set(f"{self._key}/{self._rank}", "")
        if self._store.add(f"{self._key}/here", 1) == self._world_size:
            return self._decide(_COMPLETE) == _COMPLETE
        poll, warned = _FIRST_POLL_S, False
        while not self.state:
            asked = terminated_at()
            if asked is not None:
                limit_s = min(limit_s, max(asked - self._begun, 0.0) + _ENDING_WAIT_S)
            if self._waited > limit_s:
                return self._decide(_ABANDONED) == _COMPLETE
            if self._waited > _WARN_AFTER_S and not warned:
                warned = True
                _log.warning("%s", self.missing())
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL_S)
        return self.state == _COMPLETE

    def _decide(self, state: str) -> str:
        """Make the round's state this one, unless it has one; returns which it is."""
        decided: bytes = self._store.compare_set(f"{self._key}/state", "", state)
        return decided.decode()

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._begun

    def missing(self, *, was_terminated: bool = False) -> SaveFailedError:
        """An error that names who is not here."""
        ranks = range(self._world_size)
        absent = [rank for rank in ranks if not self._store.check([f"{self._key}/{rank}"])]
        return SaveFailedError(
            f"A checkpoint is to be saved, and of {self._world_size} ranks these have not come to "
            f"it in {self._waited:.0f} s: {', '.join(map(str, absent)) or 'none, but too late'}. "
            f"{_ON_SIGTERM if was_terminated else ''}"
            "Call trainer.save_checkpoint, or fabric.save, on every rank, outside of any `if` on "
            "the rank; where a rank failed, see its own error."
        )

    def forget(self) -> None:
        """Delete what this rank left in the store."""
        names = (self._rank, "here", "state") if self._rank == 0 else (self._rank,)
        for name in names:
            self._store.delete_key(f"{self._key}/{name}")


def _number(store: Any) -> int:
    """The round to enter: the next one that was not abandoned before this rank came."""
    global _next_round  # noqa: PLW0603 - see above
    world, number = _next_round
    if world() is not dist.group.WORLD:
        number = 1
    while _Door(store, number, 0, 0).state == _ABANDONED:
        number += 1
    # Weakly: a process group that was destroyed must not live on for being counted here.
    _next_round = (weakref.ref(dist.group.WORLD), number + 1)
    return number
