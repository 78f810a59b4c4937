"""Where a stored tensor's bytes go: into the target's own memory, or through a buffer.

Straight into the target go the bytes of an item that one request asks for, whole or some of its
first dimension's rows, when the target is CPU memory of the saved type without gaps. Its first and
last bytes are read beside, and compared afterwards: only in torch's own envelope do the bytes
between lie where they were read from. Anything else is read into a buffer.
"""

from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from air_lightning.checkpoint.envelope import Envelope, envelope, is_plain, raw_bytes
from air_lightning.checkpoint.staging import is_dense
from air_lightning.checkpoint.sweep import Piece, Slot

_LARGEST_ENVELOPE = 64 << 10


@dataclass
class InPlace:
    """An item on its way into a target's memory.

    Attributes:
        request: The one request for it.
        target: What the planner gave to load into.
        envelope: What surrounds the bytes, if all is as expected.
        pieces: Where each part of the item goes.
    """

    request: ReadItem
    target: torch.Tensor
    envelope: Envelope
    pieces: list[Piece]
    _head: memoryview = field(init=False)
    _tail: memoryview = field(init=False)

    def __post_init__(self) -> None:
        """Remember the two pieces that tell whether the bytes are the tensor's."""
        self._head, self._tail = self.pieces[0].view, self.pieces[-1].view

    def parts(self, size: int) -> list[list[Piece]]:
        """Split the pieces into parts of about ``size`` bytes, to be read in any order."""
        head, body, tail = self.pieces
        parts = [
            [Piece(body.offset + start, body.view[start : start + size])]
            for start in range(0, body.view.nbytes, size)
        ]
        parts[0].insert(0, head)
        parts[-1].append(tail)
        return parts

    def arrived(self) -> bool:
        """Whether what was read into the target is the tensor."""
        return self.envelope.fits(self._head, self._tail)


def in_place(slot: Slot, target: torch.Tensor, metadata: Metadata) -> InPlace | None:
    """Plan to read an item into its target; None where that cannot be.

    Args:
        slot: With one request, for a tensor.
        target: What the planner gave to load into.
        metadata: The checkpoint's.
    """
    request = slot.requests[0]
    stored = stored_kind(metadata, request.storage_index)
    if stored is None or not is_plain(target):
        return None
    dtype, sizes = stored
    if dtype != target.dtype or target.size() != request.lengths or not target.numel():
        return None
    stride, skipped = _stride_and_skipped(request, target, sizes)
    if skipped is None or not _plausible(slot, dtype, sizes):
        return None
    around = envelope(dtype, sizes, stride)
    if around is None or around.length != slot.length:
        return None
    return InPlace(request, target, around, _pieces(slot, around, skipped, target))


def stored_kind(
    metadata: Metadata, index: MetadataIndex
) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the type and shape of a stored item, as the index of the checkpoint tells them."""
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    chunks = entry.chunks
    hint = index.index
    if type(hint) is int and 0 <= hint < len(chunks) and chunks[hint].offsets == index.offset:
        return entry.properties.dtype, tuple(chunks[hint].sizes)
    found = (tuple(chunk.sizes) for chunk in chunks if chunk.offsets == index.offset)
    sizes = next(found, None)
    return None if sizes is None else (entry.properties.dtype, sizes)


def whole_in(data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """Return a tensor over the bytes of an item in torch's own envelope, without a copy.

    None where the envelope is another: a tensor that is not contiguous, an other release of
    torch, checksums of torch's.
    """
    nbytes = prod(sizes) * dtype.itemsize
    if not 0 < nbytes < len(data) <= nbytes + _LARGEST_ENVELOPE:
        return None
    around = envelope(dtype, sizes)
    if around is None or around.length != len(data):
        return None
    start, end = len(around.head), len(around.head) + around.nbytes
    if not around.fits(data[:start], data[end:]):
        return None
    return torch.frombuffer(data[start:end], dtype=torch.uint8).view(dtype).view(sizes)


def _plausible(slot: Slot, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether an envelope is worth making: a damaged index tells any shape."""
    nbytes = prod(sizes) * dtype.itemsize
    return nbytes < slot.length <= nbytes + _LARGEST_ENVELOPE


def _stride_and_skipped(
    request: ReadItem, target: torch.Tensor, sizes: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, int | None]:
    """Return the strides that the saved tensor must have, and the bytes before those wanted."""
    offsets = tuple(request.storage_offsets)
    if tuple(request.lengths) == sizes and not any(offsets):
        if target.is_contiguous():
            return None, 0
        return (target.stride(), 0) if is_dense(target) else (None, None)
    rows = target.is_contiguous() and len(offsets) == len(sizes) > 0
    if not rows or tuple(request.lengths[1:]) != sizes[1:] or any(offsets[1:]):
        return None, None
    if offsets[0] < 0 or offsets[0] + request.lengths[0] > sizes[0]:
        return None, None
    return None, offsets[0] * prod(sizes[1:]) * target.element_size()


def _pieces(slot: Slot, around: Envelope, skipped: int, target: torch.Tensor) -> list[Piece]:
    return [
        Piece(slot.offset, memoryview(bytearray(len(around.head)))),
        Piece(slot.offset + len(around.head) + skipped, raw_bytes(target)),
        Piece(slot.end - len(around.tail), memoryview(bytearray(len(around.tail)))),
    ]
