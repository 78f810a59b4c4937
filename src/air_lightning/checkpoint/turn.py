"""One caller at a time, for calls that a thread may enter while it is in one already.

A signal handler runs on the main thread, amid whatever that is at. A lock would wait for ever there
for the call that it interrupted; none would let the two mix what they stage.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from air_lightning.errors import SaveFailedError


class Turn:
    """``with turn():`` waits for other threads, and refuses the same one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False

    @contextmanager
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
