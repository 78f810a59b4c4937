"""Starting threads on a machine that may have none left (``ulimit -u``, a pids cgroup)."""

import threading
from collections.abc import Callable
from typing import Any

NO_THREAD = (
    "This process can't start new threads: its user, or its container, has as many as it may. "
    "Raise that limit (ulimit -u, or the container's number of pids), or use fewer workers."
)


def start_thread(target: Callable[..., Any], name: str, *args: Any) -> threading.Thread | None:
    """Start a daemon thread; None where no more can be started: the caller does its work."""
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
