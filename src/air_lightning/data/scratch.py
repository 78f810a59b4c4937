"""Where a cache lies: a directory of its own for each dataset, or one that the user shares.

A private directory goes with its dataset, and only in the process that made it: a forked worker
that ends must not take the cache from the others. What a killed process left behind is removed by
the next one: an owner lock, which the kernel drops when the last process that had it is gone, says
what is left behind.

A directory is renamed before it is deleted: workers and threads that still write find nothing at
its old path, so none of them can fill it again. Its owner file goes last.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable

from air_lightning.errors import InvalidArgumentError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import FULL_DISK

_PREFIX = "air-lightning-cache-"
_OWNER = ".owner"
_ATTEMPTS = 3  # to delete a directory into which something was just put
_UNOWNED_S = 60.0  # after which a directory without an owner file is nobody's


def private_directory() -> tuple[str, Callable[[], None]]:
    """Make a directory; returns it and what removes it, in this process only.

    Raises:
        StorageError: The system's temporary directory cannot be written.
    """
    try:
        base = tempfile.gettempdir()
        _remove_abandoned(base)
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        descriptor = _own(directory)
    except OSError as error:
        raise _unusable("the temporary directory", error) from error
    pid = os.getpid()
    return directory, lambda: _remove(directory, descriptor, pid)


def shared_directory(cache_dir: str | os.PathLike[str]) -> str:
    """Make or take the directory that a user names, and see that it can be a cache.

    Raises:
        InvalidArgumentError: It is no local path.
        StorageError: It cannot be created, written, or locked in.
    """
    text = os.fspath(cache_dir) if isinstance(cache_dir, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text or "://" in text:
        raise InvalidArgumentError(
            f"cache_dir={cache_dir!r} was given; wanted is a directory on this machine's own disk."
        )
    directory = volume_path.normalize(text, allow_local=True)
    if volume_path.local_dir(directory) != directory:
        raise InvalidArgumentError(
            f"cache_dir={cache_dir!r} was given, which lies on a volume: locks and renames work on "
            "a local disk only. Name a directory there, as /local_disk0/cache."
        )
    try:
        os.makedirs(directory, exist_ok=True)
        _check_locks(directory)
    except OSError as error:
        raise _unusable(f"cache_dir={cache_dir!r}", error) from error
    return directory


def _check_locks(directory: str) -> None:
    """Write a file, and lock it: fails here rather than in the middle of an epoch."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=directory) as probe:
            fcntl.flock(probe.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        # Full of cached files, as a restart finds it: they are evicted when there is need.
        if error.errno not in FULL_DISK:
            raise


def _own(directory: str) -> int:
    """Lock the directory's owner file; it gets its name when it is locked already."""
    draft = f"{directory}/{_OWNER}.draft"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(draft, f"{directory}/{_OWNER}")
    return descriptor


def _remove(directory: str, descriptor: int, pid: int) -> None:
    if os.getpid() == pid:
        _delete(directory)
        os.close(descriptor)


def _delete(directory: str) -> None:
    """Take a directory away from those that still write, and delete it as far as that works."""
    gone = f"{directory}.gone-{secrets.token_hex(4)}"
    try:
        os.rename(directory, gone)
    except OSError:
        gone = directory
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            _delete_once(gone)
            return


def _delete_once(directory: str) -> None:
    """Delete everything but the owner file, then that: what is left halfway is still owned."""
    with os.scandir(directory) as entries:
        others = [entry for entry in entries if entry.name != _OWNER]
    for entry in others:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{directory}/{_OWNER}")
    os.rmdir(directory)


def _remove_abandoned(base: str) -> None:
    with os.scandir(base) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
    for name in names:
        with contextlib.suppress(OSError):  # another user's, in use, or just removed by another
            _remove_if_abandoned(f"{base}/{name}")


def _remove_if_abandoned(directory: str) -> None:
    try:
        descriptor = os.open(f"{directory}/{_OWNER}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - os.stat(directory).st_mtime > _UNOWNED_S:
            _delete(directory)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete(directory)
    finally:
        os.close(descriptor)


def _unusable(what: str, error: OSError) -> StorageError:
    ours = StorageError(
        f"{what} cannot hold a cache ({type(error).__name__}: {error}). Wanted is a directory on "
        "local disk that this user can create, write and lock; pass another cache_dir= (or set "
        "TMPDIR)."
    )
    ours.errno = error.errno
    return ours
