"""Whether this is still the process in which something was made, told without a system call.

A fork copies everything. What belongs to one process (threads, locks, notes) keeps ``process`` from
when it was made, and compares it with what ``process`` is now::

    self._process = forks.process
    ...
    if self._process is forks.process:
"""

import os

process = object()
"""Another one in each process."""


def _renew() -> None:
    global process  # noqa: PLW0603 - one per process
    process = object()


os.register_at_fork(after_in_child=_renew)
