"""Writing files to a local disk past the kernel's page cache.

A checkpoint is written once and, as a rule, never read by the machine that wrote it. Through the
page cache each of its bytes costs a page to be found, a copy, and a write-back by the kernel's own
threads, which training on a CPU waits for; and it evicts what was of use there, the training files.

Only file systems of local disks are written so. On a mount that takes a file front to back only it
would be an error: the kernel sends the parts of a direct write side by side.
"""

import errno
import io
import mmap
import os
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import numpy as np

from air_lightning.volumes.mount import is_local_disk
from air_lightning.volumes.writer import GatheringWriter, NamedFile

try:
    import fcntl
except ImportError:  # no POSIX: there is no such flag either
    fcntl = None  # type: ignore[assignment]

BUFFER = 2 << 20  # bytes; a multiple of every block size, and as fast as 8 MB from two threads
_DIRECT = getattr(os, "O_DIRECT", 0)


def writer_to(file: NamedFile, directory: str, buffer_size: int) -> BinaryIO:
    """The writer that suits the file system.

    Args:
        file: The new, empty file; closed with the writer.
        directory: The absolute path of the directory that it is in.
        buffer_size: Bytes that a writer through the cache collects.
    """
    if _DIRECT and is_local_disk(directory):
        return cast("BinaryIO", DirectWriter(file))
    return GatheringWriter(file, buffer_size=buffer_size)


class DirectWriter(io.RawIOBase):
    """Collects what is written in a buffer of its own and writes that past the page cache.

    The disk takes whole blocks from aligned memory only. So the buffer is written when it is full;
    the rest of a file, and all of a smaller one, goes through the cache at :meth:`flush`, as does
    everything where the file system refuses. Closing alone drops what was not flushed.

    Args:
        raw: The new, empty file; closed with this.
    """

    def __init__(self, raw: NamedFile) -> None:
        super().__init__()
        self._raw = raw
        memory = mmap.mmap(-1, BUFFER)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._view = memoryview(memory)
        self._filled = 0
        self._written = 0  # of these, by a write that was cut short
        self._is_direct = False
        self._may_be_direct = True

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The file's."""
        return self._raw.fileno()

    def write(self, data: Any, /) -> int:
        """Take all of ``data``; keeps no reference to it."""
        view = memoryview(data).cast("B")
        self.write_views([view])
        return view.nbytes

    def write_views(self, views: Sequence[memoryview]) -> None:
        """Take all of them; keeps no reference."""
        for view in views:
            if view.nbytes:
                self._take(np.frombuffer(view, dtype=np.uint8))

    def flush(self) -> None:
        """Write what was collected; what follows goes through the cache too."""
        if self.closed or not self._filled:
            return
        self._may_be_direct = False
        self._use_cache()
        self._spill()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._filled = 0
            super().close()
            self._raw.close()

    def _take(self, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        start = 0
        while start < len(data):
            size = min(BUFFER - self._filled, len(data) - start)
            # numpy lets go of the GIL meanwhile; a slice of a memoryview would hold it.
            np.copyto(self._memory[self._filled : self._filled + size], data[start : start + size])
            start += size
            self._filled += size
            if self._filled == BUFFER:
                self._bypass_cache()
                self._spill()

    def _spill(self) -> None:
        while self._written < self._filled:
            self._written += self._put(self._view[self._written : self._filled])
        self._written = self._filled = 0

    def _put(self, piece: memoryview) -> int:
        try:
            return self._raw.write(piece)
        except OSError as error:
            # Refused by a file system that allowed the flag, or after a write that ended amid a
            # block: what is left of the file goes through the cache.
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
        self._may_be_direct = False
        self._use_cache()
        return self._raw.write(piece)

    def _bypass_cache(self) -> None:
        if not self._may_be_direct or self._is_direct:
            return
        try:
            self._set_flag(_DIRECT)
            self._is_direct = True
        except OSError:
            self._may_be_direct = False

    def _use_cache(self) -> None:
        if self._is_direct:
            self._set_flag(0)
            self._is_direct = False

    def _set_flag(self, flag: int) -> None:
        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags & ~_DIRECT | flag)
