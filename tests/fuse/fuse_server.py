"""The process behind ``slow_mount``: passes a directory through FUSE, as slow and bad as planned.

Reads its plan (JSON) anew whenever the version in the shared memory moves, so that a call costs no
look at the disk, and counts its calls there. What was used up of a fault is kept there too: it
outlives a server that is killed and started again.
"""

import errno
import json
import mmap
import os
import random
import stat
import sys
import threading
import time

OPERATIONS = (
    *("getattr", "readdir", "open", "create", "read", "write", "truncate", "flush", "fsync"),
    *("release", "rename", "unlink", "mkdir", "rmdir", "statfs"),
)
_FAULTS = 256  # of one mount
_WORDS = 2 + len(OPERATIONS) + _FAULTS
SHARED_BYTES = 8 * _WORDS


class Shared:
    """Numbers that the server and all who hold the mount see: a version, counters, used faults."""

    def __init__(self, control: str) -> None:
        with open(f"{control}/shared", "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SHARED_BYTES)
        words = memoryview(self._memory).cast("Q")
        self.head = words[:2]  # version, bytes read
        self.counts = words[2 : 2 + len(OPERATIONS)]
        self.used = words[2 + len(OPERATIONS) :]


def read_plan(control: str) -> dict:
    with open(f"{control}/plan") as file:
        return json.load(file)


class PassThrough:
    """The operations of the mount; what it does not define, libfuse answers with ENOSYS."""

    use_ns = True

    def __init__(self, source: str, control: str, types: bool) -> None:
        self._types = types
        self._source = source
        self._control = control
        self._shared = Shared(control)
        self._lock = threading.Lock()
        self._version = -1
        self._delays: dict[str, float] = {}
        self._faults: dict[str, list[tuple[int, dict]]] = {}
        self._random: dict[int, random.Random] = {}
        self._free_at = {}  # by handle, None for all together: when its bandwidth is free again
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._log = os.open(f"{control}/calls", flags, 0o644)
        self._number = {name: number for number, name in enumerate(OPERATIONS)}

    def _load(self) -> None:
        self._version = self._shared.head[0]
        plan = read_plan(self._control)
        self._delays = plan["delays"]
        self._bandwidth, self._per_stream = plan["bandwidth"], plan["stream_bandwidth"]
        self._ghosts = plan["ghosts"]
        self._faults = {}
        for fault in plan["faults"]:
            self._faults.setdefault(fault["operation"], []).append((fault["number"], fault))

    def _meet(self, operation: str, path: str) -> tuple[str, bool]:
        """Be slow, fail, or give the path beneath; and whether a read is to be short."""
        with self._lock:
            self._shared.counts[self._number[operation]] += 1
            line = f"{operation} {path}".replace("\n", "\\n")
            os.write(self._log, f"{line}\n".encode(errors="surrogateescape"))
            if self._shared.head[0] != self._version:
                self._load()
            version, fault = self._version, self._fault(operation, path)
            delay = self._delays.get(operation, 0.0)
        if delay:
            time.sleep(delay)
        if fault is None:
            return self._source + path, False
        if fault["seconds"]:
            self._hang(fault["seconds"], version)
        if fault["touched"]:
            self._touch(self._source + path)
        if fault["errno"]:
            raise OSError(fault["errno"], os.strerror(fault["errno"]))
        return self._source + path, fault["short"]

    def _fault(self, operation: str, path: str) -> dict | None:
        for number, fault in self._faults.get(operation, ()):
            used = self._shared.used[number]
            left = fault["times"] < 0 or used < fault["times"] + fault["after"]
            if left and fault["name"] in path and self._strikes(number, fault):
                self._shared.used[number] += 1
                if used >= fault["after"]:
                    return fault
        return None

    def _is_hidden(self, path: str) -> bool:
        return any(
            fault["hidden"] and fault["name"] in path and self._shared.used[number] < fault["times"]
            for number, fault in self._faults.get("getattr", ())
        )

    def _strikes(self, number: int, fault: dict) -> bool:
        if fault["rate"] >= 1:
            return True
        drawn = self._random.setdefault(number, random.Random(fault["seed"]))
        return drawn.random() < fault["rate"]

    def _hang(self, seconds: float, version: int) -> None:
        """Answer after some time, or when the plan changes: healing ends a hang."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._shared.head[0] == version:
            time.sleep(0.01)

    def _touch(self, beneath: str) -> None:
        """Change a file's time: to one that it never had, however close together two calls are."""
        with self._lock:
            status = os.stat(beneath)
            os.utime(beneath, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))

    def _throttle(self, count: int, handle: int) -> None:
        if not self._bandwidth and not self._per_stream:
            return
        now = time.monotonic()
        with self._lock:
            at = now
            for key, limit in ((None, self._bandwidth), (handle, self._per_stream)):
                if limit:
                    free = max(now, self._free_at.get(key, 0.0)) + count / limit
                    self._free_at[key] = free
                    at = max(at, free)
        time.sleep(at - now)

    def getattr(self, path, fh=None):
        status = os.lstat(self._meet("getattr", path)[0])
        found = {key: getattr(status, key) for key in _STAT_KEYS}
        for key in ("st_atime", "st_ctime", "st_mtime"):
            found[key] = getattr(status, f"{key}_ns")
        return found

    def readdir(self, path, fh):
        beneath, _ = self._meet("readdir", path)
        with os.scandir(beneath) as entries:
            listed = [(entry.name, _type(entry), 0) for entry in entries]
        listed = [entry for entry in listed if not self._is_hidden(f"{path}/{entry[0]}")]
        ghosts = [os.path.split(ghost) for ghost in self._ghosts]
        listed += [(name, {"st_mode": stat.S_IFDIR}, 0) for head, name in ghosts if head == path]
        if self._delays.get("entry"):
            time.sleep(self._delays["entry"] * len(listed))
        if not self._types:
            return [".", "..", *(name for name, _, _ in listed)]
        return [".", "..", *listed]

    def open(self, path, flags):
        return os.open(self._meet("open", path)[0], flags)

    def create(self, path, mode, fi=None):
        return os.open(self._meet("create", path)[0], os.O_RDWR | os.O_CREAT, mode)

    def read(self, path, size, offset, fh):
        _, short = self._meet("read", path)
        data = os.pread(fh, size, offset)
        if short:
            data = data[: len(data) // 2]
        self._throttle(len(data), fh)
        with self._lock:
            self._shared.head[1] += len(data)
        return data

    def write(self, path, data, offset, fh):
        self._meet("write", path)
        if offset != os.fstat(fh).st_size:
            raise OSError(errno.EINVAL, "not at the end")  # a volume is written front to back
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._meet("truncate", path)[0], length)
        return 0

    def flush(self, path, fh):
        self._meet("flush", path)
        return 0

    def fsync(self, path, datasync, fh):
        self._meet("fsync", path)
        return 0

    def release(self, path, fh):
        os.close(fh)
        self._free_at.pop(fh, None)
        return 0

    def rename(self, old, new):
        os.rename(self._meet("rename", old)[0], self._source + new)
        return 0

    def unlink(self, path):
        os.unlink(self._meet("unlink", path)[0])
        return 0

    def mkdir(self, path, mode):
        os.mkdir(self._meet("mkdir", path)[0], mode)
        return 0

    def rmdir(self, path):
        os.rmdir(self._meet("rmdir", path)[0])
        return 0

    def statfs(self, path):
        status = os.statvfs(self._source)
        return {key: getattr(status, key) for key in _STATFS_KEYS}


def _type(entry: os.DirEntry) -> dict[str, int]:
    if entry.is_symlink():
        return {"st_mode": stat.S_IFLNK}
    return {"st_mode": stat.S_IFDIR if entry.is_dir() else stat.S_IFREG}


def _serve(source: str, control: str, options: dict) -> None:
    import mfusepy

    members = {} if options.pop("flush") else {"flush": None}
    if (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12):
        options["max_threads"] = 128  # ten by default, which would be the limit of every benchmark
    bases = (PassThrough, mfusepy.Operations)
    operations = type("Operations", bases, members)(source, control, options.pop("types"))
    # The kernel tells of a close a moment later. A file that is deleted meanwhile would be renamed
    # to a hidden name first, which a mount that refuses renames refuses as well.
    options["hard_remove"] = True
    mfusepy.FUSE(operations, f"{control}/mount", foreground=True, nothreads=False, **options)


_STAT_KEYS = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid")
_STATFS_KEYS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_frsize", "f_namemax")

if __name__ == "__main__":
    _serve(os.path.realpath(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
