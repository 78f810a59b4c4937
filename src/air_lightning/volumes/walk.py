"""Listing a mounted directory tree in threads.

A mount answers one request in milliseconds and many at once. Directories are scanned in parallel,
and so are the sizes within one large flat directory.

Links to directories are followed in rounds: first the tree itself, then what its links lead to,
sorted by name, then what the links found there lead to. Each real directory is listed once, so
that links in circles end; which of several names it gets is the same in every process.
"""

import contextlib
import errno
import logging
import os
import queue
import stat as stat_module
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from air_lightning.errors import StorageError
from air_lightning.volumes.base import FileInfo

_logger = logging.getLogger("air_lightning")

Step: TypeAlias = Callable[[], "list[Step]"]

_THREADS = 16
_STATS_PER_STEP = 64


class _Link(NamedTuple):
    """A link to a directory: its name in the listing, where it lies, and where it leads."""

    name: str
    parent: str
    target: str


class Walk:
    """One walk over a tree.

    Args:
        call: ``call(operation, name, action)`` performs an action, retries included.
    """

    def __init__(self, call: Callable[[str, str, Callable[[], Any]], Any]) -> None:
        self._call = call
        self._files: list[FileInfo] = []
        self._links: list[_Link] = []
        self._starts: set[str] = set()  # real directories below which a round began

    def run(self, directory: str) -> list[FileInfo]:
        """All regular files below a directory but dot-files, in any order."""
        root = self._call("list", "", lambda: os.path.realpath(directory, strict=True))
        begins = {root: ""}
        while begins:
            self._starts.update(begins)
            _run([_bind(self._scan, real, prefix) for real, prefix in begins.items()])
            found, self._links = sorted(self._links, key=lambda link: os.fsencode(link.name)), []
            begins = self._next_round(root, found)
        return self._files

    def _next_round(self, root: str, links: list[_Link]) -> dict[str, str]:
        """The directories that links lead to and that were not listed, with their prefixes."""
        begins: dict[str, str] = {}
        for link in links:
            target = link.target
            if not _is_below(link.parent, target) and not _is_below(root, target):
                begins.setdefault(target, f"{link.name}/")
        return {
            target: prefix
            for target, prefix in begins.items()
            if not _is_listed(target, self._starts, begins)
        }

    def _scan(self, real: str, prefix: str) -> list[Step]:
        """List one real directory; returns the steps that are left to do for it."""
        steps: list[Step] = []
        files: list[os.DirEntry[str]] = []
        for entry in self._call("list", prefix, lambda: _entries(real)):
            name = f"{prefix}{entry.name}"
            is_dir = self._is_dir(entry, name)
            if is_dir is None:
                continue
            if not is_dir:
                files.append(entry)
            elif entry.is_symlink():
                self._add_link(entry, name, real)
            elif entry.path not in self._starts:
                steps.append(_bind(self._scan, entry.path, f"{name}/"))
        starts = range(0, len(files), _STATS_PER_STEP)
        return steps + [_bind(self._stat, files[i : i + _STATS_PER_STEP], prefix) for i in starts]

    def _is_dir(self, entry: os.DirEntry[str], name: str) -> bool | None:
        """Whether it is a directory, or leads to one; None for a link that leads nowhere."""
        try:
            return entry.is_dir()
        except OSError as error:  # a link's, or of a mount whose listings do not give types
            if is_circular(error):
                return None
        try:
            return bool(self._call("stat", name, entry.is_dir))
        except StorageError as error:
            if is_circular(error):
                return None
            raise

    def _add_link(self, entry: os.DirEntry[str], name: str, real: str) -> None:
        def resolve() -> str:
            return os.path.realpath(entry.path, strict=True)

        with contextlib.suppress(FileNotFoundError):
            self._links.append(_Link(name, real, self._call("stat", name, resolve)))

    def _stat(self, entries: list[os.DirEntry[str]], prefix: str) -> list[Step]:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            # Deleted between listing and stat: not a file of this list. So is a dangling link.
            with contextlib.suppress(FileNotFoundError):
                found = self._call("stat", name, entry.stat)
                if stat_module.S_ISREG(found.st_mode):
                    self._files.append(FileInfo(name, found.st_size, found.st_mtime))
        return []


class _Crew:
    """Threads that do steps, and the steps that come of them, until none is left or one fails."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = len(steps)
        self.error: BaseException | None = None
        for step in steps:
            self._steps.put(step)

    def stop(self) -> None:
        """Let every thread end after the step it is at."""
        for _ in range(_THREADS):
            self._steps.put(None)

    def work(self) -> None:
        """What each thread does."""
        while (step := self._steps.get()) is not None and self.error is None:
            try:
                more = step()
            except BaseException as error:  # noqa: BLE001 - it is raised where the walk was asked for
                self.error = error
                self.stop()
                return
            for another in more:
                self._steps.put(another)
            with self._lock:
                self._pending += len(more) - 1
                done = not self._pending
            if done:
                self.stop()


def _run(steps: list[Step]) -> None:
    crew = _Crew(steps)
    threads = [
        threading.Thread(target=crew.work, name=f"air-listing_{number}", daemon=True)
        for number in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        crew.error = error
        crew.stop()
        raise
    if crew.error is not None:
        raise crew.error


def is_circular(error: OSError) -> bool:
    """Whether a link leads in circles: such a link is none, like one to nowhere. Logged."""
    if error.errno != errno.ELOOP:
        return False
    _logger.debug("Left out a link that leads in circles: %s", error)
    return True


def _bind(function: Callable[..., list[Step]], *arguments: Any) -> Step:
    return lambda: function(*arguments)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []  # removed while we walk


def _is_below(path: str, ancestor: str) -> bool:
    return f"{path}/".startswith(f"{ancestor.rstrip('/')}/")


def _is_listed(target: str, starts: set[str], begins: dict[str, str]) -> bool:
    """Whether a real directory is listed where it lies, below one that is or will be."""
    if target in starts:
        return True
    path = target
    while True:
        path, _, segment = path.rpartition("/")
        if not segment or segment.startswith("."):
            return False
        if path in starts or path in begins:
            return True
