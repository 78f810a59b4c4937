"""One pass over a file of a checkpoint: what is wanted of it, front to back, in few large reads.

A volume answers each request in milliseconds and reads ahead for whoever reads on, so neighbouring
items are joined, small gaps are read for nothing, and each thread has a handle of its own. Bytes go
straight to where they are wanted, each once, through a checksum if there is one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed.checkpoint.planner import ReadItem

from air_lightning.checkpoint.manifest import Checksum
from air_lightning.volumes.base import RangeReader

READ = 8 << 20  # bytes asked for at once
MAX_GAP = 1 << 20  # bytes read for nothing rather than asking twice
SMALL_GAP = 4096  # bytes, as our own shards have before aligned tensors
MAX_RUN = 64 << 20  # bytes whose items are in the making at once, unless one is larger
MAX_ITEMS = 512  # in a run: thousands of objects kept alive set off Python's full collections
LEAST_SPAN = 8 << 20  # bytes for which another handle is worth opening


class Slot(NamedTuple):
    """A stored item of ``length`` bytes at ``offset`` of its file, and who asks for it."""

    offset: int
    length: int
    requests: list[ReadItem]

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.length


class Span(NamedTuple):
    """Slots of one file that one thread reads, in ascending order."""

    name: str
    slots: list[Slot]


class Piece(NamedTuple):
    """Where the bytes at an offset are to go."""

    offset: int
    view: memoryview


def slots_of(requests: Iterable[tuple[int, int, ReadItem]]) -> list[Slot]:
    """Return the items that are wanted of one file, in ascending order.

    Args:
        requests: Offset, length and request; the same item may be asked for several times, as
            when a checkpoint of fewer ranks is read by more.
    """
    slots: dict[tuple[int, int], Slot] = {}
    for offset, length, request in requests:
        slots.setdefault((offset, length), Slot(offset, length, [])).requests.append(request)
    return [slots[key] for key in sorted(slots)]


def spans_of(files: dict[str, list[Slot]], threads: int) -> list[Span]:
    """Cut all files at item borders into parts of about the same size, one for each thread."""
    total = sum(slot.length for slots in files.values() for slot in slots)
    size = max(LEAST_SPAN, -(-total // threads))
    spans = []
    for name, slots in files.items():
        parts = max(1, round(sum(slot.length for slot in slots) / size))
        spans += [Span(name, part) for part in _cut(slots, parts)]
    return sorted(spans, key=_bytes, reverse=True)  # the largest first, the threads then end alike


def _cut(slots: list[Slot], parts: int) -> Iterator[list[Slot]]:
    share = sum(slot.length for slot in slots) / parts
    part: list[Slot] = []
    done, cuts = 0, 1
    for slot in slots:
        if part and cuts < parts and done + slot.length / 2 > share * cuts:
            yield part
            part, cuts = [], cuts + 1
        part.append(slot)
        done += slot.length
    yield part


def _bytes(span: Span) -> int:
    return sum(slot.length for slot in span.slots)


def runs_of(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Group slots whose items are read together and then handed over, to bound memory."""
    run: list[Slot] = []
    size = 0
    for slot in slots:
        if run and (size + slot.length > MAX_RUN or len(run) == MAX_ITEMS):
            yield run
            run, size = [], 0
        run.append(slot)
        size += slot.length
    if run:
        yield run


@dataclass
class Sweep:
    """Reads pieces of one file in ascending order.

    Attributes:
        file: The open file.
        short: Makes the error for a file that ended early, of what was wanted and what came.
        checksum: If given, every byte of the file up to what was read goes through it, once.
    """

    file: RangeReader
    short: Callable[[str, str], Exception]
    checksum: Checksum | None = None
    _position: int = 0
    _waste: memoryview = field(default_factory=lambda: memoryview(b""))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Read pieces, sorted by offset."""
        batch: list[memoryview] = []
        start = end = self._position
        for piece in pieces:
            gap = piece.offset - end
            if self.checksum is not None and gap > (SMALL_GAP if batch else 0):
                self._read(start, batch)
                self.skip_to(piece.offset)
                batch, start, end = [], piece.offset, piece.offset
            elif gap and not (batch and 0 < gap <= MAX_GAP):
                self._read(start, batch)
                batch, start, end = [], piece.offset, piece.offset
            elif gap:
                # Each gap in memory of its own where all are hashed once they are read.
                hashed = self.checksum is not None
                batch.append(memoryview(bytearray(gap)) if hashed else self._scrap(gap))
                end = piece.offset
            for view in _in_parts(piece.view):
                if end - start + view.nbytes > READ:
                    self._read(start, batch)
                    batch, start = [], end
                batch.append(view)
                end += view.nbytes
        self._read(start, batch)

    def skip_to(self, offset: int) -> None:
        """Read what is not wanted, for the checksum's sake."""
        while self._position < offset:
            self._read(self._position, [self._scrap(min(MAX_GAP, offset - self._position))])

    def _read(self, offset: int, views: list[memoryview]) -> None:
        wanted = sum(view.nbytes for view in views)
        got = self.file.read_into(offset, views) if wanted else 0
        if got != wanted:
            raise self.short(f"{wanted} bytes at offset {offset}", f"{got}")
        if self.checksum is not None:
            self._hash(self.checksum, offset, views)
        self._position = max(self._position, offset + wanted)

    def _hash(self, checksum: Checksum, offset: int, views: list[memoryview]) -> None:
        for view in views:
            # Items of a damaged or strange index may overlap; each byte counts once.
            checksum.update(view[max(self._position - offset, 0) :])
            offset += view.nbytes
            self._position = max(self._position, offset)

    def _scrap(self, size: int) -> memoryview:
        """Return memory for bytes that nobody wants."""
        if self._waste.nbytes < size:
            self._waste = memoryview(bytearray(MAX_GAP))
        return self._waste[:size]


def _in_parts(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, READ):
        yield view[start : start + READ]
