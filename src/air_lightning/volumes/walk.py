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
from typing import Any, NamedTuple, TypeVar

from air_lightning.errors import StorageError
from air_lightning.volumes.base import Listing
from air_lightning.volumes.crew import Crew, Step

_T = TypeVar("_T")
_logger = logging.getLogger("air_lightning")

STALL_S = 300.0  # a listing that makes no progress for so long is given up
_PER_STEP = 64  # entries that one thread asks about, one after the other


class _Link(NamedTuple):
    """A link to a directory: its name in the listing, where it lies, and where it leads."""

    name: bytes
    parent: bytes
    target: bytes


class _Found(NamedTuple):
    """Names in one directory."""

    files: list[bytes]
    directories: list[bytes]
    links: list[bytes]
    unknown: list[bytes]


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
        found: _Found = self._call("list", os.fsdecode(prefix), lambda: self._read(real))
        steps = self._keep(found.files, prefix)
        steps += [step for name in found.directories for step in self._below(name, real, prefix)]
        # In parts, since each takes a round trip.
        for part in _parts([*found.links, *found.unknown], _PER_STEP):
            steps.append(Step(os.fsdecode(prefix), self._asker(part, real, prefix)))
        return steps

    def _read(self, directory: bytes) -> "_Found":
        """What a directory holds, told apart as far as its listing does it."""
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return _Found([], [], [], [])  # removed while we walk, or a file by now
        try:
            kept = []
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    self._crew.progress += 1
                    if not entry.name.startswith("."):
                        kept.append(entry)
            _blind(descriptor)
            return _told_apart(kept)
        finally:
            os.close(descriptor)

    def _keep(self, files: list[bytes], prefix: bytes) -> list[Step]:
        names = [prefix + name for name in files]
        if not self._sizes:
            self._names.append(names)
            return []
        return [Step(os.fsdecode(prefix), self._stater(part)) for part in _parts(names, _PER_STEP)]

    def _below(self, name: bytes, real: bytes, prefix: bytes) -> list[Step]:
        path = _join(real, name)
        return [] if path in self._starts else [self._scan_step(path, prefix + name + b"/")]

    def _asker(
        self, names: Sequence[bytes], real: bytes, prefix: bytes
    ) -> Callable[[], list[Step]]:
        return lambda: self._ask(names, real, prefix)

    def _ask(self, names: Sequence[bytes], real: bytes, prefix: bytes) -> list[Step]:
        """Ask what the listing did not tell: what an entry is, and where a link leads."""
        steps: list[Step] = []
        files: list[bytes] = []
        for name in names:
            path = _join(real, name)
            mode = self._mode(path, prefix + name, follow_symlinks=False)
            is_link = stat_module.S_ISLNK(mode)
            if is_link:
                mode = self._mode(path, prefix + name, follow_symlinks=True)
            if stat_module.S_ISREG(mode):
                files.append(name)
            elif stat_module.S_ISDIR(mode) and is_link:
                self._add_link(path, prefix + name, real)
            elif stat_module.S_ISDIR(mode):
                steps += self._below(name, real, prefix)
        return steps + self._keep(files, prefix)

    def _mode(self, path: bytes, name: bytes, *, follow_symlinks: bool) -> int:
        """0 for what is gone, or a link that leads nowhere or in circles."""

        def ask() -> int:
            return os.stat(path, follow_symlinks=follow_symlinks).st_mode

        self._crew.progress += 1
        try:
            mode: int = self._call("stat", os.fsdecode(name), _gone_if_below_a_file(ask))
        except FileNotFoundError:
            return 0
        except StorageError as error:
            if is_circular(error):
                return 0
            raise
        return mode

    def _add_link(self, path: bytes, name: bytes, real: bytes) -> None:
        def resolve() -> bytes:
            return os.path.realpath(path, strict=True)

        with contextlib.suppress(FileNotFoundError):
            target = self._call("stat", os.fsdecode(name), _gone_if_below_a_file(resolve))
            self._links.append(_Link(name, real, target))

    def _stater(self, names: Sequence[bytes]) -> Callable[[], list[Step]]:
        return lambda: self._stat(names)

    def _stat(self, names: Sequence[bytes]) -> list[Step]:
        there = []
        for name in names:
            path = _join(self._root, name)
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


def _blind(descriptor: int) -> None:
    """Make a directory's descriptor one of what is no directory.

    An entry whose type the listing did not give asks the mount for it, unseen and one after the
    other: minutes for a large flat directory. Relative to this descriptor it fails at once instead,
    and what is not known can be asked for in threads.
    """
    nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)


def _told_apart(entries: "list[os.DirEntry[str]]") -> _Found:
    found = _Found([], [], [], [])
    for entry in entries:
        name = os.fsencode(entry.name)
        try:
            if entry.is_file(follow_symlinks=False):
                found.files.append(name)
            elif entry.is_dir(follow_symlinks=False):
                found.directories.append(name)
            elif entry.is_symlink():
                found.links.append(name)
        except OSError:
            found.unknown.append(name)
    return found


def _stat_of(path: bytes) -> Callable[[], os.stat_result]:
    return _gone_if_below_a_file(lambda: os.stat(path))


def _gone_if_below_a_file(action: Callable[[], _T]) -> Callable[[], _T]:
    """Where a directory was replaced by a file, what was listed in it is gone."""

    def perform() -> _T:
        try:
            return action()
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from error

    return perform


def _parts(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [items[start : start + length] for start in range(0, len(items), length)]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory.rstrip(b"/") + b"/" + name


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
