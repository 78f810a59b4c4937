"""Switches of the whole process that are off for a while, whatever threads want them so.

Set and restored by each thread by itself, two threads could leave a switch off for good. So users
are counted: the first turns it off, the last puts it back as the first found it. A process forked
in between has none of these threads, and has the switch as it was before.
"""

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
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep it off for a block."""
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
