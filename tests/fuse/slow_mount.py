"""A FUSE pass-through mount that answers as slowly, and as badly, as it is told.

``with slow_mount(source, open_delay_s=0.02) as mount:`` mounts ``source``; ``mount`` is the path of
the mount, a ``str``. It is served by a process of its own, so neither the test's interpreter lock
nor its death is in the way. ``mount.delay(...)`` and ``mount.fail(...)`` change its behaviour while
it is in use; ``mount.calls()`` counts what was asked of it. Like a volume it has no links and no
locks; ``refuse_rename`` makes it refuse renames too, and without ``types`` its listings do
not tell files from directories.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

_DEADLINE_S = 20.0


class Mount(str):
    """The path of a mount, and its controls."""

    __slots__ = ("_control",)

    def __new__(cls, path: str, control: str) -> "Mount":
        mount = super().__new__(cls, path)
        mount._control = control
        return mount

    def delay(self, **delays_s: float) -> None:
        """Set delays in seconds by operation: ``delay(open=0.02, read=0.001)``."""
        self._update(lambda plan: plan["delays"].update(delays_s))

    def fail(self, operation: str, error: int, *, name: str = "", times: int = -1) -> None:
        """Fail an operation on paths that contain ``name``: the next ``times``, -1 for all."""
        fault = {"operation": operation, "errno": error, "name": name, "times": times}
        self._update(lambda plan: plan["faults"].append(fault))

    def heal(self) -> None:
        """Fail no more, and answer at once."""
        self._update(lambda plan: plan.update(delays={}, faults=[]))

    def calls(self) -> list[list[str]]:
        """``[operation, path]`` of every counted call so far, in order."""
        with open(f"{self._control}/calls") as file:
            return [line.rstrip("\n").split(" ", 1) for line in file]

    def _update(self, change) -> None:
        plan = _read_plan(self._control)
        change(plan)
        plan["version"] += 1
        _write_plan(self._control, plan)


@contextlib.contextmanager
def slow_mount(
    source: str | os.PathLike[str],
    *,
    open_delay_s: float = 0.0,
    read_delay_s: float = 0.0,
    list_delay_s: float = 0.0,
    list_delay_per_entry_s: float = 0.0,
    refuse_rename: bool = False,
    types: bool = True,
    attr_timeout_s: float = 0.0,
) -> Iterator[Mount]:
    """Mount ``source`` for the block; skips or fails where the machine has no FUSE.

    The kernel keeps sizes for ``attr_timeout_s``; 1 is the default of mounts.
    """
    control = tempfile.mkdtemp(prefix="slow-mount-")
    mountpoint = os.path.join(control, "mount")
    os.mkdir(mountpoint)
    delays = {"open": open_delay_s, "read": read_delay_s, "readdir": list_delay_s}
    options = {"types": types, "per_entry_s": list_delay_per_entry_s, "attr_s": attr_timeout_s}
    faults = []
    if refuse_rename:
        faults.append({"operation": "rename", "errno": errno.EPERM, "name": "", "times": -1})
    _write_plan(control, {"version": 0, "delays": delays, "faults": faults, **options})
    with open(f"{control}/log", "wb") as log:
        command = [sys.executable, os.path.abspath(__file__), os.fspath(source), control]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await_mount(mountpoint, server, control)
        yield Mount(mountpoint, control)
    finally:
        _unmount(mountpoint, server)
        shutil.rmtree(control, ignore_errors=True)


def has_fuse() -> bool:
    """Whether this machine can mount."""
    return os.path.exists("/dev/fuse") and shutil.which("fusermount3") is not None


def _await_mount(mountpoint: str, server: subprocess.Popen, control: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not os.path.ismount(mountpoint):
        if server.poll() is not None or time.monotonic() > deadline:
            with open(f"{control}/log") as log:
                raise RuntimeError(f"the mount did not come up: {log.read()[-2000:]}")
        time.sleep(0.02)


def _unmount(mountpoint: str, server: subprocess.Popen) -> None:
    subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False, capture_output=True)
    try:
        server.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _read_plan(control: str) -> dict:
    with open(f"{control}/plan") as file:
        return json.load(file)


def _write_plan(control: str, plan: dict) -> None:
    with open(f"{control}/plan.new", "w") as file:
        json.dump(plan, file)
    os.replace(f"{control}/plan.new", f"{control}/plan")


class PassThrough:
    """The operations of the mount; what it does not define, libfuse answers with ENOSYS."""

    def __init__(self, source: str, control: str) -> None:
        self._source = source
        self._control = control
        self._lock = threading.Lock()
        self._stamp = None
        self._plan = {}
        self._used = {}
        self._calls = open(f"{self._control}/calls", "a", buffering=1)  # noqa: SIM115 - for good

    def _meet(self, operation: str, path: str) -> str:
        """Be slow, fail, or give the path beneath."""
        with self._lock:
            self._calls.write(f"{operation} {path}\n")
            status = os.stat(f"{self._control}/plan")
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._plan, self._stamp = _read_plan(self._control), stamp
                self._used = {}
            fault = self._fault(operation, path)
        time.sleep(self._plan["delays"].get(operation, 0.0))
        if fault is not None:
            raise OSError(fault, os.strerror(fault))
        return self._source + path

    def _fault(self, operation: str, path: str):
        for number, fault in enumerate(self._plan["faults"]):
            used = self._used.get(number, 0)
            left = fault["times"] < 0 or used < fault["times"]
            if left and fault["operation"] == operation and fault["name"] in path:
                self._used[number] = used + 1
                return fault["errno"]
        return None

    def getattr(self, path, fh=None):
        status = os.lstat(self._meet("getattr", path))
        return {key: getattr(status, key) for key in _STAT_KEYS}

    def readdir(self, path, fh):
        with os.scandir(self._meet("readdir", path)) as found:
            entries = list(found)
        time.sleep(self._plan["per_entry_s"] * len(entries))
        for name in (".", ".."):
            yield name, {"st_mode": stat.S_IFDIR}, 0
        for entry in entries:
            mode = stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG
            yield entry.name, {"st_mode": mode if self._plan["types"] else 0}, 0

    def open(self, path, flags):
        return os.open(self._meet("open", path), flags)

    def create(self, path, mode, fi=None):
        return os.open(self._meet("create", path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path, size, offset, fh):
        self._meet("read", path)
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        self._meet("write", path)
        if offset != os.fstat(fh).st_size:
            raise OSError(errno.EINVAL, "not at the end")  # a volume is written front to back
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._meet("truncate", path), length)
        return 0

    def flush(self, path, fh):
        self._meet("flush", path)
        return 0

    def fsync(self, path, datasync, fh):
        self._meet("fsync", path)
        return 0

    def release(self, path, fh):
        os.close(fh)
        return 0

    def rename(self, old, new):
        os.rename(self._meet("rename", old), self._source + new)
        return 0

    def unlink(self, path):
        os.unlink(self._meet("unlink", path))
        return 0

    def mkdir(self, path, mode):
        os.mkdir(self._meet("mkdir", path), mode)
        return 0

    def rmdir(self, path):
        os.rmdir(self._meet("rmdir", path))
        return 0

    def statfs(self, path):
        status = os.statvfs(self._source)
        return {key: getattr(status, key) for key in _STATFS_KEYS}


def _serve(source: str, control: str) -> None:
    import mfusepy

    operations = type("Operations", (PassThrough, mfusepy.Operations), {})(source, control)
    timeout = _read_plan(control)["attr_s"]
    options = {"foreground": True, "nothreads": False, "attr_timeout": timeout}
    options["entry_timeout"] = max(1.0, timeout)
    mfusepy.FUSE(operations, f"{control}/mount", **options)


_STAT_KEYS = (
    *("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid"),
)
_STATFS_KEYS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_frsize", "f_namemax")

if __name__ == "__main__":
    _serve(os.path.realpath(sys.argv[1]), sys.argv[2])
