"""Real rank processes for tests: forked from the test process, so that torch is imported once.

Every run has a process group of its own. Loader workers are in it too, so one SIGKILL to the group
is what a preempted machine looks like. Each rank finds the environment that torchrun would give.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM  # by its own choice, on that signal


def free_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    timeout_s: float = 300.0,  # only there to end a hang, on a busy machine, too
    log: str | os.PathLike[str] | None = None,
) -> list[int]:
    """Run a function in forked ranks; returns their exit statuses, negative for a signal.

    Raises:
        TimeoutError: A rank was still running after ``timeout_s``; all were killed.
    """
    pids = start_ranks(function, *args, world_size=world_size, log=log)
    try:
        return wait_for_ranks(pids, pids[0], timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{Path(log).read_text() if log else ''}") from None


def start_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    leader: int = 0,
    log: str | os.PathLike[str] | None = None,
) -> list[int]:
    """Fork the ranks, into the process group of ``leader`` or of the first one; their pids."""
    port = free_port()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(function, args, rank, world_size, port, leader, log)
        leader = leader or pid
        # In both processes: otherwise a rank may kill the group before it is formed.
        os.setpgid(pid, leader)
        pids.append(pid)
    return pids


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    leader: int,
    log: str | os.PathLike[str] | None,
) -> None:
    status = 1
    try:
        if os.getpgid(0) != (leader or os.getpid()):
            os.setpgid(0, leader)
        _redirect(log)
        _environment(rank, world_size, port)
        function(*args)
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(log: str | os.PathLike[str] | None) -> None:
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    os.environ["PYTHONFAULTHANDLER"] = "1"  # programs that the rank starts


def _environment(rank: int, world_size: int, port: int) -> None:
    if world_size == 1:
        return
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
    )


def wait_for_ranks(pids: list[int], leader: int, timeout_s: float) -> list[int]:
    """The exit statuses of ranks that were started; then their process group ends, whole.

    Raises:
        TimeoutError: A rank was still running after ``timeout_s``; all were killed, and their log
            tells where they were.
    """
    deadline = time.monotonic() + timeout_s
    statuses: dict[int, int] = {}
    try:
        while len(statuses) < len(pids):
            for pid in pids:
                if pid not in statuses:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        statuses[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                _dump_stacks(leader)
                raise TimeoutError(f"ranks {pids} have not ended in {timeout_s} s: {statuses}")
            time.sleep(0.01)
    finally:
        # What is left of the run, workers included, whether it ended well or not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        for pid in pids:
            if pid not in statuses:
                os.waitpid(pid, 0)
    return [statuses[pid] for pid in pids]


def _dump_stacks(leader: int) -> None:
    """Let each process of a group write the stacks of its threads, by which it ends."""
    for pid in _members(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    patience = time.monotonic() + 5
    while _members(leader) and time.monotonic() < patience:
        time.sleep(0.05)


def _members(leader: int) -> list[int]:
    """The processes of a group that have not ended, those first that were started last."""
    pids = []
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int, reverse=True):
        with contextlib.suppress(OSError):
            state, _, group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                pids.append(int(name))
    return pids
