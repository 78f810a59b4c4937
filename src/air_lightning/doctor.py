"""What this machine offers to a run, and whether paths can be used; loads no torch.

Each check is one line: ok, warn (works, with something lost) or fail (will not work), what was
found, and what to do. Versions come from what pip installed, not from imports: those take seconds,
and fail where something is broken. Nothing is written, but for a probe file in ``TMPDIR`` and, when
asked for, one below a path, which is removed again.
"""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import platform
import resource
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from air_lightning import __version__
from air_lightning.data.eviction import Evictor, free_bytes
from air_lightning.errors import AirError
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import Storage, open_storage

OK, WARN, FAIL = "ok", "warn", "fail"

# The lower bounds of pyproject.toml, and names under which a package may be installed.
PACKAGES: dict[tuple[str, ...], tuple[int, ...]] = {
    ("torch",): (2, 6),
    ("lightning",): (2, 5),
    ("mlflow-skinny", "mlflow"): (2, 14),
    ("fsspec",): (2023, 5),
}
_OPTIONAL = {
    "s3fs": "s3://",
    "gcsfs": "gs://",
    "adlfs": "abfs://",
    "safetensors": "export to .safetensors",
}
_ENTRY = "air_lightning.integrations.attach:callbacks_factory"
_OPEN_FILES = 2048  # a worker holds one for each file that it reads ahead, 1,024 at most
_SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
_SHARED_MEMORY = 1 << 30
_GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warn`` or ``fail``.
        found: What there is.
        remedy: What to do where it is not ok, else empty.
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def examine_machine() -> list[Check]:
    """Look at this machine and what is installed."""
    checks = [_python(), *(_package(names, least) for names, least in PACKAGES.items())]
    looks = (_names, _plugin, _fork, _volumes, _disk, _locks, _files, _memory, _fuse, _optional)
    return checks + [look() for look in looks]


def examine_place(path: str, *, write: bool = False) -> list[Check]:
    """Look at one path: can it be listed, and with ``write``, written to and renamed in.

    Args:
        path: A volume path, an fsspec URL or a local directory.
        write: Make a hidden probe file there, and remove it.
    """
    try:
        storage = open_storage(path, allow_local=True)
        count = len(storage.list_dir())
    except FileNotFoundError:
        remedy = "Create it, or check the path; the first save would create a directory."
        return [Check(f"list {path}", WARN, "it does not exist", remedy)]
    except (OSError, AirError) as error:
        return [Check(f"list {path}", FAIL, str(error), "Check the path and your access to it.")]
    listed = Check(f"list {path}", OK, f"{count} names")
    return [listed, *_probe(storage, path)] if write else [listed]


def _probe(storage: Storage, path: str) -> list[Check]:
    name = f".air-doctor-{secrets.token_hex(4)}"
    content = name.encode()
    try:
        storage.write_bytes(name, content)
        same = storage.read_bytes(name) == content
        found = "written and read back" if same else "what was read is not what was written"
        checks = [Check(f"write {path}", OK if same else FAIL, found)]
        return [*checks, _rename(path, name)]
    except (OSError, AirError) as error:
        return [Check(f"write {path}", FAIL, str(error), "Check your rights and the space there.")]
    finally:
        _remove(storage, name)


def _rename(path: str, name: str) -> Check:
    check = f"rename {path}"
    local = paths.local_dir(paths.normalize(path, allow_local=True))
    if local is None:
        return Check(check, OK, "not needed: an upload appears whole")
    try:
        os.rename(f"{local}/{name}", f"{local}/{name}.renamed")
        os.rename(f"{local}/{name}.renamed", f"{local}/{name}")
    except OSError as error:
        remedy = "Nothing to do; files are written twice here, so saves take longer."
        return Check(check, WARN, f"refused: {os.strerror(error.errno or errno.EIO)}", remedy)
    return Check(check, OK, "files can be renamed")


def _remove(storage: Storage, name: str) -> None:
    for probe in (name, f"{name}.renamed"):
        # What could not be written was reported above.
        with contextlib.suppress(OSError, AirError):
            storage.remove(probe)


def _python() -> Check:
    # Of what version it may be, pip has seen to.
    return Check("Python", OK, f"{platform.python_version()}, air_lightning {__version__}")


def _package(names: tuple[str, ...], least: tuple[int, ...]) -> Check:
    wanted = ".".join(map(str, least))
    remedy = f"pip install '{names[0]}>={wanted}'"
    found = _version(names)
    if found is None:
        return Check(names[0], FAIL, "not installed", remedy)
    if _numbers(found) < least:
        return Check(names[0], FAIL, f"{found}; {wanted} or later is needed", remedy)
    return Check(names[0], OK, found)


def _version(names: Iterable[str]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:  # noqa: PERF203 - two names at most
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` and ``2.13.0rc1`` give (2, 13, 0)."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits if digits == part else part[0]))
    return tuple(numbers)


def _names() -> Check:
    both = [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    if both[:1] != ["lightning"]:
        remedy = "pip install lightning, and import from lightning, not pytorch_lightning."
        return Check("import names", FAIL, ", ".join(both) or "no Lightning", remedy)
    ours, other = _version(["lightning"]), _version(["pytorch-lightning"])
    if other not in (None, ours):
        remedy = "pip install --upgrade lightning pytorch-lightning, so that both are the same."
        return Check("import names", WARN, f"lightning {ours}, pytorch_lightning {other}", remedy)
    note = "; import from lightning alone, its classes are others" if len(both) == 2 else ""
    return Check("import names", OK, " and ".join(both) + note)


def _plugin() -> Check:
    group = entry_points(group="lightning.pytorch.callbacks_factory")
    if any(entry.value == _ENTRY for entry in group):
        return Check("plugin line", OK, "plugins=[AirCheckpointIO()] alone is enough")
    remedy = "pip install the package (PYTHONPATH is not enough), or put AirResume() in callbacks."
    return Check("plugin line", WARN, "Lightning does not find the package's callback", remedy)


def _fork() -> Check:
    if "fork" in multiprocessing.get_all_start_methods():
        return Check("fork", OK, "available")
    remedy = "Use Linux; elsewhere only DataLoader(num_workers=0) works."
    return Check("fork", FAIL, f"not available on {sys.platform}", remedy)


def _volumes() -> Check:
    stand_in = os.environ.get(paths.VOLUMES_ROOT_VARIABLE)
    try:
        found = paths.local_dir("/Volumes")
    except OSError as error:
        remedy = f"Set {paths.VOLUMES_ROOT_VARIABLE} to a directory, or use URLs alone."
        return Check("/Volumes", FAIL if stand_in else WARN, str(error).split(". ")[0], remedy)
    return Check("/Volumes", OK, f"{found} stands in for it" if stand_in else "mounted")


def _guarded(name: str, remedy: str, look: Callable[[str], Check]) -> Check:
    """Look at the directory for temporary files, which may not even be there."""
    try:
        return look(tempfile.gettempdir())
    except (OSError, AirError) as error:
        return Check(name, FAIL, str(error), remedy)


def _disk() -> Check:
    def look(directory: str) -> Check:
        free, kept = free_bytes(directory), Evictor(directory).min_free_bytes
        found = f"{free / _GIB:.1f} GiB free in {directory}, of which the cache keeps "
        found += f"{kept / _GIB:.1f} free"
        if free > kept:
            return Check("cache disk", OK, found)
        remedy = "Free some, set TMPDIR or cache_dir= to a larger disk, or min_free_bytes= lower."
        return Check("cache disk", WARN, found, remedy)

    return _guarded("cache disk", "Set TMPDIR to a directory that can be written to.", look)


def _locks() -> Check:
    def look(directory: str) -> Check:
        with tempfile.NamedTemporaryFile(prefix=".air-doctor-", dir=directory) as probe:
            fcntl.flock(probe.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Check("locks", OK, f"flock works in {directory}")

    return _guarded("locks", "Set TMPDIR to a directory on a local disk.", look)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Check("open files", OK, f"{'no limit' if soft < 0 else soft} for each process")
    remedy = f"ulimit -n {_OPEN_FILES} (the hard limit is {hard}), or read_ahead= lower."
    return Check("open files", WARN, f"{soft} for each process", remedy)


def _memory() -> Check:
    try:
        status = os.statvfs(_SHM)
    except OSError as error:
        return Check(_SHM, WARN, str(error), "Without it use DataLoader(num_workers=0).")
    size = status.f_blocks * status.f_frsize
    found = f"{size / _GIB:.1f} GiB for the batches of workers"
    if size >= _SHARED_MEMORY:
        return Check(_SHM, OK, found)
    remedy = "Give the container more (docker run --shm-size=8g), or use fewer workers."
    return Check(_SHM, WARN, found, remedy)


def _fuse() -> Check:
    there = os.path.exists("/dev/fuse")
    return Check(
        "fuse", OK, "available" if there else "not available; volumes need it, URLs do not"
    )


def _optional() -> Check:
    there = {name for name in _OPTIONAL if find_spec(name) is not None}
    found = [f"{name} ({use})" for name, use in _OPTIONAL.items() if name in there]
    missing = [f"{name} ({use})" for name, use in _OPTIONAL.items() if name not in there]
    text = f"installed: {', '.join(found) or 'none'}"
    return Check("extras", OK, text + (f"; not installed: {', '.join(missing)}" if missing else ""))
