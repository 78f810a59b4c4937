"""Doing something in another thread exactly while a thread is in a call, however busy the machine.

A timer would be early or late there; the stack of the thread tells.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def amid(function: Callable[..., object], action: Callable[[], object]) -> Iterator[None]:
    """Do ``action`` in another thread once the block's thread is in a call of ``function``.

    Not done if the block ends without such a call.
    """
    here, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not _is_in(sys._current_frames()[here], function):
            if over.is_set():
                return
            time.sleep(0.001)
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_in(frame: FrameType | None, function: Callable[..., object]) -> bool:
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def at_line(
    number: int, function: Callable[..., object], action: Callable[[], object]
) -> Iterator[None]:
    """Do something before the line of this number of all that the first call of a function runs."""
    left, first = [number], list[FrameType]()

    def trace(frame: FrameType, event: str, _: object) -> object:
        at: FrameType | None = frame
        while at is not None and at.f_code is not function.__code__:
            at = at.f_back
        if at is not None and not first:
            first.append(at)
        if event == "line" and at is not None and at is first[0]:
            left[0] -= 1
            if left[0] == -1:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
