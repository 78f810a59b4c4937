"""Something to do when the interpreter ends, while threads can still be started.

``atexit`` runs too late: by then ``concurrent.futures`` refuses work to writers that use it.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

_T = TypeVar("_T")


def wait_at_exit(owner: _T, end: Callable[[_T], None]) -> None:
    """Call ``end(owner)`` at the end of this process, not of its forks, if the owner is there yet.

    Args:
        owner: Is not kept alive by this.
        end: Waits for what is under way; it has to have a bound of its own.
    """
    reference, pid = weakref.ref(owner), os.getpid()

    def finish() -> None:
        alive = reference()
        if alive is not None and os.getpid() == pid:
            end(alive)

    at_exit(finish)


def at_exit(function: Callable[[], None]) -> None:
    """Call a function at the end of this process, and of those forked from it."""
    # Callbacks run in reverse order, so its own has to be registered first, which its import does.
    import_module("concurrent.futures.thread")
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)
