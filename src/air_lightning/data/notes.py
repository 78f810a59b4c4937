"""Which files of a private cache are in use, noted in shared memory in place of the kernel's locks.

A lock, with what it takes to be sure of it, is five system calls a file, and with many workers most
of what a cached file costs. All who could evict from a private cache are forks of the process that
made it. So, until something is evicted from it for the first time::

    a stream    writes the file's number into a row of its own, sees that no eviction has begun,
                and uses the file
    an evictor  says that evictions begin, waits until whatever was noted before that can be seen,
                and spares what is noted

From then on files are locked (leases.py), those noted before included once they are used again.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from air_lightning.data import forks
from air_lightning.data.counters import CACHE_HITS, count
from air_lightning.data.leases import Lease
from air_lightning.data.stream import Indices

_ROWS = 1024  # streams at a time; those of killed processes stay taken
_LOCK = ".rows"
# Python has no memory fence: a note and the look that follows it may reach other cores in the other
# order, but both do within microseconds.
_SETTLED_S = 0.01


class Notes:
    """Of the files of one list in one cache; made before processes are forked that share it.

    Args:
        directory: Of the cache.
        files: How many files the list has.
        place: Where the file of a number lies in the cache.
    """

    def __init__(self, directory: str, files: int, place: Callable[[int], str]) -> None:
        self.place = place
        self._lock = f"{directory}/{_LOCK}"
        memory = memoryview(mmap.mmap(-1, 8 * (1 + _ROWS) + _ROWS + files))
        cells, rest = memory[: 8 * (1 + _ROWS)].cast("q"), memory[8 * (1 + _ROWS) :]
        self.evicting, self.rows = cells[:1], cells[1:]
        self._taken, self.present = rest[:_ROWS], rest[_ROWS:]

    def row(self) -> "Row | None":
        """A row for one stream; None where none is free, or where files are locked."""
        if self.evicting[0]:
            return None
        try:
            descriptor = os.open(self._lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # a full disk, or a cache that was removed
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            number = bytes(self._taken).find(0)
            if number >= 0:
                self._taken[number] = 1
        finally:
            # Explicitly: a child forked in the meantime would keep the lock with its descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        return Row(self, number) if number >= 0 else None

    def free(self, number: int) -> None:
        """Let another stream have a row."""
        self.rows[number] = 0
        self._taken[number] = 0

    def begin_evictions(self) -> set[str]:
        """Have files locked from now on; returns the paths that must not be evicted."""
        if not self.evicting[0]:
            self.evicting[0] = 1
            time.sleep(_SETTLED_S)
        return {self.place(number - 1) for number in self.rows if number}


class Row(Lease):
    """One stream's note, and the lease of the file that it names: of one file at a time.

    Args:
        notes: All of them.
        number: Of the row.
    """

    __slots__ = ("_notes", "_number", "_process")

    def __init__(self, notes: Notes, number: int) -> None:
        super().__init__("")
        self._notes = notes
        self._number = number
        self._process = forks.process

    def knows(self, file: int) -> bool:
        """Whether a file was seen in the cache, and nothing has been evicted since."""
        return bool(self._notes.present[file]) and not self._notes.evicting[0]

    def known(self, files: Indices) -> int:
        """How many of these files, from the first one on, ``knows`` would tell of each."""
        if self._notes.evicting[0]:
            return 0
        present = np.frombuffer(self._notes.present, np.uint8)[files]
        return len(files) if present.all() else int(present.argmin())

    def saw(self, file: int) -> None:
        """Say that a file is in the cache, in its place and in its version."""
        self._notes.present[file] = 1

    def lease(self, file: int) -> "Row | None":
        """This row as a lease of a file; None where it must be locked, or is gone."""
        notes, path = self._notes, self._notes.place(file)
        notes.rows[self._number] = file + 1
        # In this order: an evictor that begins now sees the note.
        if not notes.evicting[0] and os.access(path, os.F_OK):
            self.path = path
            count(CACHE_HITS)
            return self
        notes.rows[self._number] = notes.present[file] = 0
        return None

    def close(self) -> None:
        """Let the file be evicted."""
        if forks.process is self._process:  # a forked child has a copy of its parent's
            self._notes.rows[self._number] = 0

    def free(self) -> None:
        """Give the row up."""
        if forks.process is self._process:
            self._notes.free(self._number)
