"""A FUSE pass-through mount that answers as slowly, and as badly, as it is told.

``with slow_mount(source, open_delay_s=0.02) as mount:`` mounts ``source``; ``mount`` is the path of
the mount, a ``str``. It is served by a process of its own (``fuse_server.py``), so neither the
test's interpreter lock nor its death is in the way. While it is in use::

    mount.delay(open=0.02)      seconds per operation; entry=: per entry of a listing
    mount.bandwidth(2e8, 5e7)   bytes per second in all, and of each open handle
    mount.fail("open", EIO, rate=0.03, seed=1)     errors
    mount.hang("read", seconds=4, times=1)         answers that do not come for a while
    mount.shorten(times=1)      reads that give half of what is there
    mount.touch("a")            a file that is written whenever it is read
    mount.hide("a", times=9)    names that it does not know yet
    mount.haunt("/b")           a directory that it still lists
    mount.go_away(), mount.come_back()             unmounted, or dead
    mount.heal()                none of these faults and delays any more
    mount.counts(), mount.calls()                  what was asked of it

    with mount.holding("open", until=4): ...       answers none before four are asked at once

Like a volume it has no links and no locks; ``refuse_rename`` makes it refuse renames too.
"""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from fuse_server import OPERATIONS, SHARED_BYTES, Shared, read_plan

_DEADLINE_S = 150.0  # that a mount may take to come up on a busy machine
_PATIENCE_S = 20.0  # with a server that does not end


class Mount(str):
    """The path of a mount, and its controls."""

    __slots__ = ("_control", "_server", "_shared")

    def __new__(cls, path: str, control: str, server: "_Server") -> "Mount":
        mount = super().__new__(cls, path)
        mount._control = control
        mount._server = server
        mount._shared = Shared(control)
        return mount

    def delay(self, **delays_s: float) -> None:
        """Set delays in seconds by operation: ``delay(open=0.02, read=0.001)``."""
        self._update(lambda plan: plan["delays"].update(delays_s))

    def bandwidth(self, in_all: float = 0.0, per_stream: float = 0.0) -> None:
        """Limit bytes per second of reads, over the mount and of each open handle; 0: no limit."""
        self._update(lambda plan: plan.update(bandwidth=in_all, stream_bandwidth=per_stream))

    def fail(
        self,
        operation: str,
        error: int,
        *,
        name: str = "",
        times: int = -1,
        rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Fail an operation on paths that contain ``name``.

        Args:
            operation: Which one.
            error: The errno.
            name: A part of the paths that fail.
            times: How often it fails; -1 for always.
            rate: The share of the calls that fail, chosen at random from ``seed``.
            seed: Of the choice.
        """
        self._add(operation, errno=error, name=name, times=times, rate=rate, seed=seed)

    def hang(
        self,
        operation: str,
        *,
        seconds: float = 1e9,
        name: str = "",
        times: int = -1,
        after: int = 0,
    ) -> None:
        """Answer only after so many seconds, or when the plan changes; all but ``after`` calls."""
        self._add(operation, seconds=seconds, name=name, times=times, after=after)

    def shorten(self, *, name: str = "", times: int = -1, rate: float = 1.0, seed: int = 0) -> None:
        """Let reads give half of the bytes, without an error."""
        self._add("read", short=True, name=name, times=times, rate=rate, seed=seed)

    def touch(self, name: str) -> None:
        """Let each read of paths that contain ``name`` change the file's time."""
        self._add("read", touched=True, name=name)

    @contextlib.contextmanager
    def holding(
        self, operation: str, *, until: int, of: str = "", name: str = ""
    ) -> Iterator[None]:
        """Answer no call on paths that contain ``name`` before so many were asked in the block.

        Answered one after the other they would never be so many; how long it takes says nothing.

        Args:
            operation: Which one is not answered.
            until: How many must have been asked; then the mount is healed.
            of: Of which operation; of the same by default.
            name: A part of the paths.

        Raises:
            TimeoutError: There were fewer in a long time.
        """
        mark, over, asked = len(self.calls()), threading.Event(), [0]

        def watch() -> None:
            deadline = time.monotonic() + _DEADLINE_S
            while asked[0] < until and not over.wait(0.01) and time.monotonic() < deadline:
                calls = self.calls()[mark:]
                asked[0] = sum(done == (of or operation) and name in on for done, on in calls)
            self.heal()

        self.hang(operation, name=name)
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if asked[0] < until:
            raise TimeoutError(f"{asked[0]} calls came at once, and {until} were to come")

    def hide(self, name: str, *, times: int = 1 << 30) -> None:
        """Know nothing of paths that contain ``name``, as of what was written elsewhere just now.

        Args:
            name: A part of the paths.
            times: How often they are asked for in vain, until they are there.
        """
        self._add("getattr", errno=errno.ENOENT, name=name, times=times, hidden=True)

    def haunt(self, path: str) -> None:
        """List a directory, as ``/a/b``, that is none: one that was deleted elsewhere just now."""
        self._update(lambda plan: plan["ghosts"].append(path))

    def heal(self) -> None:
        """Fail no more, and answer at once."""
        healthy = {"delays": {}, "faults": [], "bandwidth": 0.0, "stream_bandwidth": 0.0}
        healthy["ghosts"] = []
        self._update(lambda plan: plan.update(healthy))

    def go_away(self, *, killed: bool = False) -> None:
        """Unmount, so that its path is an empty directory; or kill its server (ENOTCONN)."""
        if killed:
            self._server.kill()
        else:
            self._server.detach()

    def come_back(self) -> None:
        """Mount again at the same path after ``go_away``."""
        self._server.detach()
        self._server.start()

    def counts(self) -> dict[str, int]:
        """How often each operation was called so far."""
        return dict(zip(OPERATIONS, self._shared.counts, strict=True))

    def bytes_read(self) -> int:
        """Bytes that reads gave so far."""
        return self._shared.head[1]

    def faults(self) -> int:
        """How often a fault struck since the last ``heal``."""
        faults = read_plan(self._control)["faults"]
        return sum(self._shared.used[fault["number"]] for fault in faults)

    def calls(self) -> list[list[str]]:
        """``[operation, path]`` of every counted call so far, in order."""
        with open(f"{self._control}/calls", errors="surrogateescape") as file:
            return [line.rstrip("\n").split(" ", 1) for line in file]

    def _add(self, operation: str, **values) -> None:
        if operation not in OPERATIONS:
            raise ValueError(f"{operation!r} was given; wanted is one of {', '.join(OPERATIONS)}")
        fault = {"operation": operation, **_NO_FAULT, **values}

        def add(plan: dict) -> None:
            # No number twice: a call that was under way at a heal may count its fault after it.
            plan["faults"].append({**fault, "number": plan["made"]})
            plan["made"] += 1

        self._update(add)

    def _update(self, change) -> None:
        plan = read_plan(self._control)
        change(plan)
        _write_plan(self._control, plan)
        self._shared.head[0] += 1


_NO_FAULT = {
    "errno": 0,
    "seconds": 0.0,
    "short": False,
    "touched": False,
    "name": "",
    "times": -1,
    "rate": 1.0,
    "seed": 0,
    "after": 0,
    "hidden": False,
}


@contextlib.contextmanager
def slow_mount(
    source: str | os.PathLike[str],
    *,
    open_delay_s: float = 0.0,
    read_delay_s: float = 0.0,
    list_delay_s: float = 0.0,
    entry_delay_s: float = 0.0,
    bandwidth: float = 0.0,
    stream_bandwidth: float = 0.0,
    refuse_rename: bool = False,
    types: bool = True,
    flush: bool = True,
    attr_timeout_s: float = 0.0,
    entry_timeout_s: float | None = None,
) -> Iterator[Mount]:
    """Mount ``source`` for the block.

    Args:
        source: The directory beneath.
        open_delay_s: Seconds of each open.
        read_delay_s: Seconds of each read request (of up to 128 KiB, mostly).
        list_delay_s: Seconds of each listing.
        entry_delay_s: Seconds of each entry in a listing.
        bandwidth: Bytes per second of reads in all; 0 for no limit.
        stream_bandwidth: Bytes per second of each open handle.
        refuse_rename: Whether renames fail with EPERM.
        types: Whether listings say what is a directory.
        flush: Whether it is told of each close: a request more per file.
        attr_timeout_s: For how long the kernel keeps sizes and times.
        entry_timeout_s: For how long the kernel keeps names; by default as long, and a second at
            least.
    """
    control = tempfile.mkdtemp(prefix="slow-mount-")
    os.mkdir(f"{control}/mount")
    with open(f"{control}/shared", "wb") as file:
        file.truncate(SHARED_BYTES)
    delays = {"open": open_delay_s, "read": read_delay_s, "readdir": list_delay_s}
    delays["entry"] = entry_delay_s
    plan = {"delays": delays, "faults": [], "made": 0, "ghosts": []}
    plan |= {"bandwidth": bandwidth, "stream_bandwidth": stream_bandwidth}
    _write_plan(control, plan)
    if entry_timeout_s is None:
        entry_timeout_s = max(1.0, attr_timeout_s)
    options = {"attr_timeout": attr_timeout_s, "entry_timeout": entry_timeout_s}
    options |= {"flush": flush, "types": types}
    server = _Server(os.fspath(source), control, options)
    mount = Mount(f"{control}/mount", control, server)
    if refuse_rename:
        mount.fail("rename", errno.EPERM)
    try:
        server.start()
        yield mount
    finally:
        server.stop()
        shutil.rmtree(control, ignore_errors=True)


def has_fuse() -> bool:
    """Whether this machine can mount."""
    return os.path.exists("/dev/fuse") and shutil.which("fusermount3") is not None


class _Server:
    """The serving process, which may be ended and started again."""

    def __init__(self, source: str, control: str, options: dict) -> None:
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fuse_server.py")
        self._command = [sys.executable, program, source, control, json.dumps(options)]
        self._control = control
        self._mountpoint = f"{control}/mount"
        self._processes: list[subprocess.Popen] = []

    def start(self) -> None:
        """Mount, and wait until it is."""
        with open(f"{self._control}/log", "ab") as log:
            self._processes.append(subprocess.Popen(self._command, stdout=log, stderr=log))
        deadline = time.monotonic() + _DEADLINE_S
        while not os.path.ismount(self._mountpoint):
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                with open(f"{self._control}/log") as log:
                    raise RuntimeError(f"the mount did not come up: {log.read()[-2000:]}")
            time.sleep(0.02)

    def detach(self) -> None:
        """Take the mount off its path; its server ends when its last open file is closed."""
        command = ["fusermount3", "-u", "-z", self._mountpoint]
        subprocess.run(command, check=False, capture_output=True)

    def kill(self) -> None:
        """End the server at once; its mount stays, and is dead."""
        self._processes[-1].kill()
        self._processes[-1].wait()

    def stop(self) -> None:
        """Unmount, and end every server there was."""
        self.detach()
        for process in self._processes:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # noqa: PERF203 - of one or two
                process.kill()
                process.wait()


def _write_plan(control: str, plan: dict) -> None:
    with open(f"{control}/plan.new", "w") as file:
        json.dump(plan, file)
    os.replace(f"{control}/plan.new", f"{control}/plan")
