"""Loader workers outlive the SIGTERM that a scheduler sends to all processes of a job at once.

The training process ends its step and saves before it goes, and workers that died of that signal
would fail the step. They go when it asks for it (torch does so as its last resort), or is gone:
within a second, whatever they are busy with. They hold its sockets, too, and as long as these are
open no other rank is told that it was killed.

Who sent a signal is told to ``sigtimedwait`` only, so that the signal is blocked in the worker, and
a thread waits for it. Programs that a worker starts inherit that: end them by ``kill()``.
"""

import functools
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing import process

from air_lightning.volumes.threads import NO_THREAD, start_thread

_LOOK_EVERY_S = 1.0


def outliving(init: Callable[[int], None]) -> Callable[[int], None]:
    """A ``worker_init_fn`` that lets the worker outlive its job's SIGTERM, then calls ``init``."""
    return functools.partial(_start_worker, init, os.getpid())


def block_termination() -> None:
    """Leave the signal to what ``outliving`` starts later: for what a worker does before that."""
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _start_worker(init: Callable[[int], None], parent: int, worker: int) -> None:
    # Before any thread is started: those would else take the signal, and end the process.
    block_termination()
    if hasattr(signal, "sigtimedwait"):
        # The parent as it was when it forked: one that is gone by now has another in its place.
        thread = start_thread(_obey, "air-lightning-term", parent, _sockets())
        if thread is None:
            # Nobody would obey, and whoever ends this worker waits for that.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            raise RuntimeError(NO_THREAD)
    init(worker)


def _obey(parent: int, inherited: str | None) -> None:
    while True:
        told = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S)
        if os.getppid() != parent or (told is not None and told.si_pid == parent):
            own = _sockets()
            if own is not None and own != inherited:
                shutil.rmtree(own, ignore_errors=True)
            os._exit(0)


def _sockets() -> str | None:
    """The directory in which this process hands out tensors; an exit of its own removes it."""
    directory: str | None = vars(process.current_process())["_config"].get("tempdir")
    return directory
