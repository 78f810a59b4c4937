"""Copy a training state into buffers that are kept: the training thread pays for a copy only.

One slab of memory holds the whole state. It is allocated and touched once, and reused as long as
the state fits, so that memory is flat over saves and no save waits for the kernel's page faults.
Each staged tensor is a storage of its own inside the slab: writers then need no second copy.
Where two entries are one view of one storage (tied weights) they are copied once; a small view of
a large storage copies only itself.

Copies between CPU tensors are plain memory moves, in pieces that the calling thread and one helper
take from a common list. torch's own ``copy_`` splits evenly over OpenMP threads that then wait for
each other: with one core busy (a loader's worker) the training waits for a time slice. CUDA
tensors are copied to pinned memory on the current stream, and waited for once.

Staging overwrites what the stage before returned: the caller waits for that save first.

Large tensors begin at a block, so that a disk can take them from where they are; small ones lie
behind all of these, close together.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from air_lightning.errors import SaveFailedError
from air_lightning.volumes.direct import BLOCK

_ALIGN = 64  # bytes
LARGE = 128 << 10  # bytes; what is lost between blocks is 3% of a tensor of this size
_PIECE = 4 << 20  # bytes; small against a time slice of the scheduler, large against a lock
_HELPED = 128 << 20  # bytes from which a helper is worth waiting for its last piece
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None  # Linux 4.14; not in mmap

Slab: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_Signature: TypeAlias = tuple[Any, ...]
_Move: TypeAlias = tuple[int, int, int]  # to, from, bytes


class _Source(NamedTuple):
    """A tensor to copy: plain, strided, on the device where it lies."""

    key: str
    tensor: torch.Tensor
    alias: int  # index of the first source that is the same view; its own index if there is none
    is_made: bool  # whether the tensor was made for the copy, out of one with other bytes


class Stager:
    """Stages flat entries into buffers that are reused from save to save.

    Not for use by two threads at once.
    """

    def __init__(self) -> None:
        self._slab: Slab | None = None
        self._pinned = False
        self._signature: _Signature | None = None
        self._buffers: list[torch.Tensor] = []
        self._views: list[_Signature] = []
        self._moves: list[_Move] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept."""
        return 0 if self._slab is None else self._slab.nbytes

    def reserve(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate and touch memory for tensors whose keys are not known yet.

        Args:
            tensors: What will be staged, more or less.
        """
        sources = _sources({str(index): tensor for index, tensor in enumerate(tensors)})
        self._reserve(_offsets(sources)[1], pin=any(s.tensor.is_cuda for s in sources))

    def stage(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the tensors of ``entries``; they may be changed once this returns.

        Args:
            entries: Tensors and DTensors are copied to the CPU, anything else is passed on.

        Returns:
            The same keys in the same order; valid until the next ``stage``.
        """
        views = _views(entries)
        if self._moves is not None and views == self._views:
            _move(self._moves)  # the same bytes of the same tensors as last time
        else:
            self._moves = None
            require_memory(entries)
            sources = _sources(entries)
            self._lay_out(sources)
            self._moves = _copy(sources, self._buffers)
            self._views = views
        staged = dict(entries)
        for (key, *_), buffer in zip(views, self._buffers, strict=True):
            original = entries[key]
            is_sharded = isinstance(original, DTensor)
            staged[key] = _like_sharded(original, buffer) if is_sharded else buffer
        return staged

    def _lay_out(self, sources: list[_Source]) -> None:
        signature = tuple(
            (s.key, s.tensor.shape, s.tensor.stride(), s.tensor.dtype, s.tensor.device, s.alias)
            for s in sources
        )
        if signature == self._signature:
            return
        self._signature, self._buffers = None, []
        offsets, total = _offsets(sources)
        self._reserve(total, pin=any(s.tensor.is_cuda for s in sources))
        assert self._slab is not None
        for index, source in enumerate(sources):
            own = source.alias == index
            buffer = _buffer(source.tensor, self._slab, offsets[index]) if own else None
            self._buffers.append(self._buffers[source.alias] if buffer is None else buffer)
        self._signature = signature

    def _reserve(self, total: int, *, pin: bool) -> None:
        if self._slab is not None and total <= self._slab.nbytes and pin <= self._pinned:
            return
        self._slab = None  # before the larger one is allocated: both at once may not fit
        self._slab = _touched_memory(max(total, _ALIGN))
        self._pinned = pin
        if pin:
            _pin(self._slab)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _sources(entries: Mapping[str, Any]) -> list[_Source]:
    sources: list[_Source] = []
    seen: dict[tuple[Any, ...], int] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        tensor = _local(value).detach()
        # A conjugated or negated view has other bytes than values.
        is_made = tensor.is_conj() or tensor.is_neg()
        if is_made:
            tensor = tensor.resolve_conj().resolve_neg()
        view = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
        index = len(sources)
        alias = seen.setdefault(view, index) if tensor.numel() else index
        sources.append(_Source(key, tensor, alias, is_made))
    return sources


def _views(entries: Mapping[str, Any]) -> list[_Signature]:
    """What tells whether each tensor lies where it lay, in the same form; the key comes first."""
    views: list[_Signature] = []
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            t = _local(value)
            bits = (t.is_conj(), t.is_neg(), t.is_cpu)
            views.append((key, t.data_ptr(), t.shape, t.stride(), t.dtype, bits))
    return views


def _local(value: torch.Tensor) -> torch.Tensor:
    # to_local and from_local go through the dispatcher: too slow for thousands of shards.
    return value._local_tensor if isinstance(value, DTensor) else value


def _offsets(sources: list[_Source]) -> tuple[list[int], int]:
    # The total does not depend on the order, which whoever reserves does not know yet.
    offsets, total = [0] * len(sources), 0
    for align, is_large in ((BLOCK, True), (_ALIGN, False)):
        for index, source in enumerate(sources):
            size = source.tensor.nbytes
            if source.alias == index and (size >= LARGE) is is_large:
                offsets[index] = total
                total += -(-size // align) * align
    return offsets, total


def _buffer(like: torch.Tensor, slab: Slab, offset: int) -> torch.Tensor:
    """Return a tensor whose storage is exactly its part of the slab."""
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    storage = torch.from_numpy(slab[offset : offset + like.nbytes]).untyped_storage()
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(storage, 0, like.shape, stride)


def _copy(sources: list[_Source], buffers: list[torch.Tensor]) -> list[_Move] | None:
    """Copy each source to its buffer.

    Returns:
        The moves of memory that this took; None where it took more than these.
    """
    moves: list[_Move] = []
    devices = set()
    is_all = True
    for index, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
        tensor = source.tensor
        if source.alias != index or tensor.numel() == 0:
            continue
        if tensor.is_cpu and tensor.stride() == buffer.stride():
            moves += _pieces(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            is_all &= not source.is_made
            continue
        is_all = False
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices.add(tensor.device)
    _move(moves)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moves if is_all else None


def require_memory(entries: Mapping[str, Any]) -> None:
    """Refuse a tensor whose memory was freed: copying it would kill the process."""
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or value.is_meta:
            continue
        tensor = _local(value)
        end = _end(tensor)
        held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
        if held < end:
            raise SaveFailedError(
                f"The tensor {key} of shape {list(tensor.shape)} takes {end} bytes of its "
                f"storage, which holds {held}: its memory was freed (untyped_storage().resize_). "
                "Fill it again before the save, or take it out of the state."
            )


def _end(tensor: torch.Tensor) -> int:
    """Where its last element ends, in bytes from the start of its storage."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return int((tensor.storage_offset() + elements) * tensor.itemsize)


def _move(moves: list[_Move]) -> None:
    """Move blocks of memory; both threads release the GIL while they copy."""
    if sum(size for _, _, size in moves) < _HELPED or _cores() < 2:
        for move in moves:
            ctypes.memmove(*move)
        return
    pieces = moves.copy()
    copying = threading.Lock()
    failed: list[BaseException] = []

    def help_out() -> None:
        try:
            with copying:
                while pieces:
                    _move_one(pieces)
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            failed.append(error)

    threading.Thread(target=help_out, name="air-lightning-stage", daemon=True).start()
    while pieces:
        _move_one(pieces)
    # Wait for a piece that is being copied, not for a helper that never got a core.
    with copying:
        pass
    if failed:
        raise failed[0]


def _move_one(pieces: list[_Move]) -> None:
    try:
        piece = pieces.pop()
    except IndexError:  # the other thread took the last one
        return
    ctypes.memmove(*piece)


def _pieces(to: int, source: int, size: int) -> Iterator[_Move]:
    for start in range(0, size, _PIECE):
        yield to + start, source + start, min(_PIECE, size - start)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _like_sharded(original: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor of the same mesh around CPU memory.

    ``DTensor.from_local`` would move the copy back to the mesh's device.
    """
    return DTensor(local, original._spec, requires_grad=False)


def _touched_memory(size: int) -> Slab:
    """Return zeroed memory whose pages exist, and that forked loader workers see empty.

    Were they to share it, the stage after each fork would copy every page that it writes, and
    keep both. (MADV_DONTFORK would leave a hole in the child: when the child drops this object, it
    unmaps whatever was put there since.)
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_WIPEONFORK, getattr(mmap, "MADV_HUGEPAGE", None)):
        if advice is not None:
            with contextlib.suppress(OSError):  # not on every kernel
                memory.madvise(advice)
    slab = np.frombuffer(memory, dtype=np.uint8)
    slab.fill(0)  # the kernel hands out pages at the first touch
    return slab


def _pin(slab: Slab) -> None:
    """Pin memory in place: torch's pinned allocator would round a slab up to a power of two."""
    runtime = torch.cuda.cudart()
    address = slab.ctypes.data
    if int(runtime.cudaHostRegister(address, slab.nbytes, 0)) == 0:
        weakref.finalize(slab, runtime.cudaHostUnregister, address)
