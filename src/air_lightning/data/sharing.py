"""One listing per node: ranks that construct the same dataset share what the first one lists.

Only where the launcher's environment tells that this process is one of several ranks of a job, and
without a word to the other ranks: a dataset that only one rank constructs must not wait for others.
The list lies in a directory of this user's own in the machine's temporary directory, one file for
each dataset, beside a lock::

    wait       a mark for each rank that waits for the lock
    lock       the first rank gets it, the others wait; the kernel drops it when its holder dies
    look       a list that lies there is taken if its listing ended after this construction began
    list       otherwise: list, and if others wait, put it there whole
    clean up   whoever finds that nobody waits any more removes what lies there

What must never be taken is a list from before: one rank may have listed alone, then written files,
then met the others at a barrier. So only a listing that was still under way when this rank came to
construct is this rank's, too; after a quick one each rank lists, which is as quick again. Whatever
fails here, the rank lists for itself.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat as stat_module
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from air_lightning.data.listing import FileList, take_listing
from air_lightning.data.manifest import pack, unpack
from air_lightning.errors import ManifestError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import Storage

_logger = logging.getLogger("air_lightning")

_SWEEP_S = 3600.0  # after which what a killed rank left behind is nobody's
# What tells a job, or one start of it, from another.
_JOB_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


class Seat(NamedTuple):
    """This process's place among the ranks of a job on this node.

    Attributes:
        job: What the ranks of this start of the job have in common, and no other process.
        rank: The rank within the node.
        ranks: Ranks on this node, as far as they are known: as many, or more.
    """

    job: str
    rank: int
    ranks: int


def list_for_node(
    storage: Storage, pattern: str | None, storage_options: Mapping[str, Any] | None
) -> FileList:
    """List a dataset's files, once for all ranks of this node.

    Raises:
        EmptyVolumeError: There is no file, or none that matches the pattern.
        StorageError: They cannot be listed.
    """
    if get_worker_info() is not None:
        # A loader's workers have the environment of their rank, and would take each other's lists.
        return take_listing(storage, pattern)
    what = {
        "root": storage.root,
        "directory": volume_path.local_dir(storage.root),
        "pattern": pattern,
        "options": dict(storage_options or {}),
    }
    return share_listing(what, lambda: take_listing(storage, pattern))


def share_listing(what: Mapping[str, Any], take: Callable[[], FileList]) -> FileList:
    """The file list that ``take`` gives, in this process or in another rank of this node.

    Args:
        what: Of which dataset: everything that decides what is listed; ranks are compared by its
            ``repr``.
        take: Lists it.
    """
    began = _now()
    seat = find_seat(os.environ)
    if seat is None:
        return take()
    try:
        place = Place(seat, repr(what))
    except OSError as error:
        _logger.debug("Cannot share the file list with the ranks of this node: %s", error)
        return take()
    try:
        files = place.read(began)
        if files is None:
            files = take()
            place.publish(files, _now())
        return files
    finally:
        place.close()


def find_seat(environment: Mapping[str, str]) -> Seat | None:
    """This process's seat; None where it is alone, or cannot be told from the environment."""
    try:
        return _find_seat(environment)
    except (OSError, ValueError, KeyError, IndexError) as error:
        _logger.debug("Cannot tell the ranks of this node from the environment: %s", error)
        return None


def _find_seat(environment: Mapping[str, str]) -> Seat | None:
    elastic = "TORCHELASTIC_RUN_ID" in environment
    tasks, task = int(environment.get("SLURM_NTASKS", "1")), environment.get("SLURM_LOCALID")
    # Of another launcher within a SLURM task all ranks have the task's one SLURM_LOCALID.
    slurm = not elastic and tasks > 1 and environment.get("LOCAL_RANK", task) == task
    rank = int(environment["SLURM_LOCALID" if slurm else "LOCAL_RANK"])
    world = environment["SLURM_NTASKS" if slurm else "WORLD_SIZE"]
    ranks = int(world if slurm else environment.get("LOCAL_WORLD_SIZE", world))
    if ranks < 2:
        return None
    if slurm:
        launcher = ""  # the ids of job and step are enough, and tasks may have shells of their own
    elif elastic or rank > 0:
        launcher = _identity(os.getppid())
    else:
        launcher = _identity(os.getpid())  # the first rank starts the others
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # Containers may share a temporary directory, and number their processes alike.
    job = [boot, os.stat("/proc/self/ns/pid").st_ino, launcher]
    job += [environment.get(name) for name in _JOB_VARIABLES]
    return Seat(json.dumps(job), rank, ranks)


def _identity(pid: int) -> str:
    return f"{pid} {_began(pid)}"


def _began(pid: int) -> float:
    """A moment just after a process began, in seconds since the machine did, its sleep included."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return (ticks + 1) / os.sysconf("SC_CLK_TCK")  # what is told is rounded down


def _now() -> float:
    """Seconds since the machine began, its sleep included: the same clock in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Place:
    """The place of one listing, locked until it is closed.

    Raises:
        OSError: There can be no such place here, or not a safe one.
    """

    def __init__(self, seat: Seat, what: str) -> None:
        key = hashlib.sha256(f"{seat.job}\0{what}".encode("utf-8", "surrogateescape")).hexdigest()
        self._key = key
        self._list, self._lock_name = f"{key}.list", f"{key}.lock"
        self._directory = _open_directory()
        mark = f"{key}-{os.getpid()}-{threading.get_ident()}.wait"
        try:
            os.close(_open(mark, os.O_WRONLY | os.O_CREAT, self._directory))
            try:
                self._lock = _locked(self._directory, self._lock_name)
            finally:
                self._remove(mark)
        except BaseException:
            os.close(self._directory)
            raise

    def read(self, began: float) -> FileList | None:
        """The list that another rank put there, unless it is from before.

        Args:
            began: When this rank came to construct: a list that was complete by then is not for it.
        """
        try:
            descriptor = _open(self._list, os.O_RDONLY, self._directory)
            with open(descriptor, "rb") as file:
                header, listing = unpack(file.read(), self._list)
            if not header["ended"] >= began:
                return None
            return FileList(listing.names, listing.sizes, listing.mtimes)
        except FileNotFoundError:
            return None
        except (OSError, ManifestError, KeyError, TypeError, ValueError) as error:
            _logger.debug("Cannot take the file list of another rank: %s", error)
            return None

    def publish(self, files: FileList, ended: float) -> None:
        """Put a list there, whole, if other ranks wait.

        Args:
            files: The list.
            ended: When its listing was complete.
        """
        draft = f"{self._list}.new"
        try:
            self._sweep()
            if not self._awaited():
                return
            descriptor = _open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._directory)
            with open(descriptor, "wb") as file:
                file.writelines(pack(files, {"root": "", "ended": ended}))
            os.rename(draft, self._list, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            _logger.debug("Cannot share the file list with the ranks of this node: %s", error)
            self._remove(draft)

    def close(self) -> None:
        """Let the next rank look; the last one takes everything away."""
        with contextlib.suppress(OSError):
            if not self._awaited():
                self._remove(self._list)
                self._remove(self._lock_name)
        # Explicitly: a child forked in the meantime would keep the lock with its descriptor.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        os.close(self._directory)

    def _awaited(self) -> bool:
        """Whether another rank waits for the lock."""
        names = os.listdir(self._directory)
        return any(name.startswith(self._key) and name.endswith(".wait") for name in names)

    def _sweep(self) -> None:
        """Remove what was left behind long ago."""
        with os.scandir(self._directory) as entries:
            old = [
                entry.name
                for entry in entries
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _SWEEP_S
            ]
        for name in old:
            if name.endswith(".lock") and self._is_locked(name):
                continue
            self._remove(name)

    def _is_locked(self, name: str) -> bool:
        descriptor = _open(name, os.O_RDWR, self._directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory)


def _open_directory() -> int:
    """A descriptor of this user's own directory; a stranger's, or an open one, is refused."""
    path = f"{tempfile.gettempdir()}/air-lightning-lists-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat_module.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{path} is another user's, or open to others")
    return descriptor


def _open(name: str, flags: int, directory: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def _locked(directory: int, name: str) -> int:
    """A descriptor of the lock, locked; waits for whoever lists."""
    while True:
        descriptor = _open(name, os.O_RDWR | os.O_CREAT, directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Removed by the last rank that took the list, or swept, while we waited.
            if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=directory)):
                return descriptor
        except FileNotFoundError:
            pass  # removed, and not made anew yet: once more
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
