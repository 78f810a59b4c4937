"""What is to follow one save, once it is published: each action once, or none if it failed.

Without a lock: a signal handler may save amid whatever its thread is at, and the save that it waits
for would wait for that lock. Instead, whoever adds an action and whoever ends the save both take
actions out, one by one, and ask only afterwards whether there is more::

    adds    add the action      is it over?     take out what is there
    ends    take out all        it is over      take out what came meanwhile
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("air_lightning")


class Following:
    """The actions that follow one save.

    Args:
        own: One that belongs to the save itself: nobody asked for it, it is no loss.
        is_over: Whether there is no save to wait for.
    """

    def __init__(self, own: Callable[[], None] | None = None, *, is_over: bool = False) -> None:
        self._own = own
        self._actions = deque([] if own is None else [own])
        self._is_over = is_over

    def add(self, action: Callable[[], None], *, has_failed: Callable[[], bool]) -> None:
        """Let an action follow: later, in the background, or right here if the save is over.

        Args:
            action: Its own errors are logged.
            has_failed: Asked if the save is over; then the action is dropped.
        """
        self._actions.append(action)
        if self._is_over:
            self._settle(failed=has_failed(), target="before")

    def end(self, *, failed: bool, target: str) -> None:
        """Run what was added, or drop it; from now on nothing is kept.

        Args:
            failed: Whether to drop it.
            target: What was saved, for the log.
        """
        self._settle(failed=failed, target=f"of {target}")
        self._is_over = True
        self._settle(failed=failed, target=f"of {target}")

    def _settle(self, *, failed: bool, target: str) -> None:
        dropped = 0
        with contextlib.suppress(IndexError):
            while True:
                action = self._actions.popleft()
                if not failed:
                    _run_logged(action)
                elif action is not self._own:
                    dropped += 1
        if dropped:
            _log.warning(
                "%d actions that were to follow the save %s are dropped (old checkpoints are "
                "kept), because it failed.",
                *(dropped, target),
            )


def _run_logged(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - logged
        # Raised on this rank alone, it would leave the others waiting in their next save.
        _log.exception("The save is published, but what was to follow it failed.")
