"""Listing a mounted directory tree in threads.

A mount answers one request in milliseconds and many at once. Directories are scanned in parallel,
and so are the sizes within one large flat directory.
"""

import contextlib
import os
import stat as stat_module
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias

from air_lightning.volumes.base import FileInfo

Step: TypeAlias = Callable[[], "list[Step]"]

_THREADS = 16
_STATS_PER_STEP = 64


class Walk:
    """One walk over a tree.

    Args:
        call: ``call(operation, name, action)`` performs an action, retries included.
    """

    def __init__(self, call: Callable[[str, str, Callable[[], Any]], Any]) -> None:
        self._call = call
        self._files: list[FileInfo] = []

    def run(self, directory: str) -> list[FileInfo]:
        """All regular files below a directory but dot-files, in any order."""
        pool = ThreadPoolExecutor(_THREADS, "air-listing")
        try:
            tasks: set[Future[list[Step]]] = {pool.submit(self._scan, directory, "", ())}
            while tasks:
                done, tasks = wait(tasks, return_when=FIRST_COMPLETED)
                tasks.update(pool.submit(step) for task in done for step in task.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return self._files

    def _scan(self, directory: str, prefix: str, links: tuple[str, ...]) -> list[Step]:
        """List one directory; returns the steps that are left to do for it."""
        steps: list[Step] = []
        files: list[os.DirEntry[str]] = []
        for entry in self._call("list", prefix, lambda: _entries(directory)):
            if not entry.is_dir():
                files.append(entry)
                continue
            chain = _links(entry, directory, links)
            if chain is not None:
                steps.append(_bind(self._scan, entry.path, f"{prefix}{entry.name}/", chain))
        starts = range(0, len(files), _STATS_PER_STEP)
        return steps + [_bind(self._stat, files[i : i + _STATS_PER_STEP], prefix) for i in starts]

    def _stat(self, entries: list[os.DirEntry[str]], prefix: str) -> list[Step]:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            # Deleted between listing and stat: not a file of this list. So is a dangling link.
            with contextlib.suppress(FileNotFoundError):
                found = self._call("stat", name, entry.stat)
                if stat_module.S_ISREG(found.st_mode):
                    self._files.append(FileInfo(name, found.st_size, found.st_mtime))
        return []


def _bind(function: Callable[..., list[Step]], *arguments: Any) -> Step:
    return lambda: function(*arguments)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []  # removed while we walk


def _links(
    entry: os.DirEntry[str], directory: str, links: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The links followed to reach this directory; None where they would go in circles."""
    if not entry.is_symlink():
        return links
    real = os.path.realpath(entry.path)
    here = os.path.realpath(directory)
    if real in links or f"{here}/".startswith(f"{real.rstrip('/')}/"):
        return None
    return (*links, real)
