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
_watching: list[Callable[..., Any]] = []  # torch's handler, once ours stands before it


def watch(mortal: Mortal) -> None:
    """Let the deaths of this pass's workers be told by it from now on.

    Args:
        mortal: The pass; its workers were started, so torch's handler is there.
    """
    _passes[mortal] = os.getpid()
    if _watching or threading.current_thread() is not threading.main_thread():
        return
    torchs = signal.getsignal(signal.SIGCHLD)
    if callable(torchs):
        signal.signal(signal.SIGCHLD, _telling(torchs))
        _watching.append(torchs)


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
