"""Shard files: written front to back with a running checksum, read in few large pieces.

A volume takes a file front to back only, and every request to it costs milliseconds. Writing
collects small pieces; reading joins neighbouring items. Threads are our own daemons: torch's
writer threads lose their exceptions, and a thread pool's are joined at interpreter exit, so that
one stuck upload would block it.
"""

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.planner import ReadItem

from air_lightning.checkpoint.manifest import Checksum

PIECE = 8 << 20  # bytes per write; also what is collected before one
MAX_GAP = 1 << 20  # bytes read for nothing rather than asking twice
MAX_RANGE = 64 << 20  # bytes held at once, unless a single item is larger
READ = 16 << 20  # bytes asked for at once; more costs memory twice

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

    helpers = [
        threading.Thread(target=drain, name=f"air-shards-{i}", daemon=True)
        for i in range(1, min(threads, len(jobs)))
    ]
    for helper in helpers:
        helper.start()
    drain()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return results


class ShardStream:
    """What ``torch.save`` writes to: hashes, counts, and passes on in large pieces.

    Args:
        raw: The file; it is not closed here.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._buffer = bytearray()
        self._position = 0
        self.checksum = Checksum()

    def tell(self) -> int:
        """Return how many bytes were taken so far."""
        return self._position

    def write(self, data: bytes | memoryview) -> int:
        """Take all of ``data``; keeps no reference to it, for torch lends its own memory."""
        view = memoryview(data).cast("B")
        if len(self._buffer) + len(view) <= PIECE:
            self._buffer += view
        else:
            self.drain()
            for start in range(0, len(view), PIECE):
                self._put(view[start : start + PIECE])
        self._position += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch flushes after each tensor, which would make each one a write."""

    def drain(self) -> None:
        """Write what was collected; call it at the end."""
        pending, self._buffer = self._buffer, bytearray()
        self._put(memoryview(pending))

    def _put(self, piece: memoryview) -> None:
        self.checksum.update(piece)
        while piece:
            written = self._raw.write(piece)
            piece = piece[len(piece) if written is None else written :]


class _NoZipChecksums:
    """Count of writers that want torch's CRC of each tensor off: ours covers the file.

    The option is one per process. Set and restored by each thread by itself, two threads could
    leave it off for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    torch.serialization.set_crc32_options(self._before)


no_zip_checksums = _NoZipChecksums()


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


class Slot(NamedTuple):
    """A stored item of ``length`` bytes at ``offset`` of its file, and who asks for it."""

    offset: int
    length: int
    requests: list[ReadItem]


class Range(NamedTuple):
    """One read: ``slots`` lie inside, in ascending order."""

    offset: int
    length: int
    slots: list[Slot]


def plan_ranges(requests: Iterable[tuple[int, int, ReadItem]]) -> list[Range]:
    """Join the items wanted of one file into few reads, in ascending order.

    Args:
        requests: Offset, length and request; the same item may be asked for several times, as
            when a checkpoint of fewer ranks is read by more.
    """
    slots: dict[tuple[int, int], Slot] = {}
    for offset, length, request in requests:
        slots.setdefault((offset, length), Slot(offset, length, [])).requests.append(request)
    ranges: list[Range] = []
    for key in sorted(slots):
        slot = slots[key]
        joined = _joined(ranges[-1], slot) if ranges else None
        if joined is None:
            ranges.append(Range(slot.offset, slot.length, [slot]))
        else:
            ranges[-1] = joined
    return ranges


def _joined(last: Range, slot: Slot) -> Range | None:
    end = max(last.offset + last.length, slot.offset + slot.length)
    near = slot.offset - (last.offset + last.length) <= MAX_GAP
    if not near or end - last.offset > MAX_RANGE:
        return None
    last.slots.append(slot)
    return Range(last.offset, end - last.offset, last.slots)
