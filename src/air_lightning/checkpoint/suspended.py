"""Switches that are off for a while, whatever threads want them so.

Of a switch of the whole process, set and restored by each thread by itself, two threads could
leave it off for good. So users are counted: the first turns it off, the last puts it back as the
first found it. A process forked in between has none of these threads, and has the switch as it was
before.

Of a switch that each thread has for itself, counting would turn it off in one of them only, and
could put it back in another: there each user turns its own off, and puts that back. Newer versions
of torch keep their options in this way, older ones in the other, so it is tried out.
"""

import contextvars
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Suspended:
    """``with suspended():`` keeps one switch off.

    Args:
        is_on: Says how it stands.
        switch: Sets it.
    """

    def __init__(self, is_on: Callable[[], bool], switch: Callable[[bool], None]) -> None:
        self._is_on = is_on
        self._switch = switch
        self._lock = threading.Lock()
        self._users = 0
        self._before = True
        self._is_each_threads: bool | None = None  # not known before it is used
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep it off for a block."""
        if self._belongs_to_each_thread():
            before = self._is_on()
            self._switch(False)
            try:
                yield
            finally:
                self._switch(before)
            return
        with self._lock:
            if self._users == 0:
                self._before = self._is_on()
                self._switch(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._switch(self._before)

    def _belongs_to_each_thread(self) -> bool:
        with self._lock:
            if self._is_each_threads is None:
                before = self._is_on()
                contextvars.copy_context().run(self._switch, not before)
                self._is_each_threads = self._is_on() is before
                if not self._is_each_threads:
                    self._switch(before)
            return self._is_each_threads

    def _forget(self) -> None:
        self._lock = threading.Lock()  # a thread that is not here may have held it
        if self._users:
            self._users = 0
            self._switch(self._before)


def _switch_collector(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


# torch's CRC of each tensor: ours covers the file.
no_zip_checksums = Suspended(
    torch.serialization.get_crc32_options, torch.serialization.set_crc32_options
)
# A plan is some ten objects for each tensor, none of them garbage. Making those of some thousand
# tensors sets off a collection of the whole process, for which the training stands still.
no_collections = Suspended(gc.isenabled, _switch_collector)
