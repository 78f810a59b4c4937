"""What ``torch.save`` puts around a tensor's bytes, made once per kind of tensor.

torch's own writer pickles each tensor and makes forty small writes, its reader parses them again:
0.3 to 0.4 ms each, with the interpreter lock held, which the training waits for. With torch's
checksums off, everything but the tensor's bytes depends on type, shape and strides alone.
So an envelope is taken from one real ``torch.save`` of such a tensor, and kept:

* writing puts it around the bytes: the same file, byte for byte;
* reading compares it. What lies in an equal envelope is the tensor's bytes, in the one place; no
  pickle is loaded. Whatever is not equal takes the way through ``torch.load``.
"""

import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from air_lightning.checkpoint.suspended import no_zip_checksums

_KEPT = 4096  # kinds of tensors, 1.5 KB each


class Envelope(NamedTuple):
    """The bytes before and after those of a tensor."""

    head: bytes
    tail: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """Bytes of the whole item."""
        return len(self.head) + self.nbytes + len(self.tail)

    def fits(self, head: memoryview, tail: memoryview) -> bool:
        """Whether an item's first and last bytes are these."""
        return head == self.head and tail == self.tail


def envelope(
    dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None = None
) -> Envelope | None:
    """Return what surrounds the bytes of a plain CPU tensor without gaps.

    Args:
        dtype: The tensor's.
        shape: The tensor's.
        stride: Of memory without gaps; by default that of a contiguous tensor.

    Returns:
        None where ``torch.save`` does not lay such a tensor out as one run of bytes.
    """
    try:
        return _envelope(dtype, tuple(shape), None if stride is None else tuple(stride))
    except (RuntimeError, OSError, OverflowError):  # no memory now, or a damaged file's shape
        return None


@lru_cache(_KEPT)
def _envelope(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> Envelope | None:
    like = _untouched(dtype, shape, stride)
    if like is None:
        return None
    sink = _Sink(like)
    with no_zip_checksums():
        torch.save(like, cast("IO[bytes]", sink))
    return sink.envelope()


def _untouched(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor | None:
    """Return a tensor whose memory nobody reads or writes, so that it costs addresses only.

    None where it has no bytes, or has gaps. ``torch.empty`` would not do: it fills its memory
    under ``use_deterministic_algorithms``.
    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    if stride is not None:
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if like.nbytes == 0 or like.untyped_storage().nbytes() != like.nbytes:
        return None
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, like.stride())


class _Sink:
    """A file that keeps what ``torch.save`` writes, except for the tensor's own memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._start = tensor.data_ptr()
        self._nbytes = tensor.nbytes
        self._seen = 0
        self._head = bytearray()
        self._tail = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes == 0:
            return 0
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        if self._start <= address < self._start + self._nbytes:
            self._seen += view.nbytes
        elif self._seen:
            self._tail += view
        else:
            self._head += view
        return view.nbytes

    def flush(self) -> None:
        pass

    def envelope(self) -> Envelope | None:
        if self._seen != self._nbytes:  # torch copied the bytes before it wrote them
            return None
        return Envelope(bytes(self._head), bytes(self._tail), self._nbytes)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor without gaps, in the order in which it lies."""
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
    return memoryview(cast("bytearray", flat.numpy()))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its bytes, in CPU memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
