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
from air_lightning.volumes.reader import advance, first_views
from air_lightning.volumes.writer import GatheringWriter, NamedFile

try:
    import fcntl
except ImportError:  # no POSIX: there is no such flag either
    fcntl = None  # type: ignore[assignment]

BUFFER = 2 << 20  # bytes; a multiple of every block size, and as fast as 8 MB from two threads
BLOCK = 4096  # bytes; blocks are no larger, nor what is wanted of an address, with rare exceptions
_LENT = 64 << 10  # bytes that cost more to copy than to count as a piece
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
    """Writes past the page cache: from memory that is aligned as it is, else by way of a buffer.

    The disk takes whole blocks from aligned memory only. Of a large view whose first byte lies at a
    block's begin both in memory and in the file, the whole blocks are written from where they are,
    and are written when :meth:`write_views` returns. All else is collected in a buffer, which is
    written when it is full, or before such a view. The rest of a file, and all of a smaller one,
    goes through the cache at :meth:`flush`, as does everything where the file system refuses.
    Closing alone drops what was not flushed.

    Args:
        raw: The new, empty file; closed with this.
    """

    def __init__(self, raw: NamedFile) -> None:
        super().__init__()
        self._raw = raw
        memory = mmap.mmap(-1, BUFFER)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._view = memoryview(memory)
        self._line: list[memoryview] = []  # to be written next, in order; parts of the buffer too
        self._start = 0  # of what lies in the buffer and is not in line; a block's begin
        self._filled = 0
        self._is_direct = False
        self._may_be_direct = True
        # A file system of larger blocks would refuse those of this size, one and all.
        self._is_blockwise = os.fstat(raw.fileno()).st_blksize <= BLOCK

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The file's."""
        return self._raw.fileno()

    @property
    def block(self) -> int:
        """Bytes at whose multiples aligned memory should begin in the file; 1 where none gains."""
        return BLOCK if self._may_be_direct and self._is_blockwise else 1

    def write(self, data: Any, /) -> int:
        """Take all of ``data``; keeps no reference to it."""
        view = memoryview(data).cast("B")
        self.write_views([view])
        return view.nbytes

    def write_views(self, views: Sequence[memoryview]) -> None:
        """Take all of them; keeps no reference, unless it fails."""
        for view in views:
            if view.nbytes:
                self._take(view)
        if self._line:
            self._spill()

    def flush(self) -> None:
        """Write what was collected; what follows goes through the cache too."""
        if self.closed:
            return
        self._line_up()
        if self._line:
            self._may_be_direct = False
            self._spill()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._line = []
            self._start = self._filled = 0
            super().close()
            self._raw.close()

    def _take(self, view: memoryview) -> None:
        whole = view.nbytes // BLOCK * BLOCK
        if whole >= _LENT and self.block == BLOCK and self._is_aligned(view):
            self._line_up()
            self._line.append(view[:whole])
            view = view[whole:]
        while view.nbytes:
            piece = view[: BUFFER - self._filled]
            self._collect(piece)
            view = view[piece.nbytes :]
            if self._filled == BUFFER:
                self._line_up()
                self._spill()

    def _is_aligned(self, view: memoryview) -> bool:
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return address % BLOCK == 0 and self._filled % BLOCK == 0

    def _collect(self, piece: memoryview) -> None:
        end = self._filled + piece.nbytes
        if piece.nbytes < _LENT:
            self._view[self._filled : end] = piece
        else:  # numpy lets go of the GIL meanwhile, which for fewer bytes takes longer than to copy
            np.copyto(self._memory[self._filled : end], np.frombuffer(piece, dtype=np.uint8))
        self._filled = end

    def _line_up(self) -> None:
        if self._start < self._filled:
            self._line.append(self._view[self._start : self._filled])
            self._start = self._filled

    def _spill(self) -> None:
        self._choose_way()
        self._line.reverse()
        try:
            while self._line:
                advance(self._line, self._put(first_views(self._line)))
        finally:
            self._line.reverse()  # what an error left comes next, in order
        if self._start == self._filled:
            self._start = self._filled = 0

    def _put(self, views: list[memoryview]) -> int:
        try:
            return self._raw.write_some(views)
        except OSError as error:
            # Refused by a file system that allowed the flag, or after a write that ended amid a
            # block: what is left of the file goes through the cache.
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
        self._may_be_direct = False
        self._choose_way()
        return self._raw.write_some(views)

    def _choose_way(self) -> None:
        if self._is_direct == self._may_be_direct:
            return
        try:
            self._set_flag(_DIRECT if self._may_be_direct else 0)
            self._is_direct = self._may_be_direct
        except OSError:
            if self._is_direct:
                raise
            self._may_be_direct = False

    def _set_flag(self, flag: int) -> None:
        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags & ~_DIRECT | flag)
