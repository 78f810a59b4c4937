"""Signals that ask for the end of a run are noted, and nothing else is done in their handlers.

    take()      ours replace the handlers of SIGTERM and of SIGUSR1 (or of SLURM's requeue signal)
      a signal    its number is noted, and that is all: a collective in a handler would meet those
                  of the step that it interrupted
    chain()     the user's own handlers are called, once the checkpoint is safe
    give_back() the user's own handlers are there again

Python allows handlers in the main thread only; a Trainer in another one notes nothing.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

_log = logging.getLogger("air_lightning")

EXIT_STATUS = 128 + signal.SIGTERM
"""What a shell shows of a process that SIGTERM ended; schedulers take 0 for a job that is done."""


def never() -> None:
    """When a process got SIGTERM, of one that did not; spawned ranks unpickle it by its name."""


class Preempted(SIGTERMException):
    """Raised on every rank when the run was asked to end, and what it did is safe."""


class Signals:
    """The handlers of one run.

    Args:
        numbers: The signals that ask for its end.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._users: dict[int, Any] = {}
        self.received: int | None = None
        self.terminated_at: float | None = None  # by time.monotonic; SIGUSR1 comes minutes ahead

    def take(self) -> None:
        """Put our handlers in place, also in place of those that Lightning registered since.

        Lightning's broadcasts from inside the handler: a signal to one rank stops all of them.
        """
        if not _in_main_thread():
            _log.debug("Signals are not noted: the Trainer does not run in the main thread.")
            return
        for number in self._numbers:
            there = signal.signal(number, self._note)
            self._users.setdefault(number, there)

    def chain(self) -> None:
        """Call the user's own handler of the signal that came; it may raise, and end the process.

        Not in our handler: one that exits, as many do, would leave no time for the checkpoint.
        """
        number, theirs = self.received, self._users.get(self.received or 0)
        if number is not None and callable(theirs) and theirs is not signal.default_int_handler:
            theirs(number, None)

    def give_back(self, *, ending: bool) -> None:
        """Restore the user's handlers.

        Args:
            ending: The process is on its way out: one more signal, as schedulers and torchrun send
                to what is left of a job, must not turn its exit status into that of a crash. It is
                ignored: Python takes handlers of its own away long before it has ended.
        """
        if not _in_main_thread():
            return
        for number, theirs in self._users.items():
            # None: a handler that Python did not set, and cannot restore.
            there = signal.SIG_DFL if theirs is None else theirs
            signal.signal(number, signal.SIG_IGN if ending else there)
        self._users.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number == signal.SIGTERM and self.terminated_at is None:
            self.terminated_at = time.monotonic()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
