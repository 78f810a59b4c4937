"""Several streams on one file: who reads which span, and how many threads that may be.

A stream of a volume has a speed of its own; four on one file are nearly four times as fast. Spans
are contiguous, as a mount reads ahead along one handle. Helping threads are few per process: where
many files are on their way at once, more streams on each would bring nothing.

The calling thread works too. Where no helper may start, it does all the work.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

from air_lightning.volumes.threads import start_thread

STREAMS = 4  # of one file
_HELPERS = 12  # threads of a process, beside those that download


def cut(size: int, min_span: int) -> list[range]:
    """The spans of a file, in order; one where it is too small to share out."""
    count = max(1, min(STREAMS, size // min_span))
    edges = [size * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


class Team:
    """The threads of one download; the first error stops all of them.

    Args:
        spans: What is to be read.
        work: What each thread does: takes spans from :meth:`spans` until none is left.

    Attributes:
        shared: Whether there is work for more than one thread.
    """

    def __init__(self, spans: list[range], work: Callable[["Team"], None]) -> None:
        self.shared = len(spans) > 1
        self._spans = deque(spans)
        self._work = work
        self._error: BaseException | None = None

    @property
    def stopped(self) -> bool:
        """Whether a thread failed, and the others are to end."""
        return self._error is not None

    def spans(self) -> Iterator[range]:
        """Spans that no other thread has taken."""
        while not self.stopped:
            try:
                span = self._spans.popleft()
            except IndexError:
                return
            yield span

    def run(self) -> None:
        """Work until all is done; raises the first error, when every thread has ended."""
        helpers = self._helpers(len(self._spans) - 1)
        self._attend()
        try:
            for helper in helpers:
                helper.join()
        except BaseException as error:
            self._error = self._error or error
            raise
        if self._error is not None:
            raise self._error

    def _helpers(self, wanted: int) -> list[threading.Thread]:
        helpers: list[threading.Thread] = []
        while len(helpers) < wanted and _permits.acquire(blocking=False):
            helper = start_thread(self._help, "air-download")
            if helper is None:
                _permits.release()
                break
            helpers.append(helper)
        return helpers

    def _help(self) -> None:
        permits = _permits
        try:
            self._attend()
        finally:
            permits.release()

    def _attend(self) -> None:
        try:
            self._work(self)
        except BaseException as error:  # noqa: BLE001 - raised by run()
            self._error = self._error or error


def _reset_permits() -> None:
    global _permits  # noqa: PLW0603 - a fact about the process: a child has none of these threads
    _permits = threading.BoundedSemaphore(_HELPERS)


_permits = threading.BoundedSemaphore(_HELPERS)
os.register_at_fork(after_in_child=_reset_permits)
