"""Threads that do steps, and the steps that come of them, until none is left or one fails.

They are daemons, and whoever waits for them stops waiting when nothing moves any more: a call into
a mount that hangs cannot be interrupted, only left behind.
"""

import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from air_lightning.errors import StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.threads import start_thread

_THREADS = 16
_LOOK_S = 1.0
_NAMED = 3  # directories that a message names


class Step(NamedTuple):
    """Something to do: the directory it is about, for messages, and what gives further steps."""

    place: str
    action: "Callable[[], list[Step]]"


class Crew:
    """Does steps in threads.

    Args:
        root: The path that their places lie below, as users see it.
        stall_s: Seconds without progress after which ``run`` gives up.

    Attributes:
        progress: A step of many small parts counts each of them up here.
    """

    def __init__(self, root: str, stall_s: float) -> None:
        self._root = root
        self._stall_s = stall_s
        self.progress = 0

    def run(self, steps: list[Step], *, threads: int = _THREADS) -> None:
        """Do steps, and those that they return.

        Raises:
            StorageError: Nothing moved for ``stall_s`` seconds.
        """
        gang = _Gang(steps, threads)
        try:
            self._watch(gang)
        except BaseException as error:
            gang.end(error)
            raise
        if gang.error is not None:
            raise gang.error

    def _watch(self, gang: "_Gang") -> None:
        seen, since = (-1, -1), time.monotonic()
        while not gang.ended.wait(min(_LOOK_S, self._stall_s)):
            moved, now = (self.progress, gang.steps_done), time.monotonic()
            if moved != seen:
                seen, since = moved, now
            elif now - since >= self._stall_s:
                raise self._stalled(gang)

    def _stalled(self, gang: "_Gang") -> StorageError:
        waiting = sorted({volume_path.join(self._root, step.place) for step in gang.at_work()})
        more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        ours = StorageError(
            f"Listing {self._root} made no progress for {self._stall_s:.0f} s; no answer came for "
            f"{', '.join(waiting[:_NAMED])}{more}. Check that the storage answers (is the mount "
            "alive?), then run again."
        )
        ours.errno = errno.ETIMEDOUT
        return ours


class _Gang:
    """The threads of one run.

    Attributes:
        ended: Set when nothing is left to do, or something failed.
    """

    def __init__(self, steps: list[Step], threads: int) -> None:
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = len(steps)
        self._threads = threads
        self._at_work: dict[int, Step] = {}
        self.steps_done = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        for step in steps:
            self._steps.put(step)
        helpers = [
            start_thread(self._work, f"air-listing_{number}", number) for number in range(threads)
        ]
        if not any(helpers):
            self._work(0)

    def at_work(self) -> list[Step]:
        """What the threads are at."""
        return list(self._at_work.copy().values())

    def end(self, error: BaseException | None = None) -> None:
        """Let every thread end after the step it is at."""
        self.error = self.error or error
        self.ended.set()
        for _ in range(self._threads):
            self._steps.put(None)

    def _work(self, number: int) -> None:
        while (step := self._steps.get()) is not None and self.error is None:
            self._at_work[number] = step
            try:
                more = step.action()
            except BaseException as error:  # noqa: BLE001 - it is raised where the work was asked for
                self.end(error)
                return
            del self._at_work[number]
            for another in more:
                self._steps.put(another)
            with self._lock:
                self.steps_done += 1
                self._pending += len(more) - 1
                done = not self._pending
            if done:
                self.end()
