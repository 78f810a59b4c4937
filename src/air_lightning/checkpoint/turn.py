"""One caller at a time, for calls that a thread may enter while it is in one already.

A signal handler runs on the main thread, amid whatever that is at. A lock would wait for ever there
for the call that it interrupted; none would let the two mix what they stage. ``threading.Event``
has such a lock: a handler that sets or awaits the event whose call it interrupted never returns.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from air_lightning.errors import SaveFailedError


class Flag:
    """A ``threading.Event`` that a signal handler may use amid a call of the same one.

    Nothing is held between two of its steps: what a handler interrupts keeps nobody waiting.
    """

    def __init__(self, *, is_set: bool) -> None:
        self._is_set = is_set
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake who waits for it."""
        self._is_set = True
        for waiting in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # woken already
                waiting.release()

    def clear(self) -> None:
        """Make it one to wait for."""
        self._is_set = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, at most so long; whether it was."""
        deadline = time.monotonic() + timeout_s
        while not self._is_set:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting)
            try:
                # Whoever set it before did not see this one waiting; who was woken goes on, also
                # where it was cleared since: the next save is not the one that was waited for.
                if not self._is_set and waiting.acquire(timeout=left):
                    return True
            finally:
                self._waiting.remove(waiting)
        return True


class Turn:
    """``with turn():`` waits for other threads, and refuses the same one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Take the turn for a block.

        Raises:
            SaveFailedError: This thread has it.
        """
        with self._lock:
            if self._is_taken:
                raise SaveFailedError(
                    "A save was asked for while this thread was in the call of another one, as "
                    "from a signal handler. Let the handler set a flag, and save when the step has "
                    "ended; AirResume does so on SIGTERM and SIGUSR1."
                )
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False
