"""Shard files: written front to back with a running checksum, read in few large pieces.

A volume takes a file front to back only, and every request to it costs milliseconds. Writing
collects small pieces; reading joins neighbouring items. Threads are our own daemons: torch's
writer threads lose their exceptions, and a thread pool's are joined at interpreter exit, so that
one stuck upload would block it.
"""

import io
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

from air_lightning.checkpoint.manifest import Checksum
from air_lightning.volumes.threads import start_thread

PIECE = 8 << 20  # bytes per write; also what is collected before one
_COPIED = 16 << 10  # bytes that cost less to copy than to count as a piece
_ALIGN = 64  # bytes; torch aligns tensors so within an item

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def run_jobs(
    jobs: Sequence[_Job], work: Callable[[_Job], _Result], *, threads: int
) -> list[_Result]:
    """Do all jobs, the calling thread among ``threads``.

    Returns:
        The results, in no particular order.

    Raises:
        BaseException: The first one of any thread, once all have stopped; no further job starts.
    """
    waiting = deque(jobs)
    results: list[_Result] = []
    failures: list[BaseException] = []

    def drain() -> None:
        while not failures:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                results.append(work(job))
            except BaseException as failure:  # noqa: BLE001 - raised below, on the calling thread
                failures.append(failure)

    helpers = [start_thread(drain, f"air-shards-{i}") for i in range(1, min(threads, len(jobs)))]
    drain()
    for helper in filter(None, helpers):
        helper.join()
    if failures:
        raise failures[0]
    return results


class ShardStream:
    """A shard in the writing: hashes, counts, and passes on in large pieces.

    Args:
        raw: The file; it is not closed here. One with ``write_views`` takes many pieces at once.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._write_views = getattr(raw, "write_views", None)
        self._views: list[memoryview] = []
        self._small = bytearray()  # what follows the last view
        self._waiting = 0
        self._position = 0
        self.checksum = Checksum()

    def tell(self) -> int:
        """Return how many bytes were taken so far."""
        return self._position

    def write(self, data: bytes | memoryview) -> int:
        """Take all of ``data``; keeps no reference to it, for torch lends its own memory."""
        view = memoryview(data).cast("B")
        if view.nbytes <= PIECE:
            self._copy(view)
        else:
            self._take(view)
            self.drain()
        return view.nbytes

    def align(self, address: int, ahead: int) -> None:
        """Leave a gap, so that memory goes to the disk from where it lies, if it can.

        Args:
            address: Of the memory.
            ahead: How many bytes are written before it, after the gap.
        """
        block: int = getattr(self._raw, "block", 1)
        if block > 1 and address % block == 0:
            self._copy(memoryview(bytes(-(self._position + ahead) % block)))

    def lend(self, view: memoryview) -> None:
        """Take bytes that stay as they are until ``drain``: large ones are not copied."""
        if view.nbytes <= _COPIED:
            self._copy(view)
        else:
            self._take(view)

    def flush(self) -> None:
        """Do nothing: torch flushes after each tensor, which would make each one a write."""

    def drain(self) -> None:
        """Write what was collected; call it at the end."""
        self._seal()
        views, self._views, self._waiting = self._views, [], 0
        for piece in views:
            self.checksum.update(piece)
        if self._write_views is not None:
            self._write_views(views)
            return
        for piece in views:
            self._put(piece)

    def _copy(self, view: memoryview) -> None:
        self._small += view
        self._count(view.nbytes)

    def _take(self, view: memoryview) -> None:
        """Hand on pieces small enough to be hashed and written from the processor's cache."""
        for start in range(0, view.nbytes, PIECE):
            self._seal()
            piece = view[start : start + PIECE]
            self._views.append(piece)
            self._count(piece.nbytes)

    def _count(self, size: int) -> None:
        self._position += size
        self._waiting += size
        if self._waiting >= PIECE:
            self.drain()

    def _seal(self) -> None:
        if self._small:
            self._views.append(memoryview(self._small))
            self._small = bytearray()

    def _put(self, piece: memoryview) -> None:
        while piece:
            written = self._raw.write(piece)
            piece = piece[len(piece) if written is None else written :]


class ViewStream(io.RawIOBase):
    """A file over lent memory: ``io.BytesIO`` would copy it, and each copy costs page faults."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position of the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}
        self._position = max(base[whence] + offset, 0)
        return self._position

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer; 0 at the end."""
        piece = self._data[self._position : self._position + len(buffer)]
        memoryview(buffer).cast("B")[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


class Scratch:
    """Memory that is used again: fresh memory for each read would cost more than the reading."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def cut(self, sizes: Sequence[int]) -> Iterator[memoryview]:
        """Return views of so many bytes each; those of the call before are invalid then."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        if self._memory.nbytes < starts[-1]:
            self._memory = memoryview(b"")  # before the larger: both at once may not fit
            self._memory = memoryview(bytearray(starts[-1]))
        memory = self._memory
        return (memory[at : at + size] for at, size in zip(starts, sizes, strict=False))


class Countdown:
    """Says to the last of several threads that it is the last."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._left = count

    def down(self) -> bool:
        """Count one; whether none is left."""
        with self._lock:
            self._left -= 1
            return self._left == 0
