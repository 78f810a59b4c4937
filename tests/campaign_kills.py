"""Starts one attempt of a campaign, and kills it at a moment that was drawn.

    Moment         a time since the start, or the n-th operation on files of some kind, in whichever
                   process comes to it first (ranks and workers tell of it by an audit hook)
    hold           the operation is not done before the kill, though other threads and processes
                   go on; otherwise the kill comes some time after it
    Blow           a signal to the whole process group, one rank, a loader's worker, the launcher
    launcher       as torchrun: when one rank ends badly the others get SIGTERM, later SIGKILL

No code is changed for it: Python itself announces each open, rename and removal before it is done.
"""

import atexit
import contextlib
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from ranks import start_ranks

GRACE_S = 30.0  # as of torchrun: what the launcher gives ranks after one of them ended badly
WAIT_S = 150.0  # for an attempt that should end by itself
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink")


@dataclass(frozen=True)
class Moment:
    """When to strike.

    Attributes:
        kind: ``time``, or a kind of operation, see ``kind_of``.
        count: Which of these operations.
        after_s: Seconds from the start, or from the operation, to the blow.
        holds: Whether the operation has to wait for the blow.
    """

    kind: str
    count: int = 0
    after_s: float = 0.0
    holds: bool = False

    def __str__(self) -> str:
        if self.kind == "time":
            return f"{self.after_s:.3f} s after the start"
        held = "held for" if self.holds else "and"
        return f"operation {self.count} on {self.kind}, {held} {1000 * self.after_s:.1f} ms"


@dataclass(frozen=True)
class Blow:
    """What is struck, and how.

    Attributes:
        victim: ``group``, ``rank``, ``worker`` or ``launcher``.
        number: The signal.
        rank: Which rank, or whose worker.
        worker: Which worker.
        then_s: Seconds to SIGKILL for the whole group, after another signal or that to the
            launcher; None for as long as it takes.
    """

    victim: str
    number: int = signal.SIGKILL
    rank: int = 0
    worker: int = 0
    then_s: float | None = None

    def __str__(self) -> str:
        which = f" {self.rank}" if self.victim in ("rank", "worker") else ""
        then = "" if self.then_s is None else f", SIGKILL to all {self.then_s:.2f} s later"
        return f"{signal.Signals(self.number).name} to {self.victim}{which}{then}"


def kind_of(event: str, args: tuple[Any, ...], roots: tuple[str, str]) -> str | None:
    """What an audited operation means for the run, if it touches checkpoints or the cache.

    Args:
        event: Of Python's audit events.
        args: Its arguments.
        roots: Directories of checkpoints, and of caches.
    """
    if event != "open" and event not in _CHANGES:
        return None
    path = str(args[1] if event == "os.rename" else args[0])
    if event in ("os.remove", "os.rmdir"):
        # Trees are deleted by names relative to an open directory.
        return "deletion" if roots[0] in path or not path.startswith("/") else None
    if path.startswith(roots[1]):
        return "cache"
    if not path.startswith(roots[0]):
        return None
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
        return "restore"
    for kind, name in (("shard", ".distcp"), ("manifest", "air_manifest"), ("marker", ".metadata")):
        if name in os.path.basename(path):
            return kind
    return "directory"


class Watch:
    """The pipes through which processes of an attempt tell of an operation, and wait."""

    def __init__(self, moment: Moment, roots: tuple[str, str]) -> None:
        self._moment, self._roots = moment, roots
        self._told, self._tell = os.pipe()
        self._waits, self._release = os.pipe()
        self._left = moment.count

    def begin(self) -> None:
        """Count operations in this process, and in those that it forks."""
        if self._moment.kind != "time":
            sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._left <= 0 or kind_of(event, args, self._roots) != self._moment.kind:
            return
        self._left -= 1
        if self._left == 0:
            os.write(self._tell, b"%d\n" % os.getpid())
            if self._moment.holds:
                os.read(self._waits, 1)

    def wait(self, seconds: float) -> bool:
        """Whether some process came to the moment."""
        ready, _, _ = select.select([self._told], [], [], seconds)
        return bool(ready)

    def release(self) -> None:
        """Let whoever waits go on; more than one may."""
        os.write(self._release, bytes(16))

    def close(self) -> None:
        """Close the pipes."""
        for end in (self._told, self._tell, self._waits, self._release):
            os.close(end)


@contextlib.contextmanager
def attempt(
    train: Callable[[], None], world_size: int, watch: Watch, log: str
) -> Iterator[tuple[psutil.Process, list[int]]]:
    """Start a launcher and its ranks; gives the launcher and the ranks' pids. All end with it."""
    receive, send = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            status = _launch(train, world_size, watch, log, send)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(send)
    try:
        with os.fdopen(receive) as pids:
            yield psutil.Process(launcher), [int(pid) for pid in pids.readline().split()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(launcher, 0)
        _wait_for(lambda: not _alive(launcher), 20.0)


def _launch(train: Callable[[], None], world_size: int, watch: Watch, log: str, send: int) -> int:
    """Be the launcher; gives its exit status."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    leader = os.getpid()

    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(send)
        watch.begin()
        _as_a_process_of_its_own(train)

    pids = start_ranks(rank, world_size=world_size, leader=leader, log=log)
    os.write(send, (" ".join(map(str, pids)) + "\n").encode())
    os.close(send)
    return _supervise(set(pids), asked)


def _as_a_process_of_its_own(train: Callable[[], None]) -> None:
    """Do at the end what Python does at an exit; ranks of these tests end by ``os._exit``."""
    atexit._clear()  # the campaign's own directory is not theirs to delete
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    try:
        train()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _supervise(running: set[int], asked: list[int]) -> int:
    status, deadline = 0, None
    while running:
        for pid in list(running):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                status = status or abs(os.waitstatus_to_exitcode(code))
        if deadline is None and (status or asked):
            deadline = time.monotonic() + GRACE_S
            _signal(running, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _signal(running, signal.SIGKILL)
            return 254  # a rank did not end
        time.sleep(0.005)
    return status


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def strike(blow: Blow, launcher: psutil.Process, ranks: list[int]) -> bool:
    """Strike; False where there is nobody (any more) to strike."""
    pids = {
        "launcher": lambda: [launcher.pid],
        "rank": lambda: ranks[blow.rank : blow.rank + 1],
        "worker": lambda: _workers(ranks[blow.rank])[blow.worker :],
        "group": lambda: [-launcher.pid],
    }[blow.victim]()
    try:
        if launcher.status() == psutil.STATUS_ZOMBIE or not pids:
            return False
        os.kill(pids[0], blow.number)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    return True


def _workers(rank: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(rank).children()]
    except psutil.NoSuchProcess:
        return []


def run_to(
    moment: Moment,
    blow: Blow | None,
    train: Callable[[], None],
    world_size: int,
    roots: tuple[str, str],
    log: str,
) -> tuple[bool, int | None]:
    """One attempt, struck at the moment; whether it was, and the launcher's exit status.

    None is that of a launcher that was killed. 254: a rank that had to be killed since it did not
    end, which is a fault.
    """
    watch = Watch(moment, roots)
    try:
        with attempt(train, world_size, watch, log) as (launcher, ranks):
            struck = blow is not None and _strike_at(moment, blow, watch, launcher, ranks)
            watch.release()
            if struck and blow is not None and blow.then_s is not None:
                _wait_for(lambda: not _alive(launcher.pid), blow.then_s)
                os.killpg(launcher.pid, signal.SIGKILL)
            return struck, _status(launcher)
    finally:
        watch.close()


def _strike_at(
    moment: Moment, blow: Blow, watch: Watch, launcher: psutil.Process, ranks: list[int]
) -> bool:
    deadline = time.monotonic() + (moment.after_s if moment.kind == "time" else WAIT_S)
    while not watch.wait(0.005):
        if launcher.status() == psutil.STATUS_ZOMBIE:
            return False  # it is over, and the moment has not come
        if time.monotonic() > deadline:
            break
    if moment.kind != "time":
        time.sleep(moment.after_s)
    return strike(blow, launcher, ranks)


def _status(launcher: psutil.Process) -> int | None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, code = os.waitpid(launcher.pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            return None if status < 0 else status
        time.sleep(0.005)
    return 254


def _alive(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def draw(
    chance: random.Random, usual_s: float, world_size: int, *, signals: bool
) -> tuple[Moment, Blow]:
    """Draw a moment, in three of five cases one of a save, and what is struck then."""
    kind = chance.choices(
        ["time", "shard", "manifest", "marker", "directory", "deletion", "restore", "cache"],
        [28, 16, 10, 14, 4, 16, 6, 6],
    )[0]
    most = {"shard": 40, "manifest": 12, "marker": 12, "directory": 6, "deletion": 60}
    count = chance.randint(1, most.get(kind, 30))
    holds = chance.random() < 0.5
    after_s = chance.choice([0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.2)])
    if kind == "time":
        moment = Moment(kind, after_s=chance.uniform(0, usual_s))
    else:
        moment = Moment(kind, count, after_s, holds)
    return moment, _draw_blow(chance, world_size, signals=signals)


def _draw_blow(chance: random.Random, world_size: int, *, signals: bool) -> Blow:
    victim = chance.choices(["group", "rank", "worker", "launcher"], [45, 25, 15, 15])[0]
    rank = chance.randrange(world_size)
    if signals and victim != "worker" and chance.random() < 0.5:
        # A grace that is sometimes too short for a save.
        then_s = chance.choice([None, chance.uniform(0, 0.5)])
        return Blow(victim, signal.SIGTERM, rank, then_s=then_s)
    then_s = chance.uniform(0, 0.5) if victim == "launcher" else None
    return Blow(victim, signal.SIGKILL, rank, chance.randrange(2), then_s)
