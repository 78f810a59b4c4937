"""Listing a mounted directory tree in threads.

A mount answers one request in milliseconds and many at once. Directories are scanned in parallel.
No file is asked for its size: the listing gives names and types, and a stat each would take minutes
for a million files. Only what the listing does not tell is asked, in threads too: where a link
leads, and what an entry is on a mount that does not say. Sizes come with ``sizes=True``.

Links to directories are followed in rounds: first the tree itself, then what its links lead to,
sorted by name, then what the links found there lead to. Each real directory is listed once, so
that links in circles end; which of several names it gets is the same in every process.

Names are ``bytes`` here, as the system gives them: a ``str`` per file, made to be sorted by its
bytes again, would double time and memory.
"""

import contextlib
import errno
import logging
import os
import stat as stat_module
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from air_lightning.errors import StorageError
from air_lightning.volumes.base import Listing
from air_lightning.volumes.crew import Crew, Step

_logger = logging.getLogger("air_lightning")

STALL_S = 300.0  # a listing that makes no progress for so long is given up
_PER_STEP = 64  # entries that one thread asks about, one after the other

_Entries = Sequence["os.DirEntry[bytes]"]


class _Link(NamedTuple):
    """A link to a directory: its name in the listing, where it lies, and where it leads."""

    name: bytes
    parent: bytes
    target: bytes


class Walk:
    """One walk over a tree.

    Args:
        call: ``call(operation, name, action)`` performs an action, retries included.
        root: The directory as users see it, for messages.
        sizes: Whether every file is asked for its size and time.
        stall_s: Seconds without progress after which the walk fails.
    """

    def __init__(
        self,
        call: Callable[[str, str, Callable[[], Any]], Any],
        root: str,
        *,
        sizes: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._call = call
        self._sizes = sizes
        self._crew = Crew(root, stall_s)
        self._names: list[list[bytes]] = []
        self._known: dict[bytes, tuple[int, float]] = {}
        self._links: list[_Link] = []
        self._starts: set[bytes] = set()  # real directories below which a round began
        self._root = b""

    def run(self, directory: str) -> Listing:
        """All regular files below a directory but dot-files, sorted by the bytes of their names.

        Raises:
            NotADirectoryError: It is a file.
            FileNotFoundError: It does not exist.
            StorageError: Something cannot be listed, retries included, or no answer came for
                ``stall_s`` seconds.
        """
        # In a thread like the rest: a mount that hangs does so at the first question already.
        self._crew.run([Step("", lambda: self._resolve(directory))], threads=1)
        begins = {self._root: b""}
        while begins:
            self._starts.update(begins)
            self._crew.run([self._scan_step(real, prefix) for real, prefix in begins.items()])
            found, self._links = sorted(self._links), []
            begins = self._next_round(found)
        names, self._names = [name for chunk in self._names for name in chunk], []
        names.sort()
        if not self._sizes:
            return Listing(names)
        known = [self._known[name] for name in names]
        return Listing(names, [size for size, _ in known], [mtime for _, mtime in known])

    def _resolve(self, directory: str) -> list[Step]:
        def resolve() -> str:
            return os.path.realpath(directory, strict=True)

        root = self._call("list", "", resolve)
        if not stat_module.S_ISDIR(self._call("list", "", lambda: os.stat(root)).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
        self._root = os.fsencode(root)
        return []

    def _next_round(self, links: list[_Link]) -> dict[bytes, bytes]:
        """The directories that links lead to and that were not listed, with their prefixes."""
        begins: dict[bytes, bytes] = {}
        for link in links:
            target = link.target
            if not _is_below(link.parent, target) and not _is_below(self._root, target):
                begins.setdefault(target, link.name + b"/")
        return {
            target: prefix
            for target, prefix in begins.items()
            if not _is_listed(target, self._starts, begins)
        }

    def _scan_step(self, real: bytes, prefix: bytes) -> Step:
        return Step(os.fsdecode(prefix), lambda: self._scan(real, prefix))

    def _scan(self, real: bytes, prefix: bytes) -> list[Step]:
        """List one real directory; returns the steps that are left to do for it."""
        entries = self._call("list", os.fsdecode(prefix), lambda: self._entries(real))
        if len(entries) <= _PER_STEP:
            return self._sort_out(entries, real, prefix)
        # In parts: where the mount gives no types, each entry takes a round trip.
        return [
            Step(os.fsdecode(prefix), self._sorter(part, real, prefix))
            for part in _parts(entries, _PER_STEP)
        ]

    def _entries(self, directory: bytes) -> "list[os.DirEntry[bytes]]":
        try:
            with os.scandir(directory) as found:
                kept = []
                for entry in found:
                    self._crew.progress += 1
                    if not entry.name.startswith(b"."):
                        kept.append(entry)
                return kept
        except FileNotFoundError:
            return []  # removed while we walk

    def _sorter(self, entries: _Entries, real: bytes, prefix: bytes) -> Callable[[], list[Step]]:
        return lambda: self._sort_out(entries, real, prefix)

    def _sort_out(self, entries: _Entries, real: bytes, prefix: bytes) -> list[Step]:
        """Tell files, directories and links apart."""
        steps: list[Step] = []
        files: list[bytes] = []
        for entry in entries:
            kind = self._kind(entry, prefix)
            if kind == stat_module.S_IFREG:
                files.append(prefix + entry.name)
            elif kind == stat_module.S_IFDIR:
                if entry.is_symlink():
                    self._add_link(entry, prefix + entry.name, real)
                elif entry.path not in self._starts:
                    steps.append(self._scan_step(entry.path, prefix + entry.name + b"/"))
        if not self._sizes:
            self._names.append(files)
            return steps
        return steps + [
            Step(os.fsdecode(prefix), self._stater(part)) for part in _parts(files, _PER_STEP)
        ]

    def _kind(self, entry: "os.DirEntry[bytes]", prefix: bytes) -> int:
        """A regular file, a directory (or a link to one), or 0 for what is neither."""
        try:
            return _kind(entry)
        except OSError as error:  # a link's, or of a mount whose listings do not give types
            if is_circular(error):
                return 0
        try:
            name = os.fsdecode(prefix + entry.name)
            kind: int = self._call("stat", name, lambda: _kind(entry))
        except StorageError as error:
            if is_circular(error):
                return 0
            raise
        return kind

    def _add_link(self, entry: "os.DirEntry[bytes]", name: bytes, real: bytes) -> None:
        def resolve() -> bytes:
            return os.path.realpath(entry.path, strict=True)

        with contextlib.suppress(FileNotFoundError):
            target = self._call("stat", os.fsdecode(name), resolve)
            self._links.append(_Link(name, real, target))

    def _stater(self, names: Sequence[bytes]) -> Callable[[], list[Step]]:
        return lambda: self._stat(names)

    def _stat(self, names: Sequence[bytes]) -> list[Step]:
        there = []
        for name in names:
            path = self._root + b"/" + name
            # Deleted between listing and stat: not a file of this list.
            with contextlib.suppress(FileNotFoundError):
                found = self._call("stat", os.fsdecode(name), _stat_of(path))
                self._crew.progress += 1
                self._known[name] = (found.st_size, found.st_mtime)
                there.append(name)
        self._names.append(there)
        return []


def is_circular(error: OSError) -> bool:
    """Whether a link leads in circles: such a link is none, like one to nowhere. Logged."""
    if error.errno != errno.ELOOP:
        return False
    _logger.debug("Left out a link that leads in circles: %s", error)
    return True


def _kind(entry: "os.DirEntry[bytes]") -> int:
    """By the listing's own word, unless it is a link or the mount does not say."""
    if entry.is_file(follow_symlinks=False):
        return stat_module.S_IFREG
    if entry.is_dir():
        return stat_module.S_IFDIR
    return stat_module.S_IFREG if entry.is_file() else 0


def _stat_of(path: bytes) -> Callable[[], os.stat_result]:
    return lambda: os.stat(path)


def _parts(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [items[start : start + length] for start in range(0, len(items), length)]


def _is_below(path: bytes, ancestor: bytes) -> bool:
    return (path + b"/").startswith(ancestor.rstrip(b"/") + b"/")


def _is_listed(target: bytes, starts: set[bytes], begins: dict[bytes, bytes]) -> bool:
    """Whether a real directory is listed where it lies, below one that is or will be."""
    if target in starts:
        return True
    path = target
    while True:
        path, _, segment = path.rpartition(b"/")
        if not segment or segment.startswith(b"."):
            return False
        if path in starts or path in begins:
            return True
