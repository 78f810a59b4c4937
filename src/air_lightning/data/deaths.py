"""The death of a worker while the training thread is in the middle of a step, in our words.

torch's handler of SIGCHLD raises a plain ``RuntimeError`` in the main thread, wherever that is;
only within ``next()`` could the pass make a ``WorkerDiedError`` of it. So torch's handler is called
by one of ours, once there are workers, and when it raises, the passes are asked whose workers
these were. Nothing is raised where torch would not have raised.
"""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Mortal(Protocol):
    """A pass over a loader with workers."""

    def death(self) -> Exception | None:
        """The error to raise where a worker of it was killed."""


_passes: weakref.WeakKeyDictionary[Mortal, int] = weakref.WeakKeyDictionary()
# Ours as it was installed last: torch installs its own once in a process's life, and a Trainer puts
# back what was there before its fit.
_ours: list[Callable[..., None]] = []


def watch(mortal: Mortal) -> None:
    """Let the deaths of this pass's workers be told by it from now on.

    Args:
        mortal: The pass; its workers were started, so torch's handler is there.
    """
    _passes[mortal] = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return
    now = signal.getsignal(signal.SIGCHLD)
    if callable(now) and now not in _ours:
        _ours[:] = [_telling(now)]
    elif now != signal.SIG_DFL or not _ours:
        return
    signal.signal(signal.SIGCHLD, _ours[0])


def _telling(torchs: Callable[..., Any]) -> Callable[..., None]:
    def handler(number: int, frame: Any) -> None:
        try:
            torchs(number, frame)
        except RuntimeError as error:
            # A forked process inherits the handler, and passes whose workers are not its own.
            own = [each for each, pid in list(_passes.items()) if pid == os.getpid()]
            death = next(filter(None, (each.death() for each in own)), None)
            if death is None:
                raise
            raise death from error

    return handler
