"""All ranks stop at the same point of a run, although the signal may have reached one of them only.

A point is ``(optimizer steps, validations begun, batches of that validation)``; every rank comes to
points in this order. The ranks talk through the store of the process group, never by a collective:

    propose   who has the signal publishes a point that nobody can have passed
    at        each rank looks, at each point, whether one is published: one look costs the round
              trip of one small message
    meet      whoever comes to it waits there until all are there, and then all stop
    extend    whoever has passed it when it sees it, or cannot stop there, publishes a later one,
              and those who wait go on to that

Ranks that sync gradients cannot pass the end of a step that the proposer has not given its
gradients to. Others (a manual loop, a validation) can, and extend. A rank that waits in a
collective for one that waits here cannot: after some seconds the latter extends by itself. A rank
that was killed never comes: who got SIGTERM waits some seconds in all, and then ends by an error.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from air_lightning.errors import SaveFailedError
from air_lightning.integrations.signals import never

Point = tuple[int, int, int]

_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_PATIENCE_S = 5.0
_ENDING_PATIENCE = 3  # so many times: half of the 30 s that torchrun leaves after SIGTERM
_STOP = "stop"


class Halt:
    """Where one run stops.

    Args:
        store: Of the process group; None for a run of one rank.
        world_size: Ranks.
        name: Prefix of the keys, another one for each run of the process group.
        terminated_at: When this process got SIGTERM, by ``time.monotonic``; None as long as not.
        patience_s: Seconds after which a rank that waits publishes a later point; five by default.
    """

    def __init__(
        self,
        store: Any,
        world_size: int,
        name: str,
        terminated_at: Callable[[], float | None] = never,
        patience_s: float | None = None,
    ) -> None:
        self._store, self._world_size, self._name = store, world_size, name
        self._signal: int | None = None
        self._link = 0  # of the chain of published points
        self._target: Point | None = None
        self._last: Point = (-1, 0, 0)
        self._patience_s = _PATIENCE_S if patience_s is None else patience_s
        self._ending_wait_s = _ENDING_PATIENCE * self._patience_s
        self._terminated_at = terminated_at
        self._met_at: float | None = None  # when this rank first waited

    def propose(self, point: Point, signal: int | None) -> None:
        """Ask all ranks to stop at a point, unless one is published already.

        Args:
            point: At or after which they stop.
            signal: That this rank received; without one nothing happens.
        """
        if signal is None or self._signal is not None:
            return
        self._signal = signal
        if self._store is None:
            self._target = point
        elif self.target() is None:
            self._store.set(f"{self._name}/signal", str(signal))
            self._publish(point)
            self._extend_where_left(point)

    def signal(self) -> int | None:
        """The signal that one of the ranks received, once a point was published."""
        key = f"{self._name}/signal"
        if self._store is None or not self._store.check([key]):
            return self._signal
        return int(self._store.get(key))

    def at(self, point: Point) -> bool:
        """Whether to stop here, with all the others; waits for them if it is so.

        Raises:
            SaveFailedError: They did not come, and this process has to end.
        """
        previous, self._last = self._last, point
        if self._store is None:
            return self._target is not None and self._target <= point
        while (target := self.target()) is not None and target <= point:
            if target <= previous:
                self._publish(point)
            elif self._meet(point):
                return True
        return False

    def leave(self, validation: Point) -> None:
        """Note that this rank has no point more in a validation: it may wait in a collective.

        Args:
            validation: The last of its points.
        """
        self._last = validation
        if self._store is None:
            return
        self._store.set(f"{self._name}/left/{validation[1]}", "")
        target = self.target()
        if target is not None and target[:2] == validation[:2]:
            self._extend_where_left(target)

    def target(self) -> Point | None:
        """The point published last."""
        if self._store is None:
            return self._target
        while self._store.check([self._key(self._link)]):
            told = self._store.get(self._key(self._link)).decode()
            if told == _STOP:
                break
            self._target = _point(told)
            self._link += 1
        return self._target

    def close(self) -> None:
        """Talk to the others no more; rank 0, which keeps the store, waits for all, bounded."""
        self.target()
        self._signal = self.signal()
        store, self._store = self._store, None
        if store is None:
            return
        key, deadline = f"{self._name}/gone", time.monotonic() + 2 * _PATIENCE_S
        gone = store.add(key, 1)
        while dist.get_rank() == 0 and gone < self._world_size and time.monotonic() < deadline:
            time.sleep(_FIRST_POLL_S)
            gone = store.add(key, 0)

    def _extend_where_left(self, point: Point) -> None:
        steps, validation, batch = point
        if batch > 0 and self._store.check([f"{self._name}/left/{validation}"]):
            self._publish((steps, validation + 1, 0))

    def _publish(self, point: Point) -> None:
        # Only the first one for a link counts: all follow the same chain.
        self._store.compare_set(self._key(self._link), "", _text(point))
        self.target()

    def _meet(self, point: Point) -> bool:
        here = f"{self._key(self._link)}/{point}"
        self._store.add(here, 1)
        begun = time.monotonic()
        self._met_at = self._met_at or begun
        patience = begun + self._patience_s
        poll = _FIRST_POLL_S
        while self._store.add(here, 0) < self._world_size:
            if self._store.check([self._key(self._link)]):
                return self._is_stop()
            self._require_time(point, self._store.add(here, 0))
            if time.monotonic() > patience:
                self._patience_s *= 2
                self._store.compare_set(self._key(self._link), "", _text(_after(point)))
                return self._is_stop()
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL_S)
        # Through the same key as a later point: either all stop here, or all go on.
        self._store.compare_set(self._key(self._link), "", _STOP)
        return self._is_stop()

    def _require_time(self, point: Point, here: int) -> None:
        asked = self._terminated_at()
        if asked is None or self._met_at is None:
            return
        # Not from the signal alone: the step that it came in may have been a long one.
        waited = time.monotonic() - max(asked, self._met_at)
        if waited > self._ending_wait_s:
            raise SaveFailedError(
                f"This process was asked to end by SIGTERM, and {here} of {self._world_size} ranks "
                f"came to where all were to stop and save (step {point[0]}) in {waited:.0f} s: the "
                "others were killed, or failed. It ends without a checkpoint of this step; started "
                "again, the run goes on from the newest complete one."
            )

    def _is_stop(self) -> bool:
        return bool(self._store.get(self._key(self._link)).decode() == _STOP)

    def _key(self, link: int) -> str:
        return f"{self._name}/{link}"


def _after(point: Point) -> Point:
    steps, validation, batch = point
    return (steps, validation, batch + 1) if batch > 0 else (steps + 1, 0, 0)


def _text(point: Point) -> str:
    return ",".join(map(str, point))


def _point(text: str) -> Point:
    steps, validation, batch = map(int, text.split(","))
    return steps, validation, batch
