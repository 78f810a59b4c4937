"""Copy a training state into buffers that are kept: the training thread pays for a copy only.

One slab of memory holds the whole state. It is allocated and touched once, and reused as long as
the state fits, so that memory is flat over saves and no save waits for the kernel's page faults.
Each staged tensor is a storage of its own inside the slab: writers then need no second copy.
Where two entries are one view of one storage (tied weights) they are copied once; a small view of
a large storage copies only itself.

Copies between CPU tensors are plain memory moves, shared by the calling thread and one helper
(``moving.py``). torch's own ``copy_`` splits evenly over OpenMP threads that then wait for
each other: with one core busy (a loader's worker) the training waits for a time slice. CUDA
tensors are copied to pinned memory on the current stream, and waited for once.

A state that lies where it lay at the last stage need not wait for its keys: ``begin`` lets the
helper start, ``stage`` takes what it copied if the entries turn out to be the same ones, and
``leave`` calls it off where the call fails in between. Until then nobody may change the state.

Staging overwrites what the stage before returned: the caller waits for that save first.

Large tensors begin at a block, so that a disk can take them from where they are; small ones lie
behind all of these, close together.
"""

import contextlib
import mmap
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.ahead import Ahead, Form, form
from air_lightning.checkpoint.moving import Block, Copying, move, pieces
from air_lightning.errors import SaveFailedError
from air_lightning.volumes.direct import BLOCK

_ALIGN = 64  # bytes
LARGE = 128 << 10  # bytes; what is lost between blocks is 3% of a tensor of this size
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None  # Linux 4.14; not in mmap

Slab: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_Signature: TypeAlias = tuple[Any, ...]


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
        self._views: list[tuple[str, Form]] = []
        self._moves: list[Block] | None = None
        self._told: list[Form] = []  # how the tensors lie that begin was told of
        self._forms: dict[int, Form] = {}  # the same by identity, while they are held
        self._ahead: Ahead | None = None
        self._begun: Copying | None = None

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

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy tensors, if they lie where they lay at the last stage.

        Args:
            tensors: What will be staged, more or less. It must stay as it is, and be held, until
                ``stage`` returned or ``leave`` was called.
        """
        self.leave()
        plain = [_local(tensor) for tensor in tensors]
        try:
            told = [form(tensor) for tensor in plain]
        except RuntimeError:  # a sparse one, which will be no entry, has no address
            told = []
        if self._ahead is not None and told == self._ahead.told:
            told = self._ahead.told
            self._begun = self._ahead.begin(plain)
        self._told = told
        self._forms = dict(zip(map(id, tensors), told, strict=False))

    def leave(self) -> None:
        """Call off what was begun and not staged; nothing is written to the buffers after this."""
        self._forms = {}
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None  # not before: interrupted above, the next one waits for it, too

    def stage(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the tensors of ``entries``; they may be changed once this returns.

        Args:
            entries: Tensors and DTensors are copied to the CPU, anything else is passed on.

        Returns:
            The same keys in the same order; valid until the next ``stage``.
        """
        views = _views(entries, self._forms)
        if self._moves is not None and views == self._views:
            staged = self._staged(entries)
            self._move_again(self._moves)
        else:
            self.leave()
            self._moves = self._ahead = None
            require_memory(entries)
            sources = _sources(entries)
            self._lay_out(sources)
            self._moves = _copy(sources, self._buffers)
            self._views = views
            staged = self._staged(entries)
        if self._moves is not None and (self._ahead is None or self._ahead.told is not self._told):
            self._ahead = Ahead.plan(self._told, [form for _, form in views], self._buffers)
        return staged

    def _staged(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        staged = dict(entries)
        buffers = iter(self._buffers)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                buffer = next(buffers)
                staged[key] = _like_sharded(value, buffer) if isinstance(value, DTensor) else buffer
        return staged

    def _move_again(self, moves: list[Block]) -> None:
        """Move the same bytes of the same tensors as last time, but for what is under way."""
        if self._begun is None or self._ahead is None or not self._begun.is_ours:
            move(moves)
            return
        self._begun.finish(self._ahead.rest)
        self._begun = None

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


def _views(entries: Mapping[str, Any], known: Mapping[int, Form]) -> list[tuple[str, Form]]:
    """What tells whether each tensor lies where it lay, in the same form."""
    tensors = [(key, value) for key, value in entries.items() if isinstance(value, torch.Tensor)]
    if not known:
        return [(key, form(_local(value))) for key, value in tensors]
    return [(key, known.get(id(value)) or form(_local(value))) for key, value in tensors]


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


def _copy(sources: list[_Source], buffers: list[torch.Tensor]) -> list[Block] | None:
    """Copy each source to its buffer.

    Returns:
        The moves of memory that this took; None where it took more than these.
    """
    moves: list[Block] = []
    devices = set()
    is_all = True
    for index, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
        tensor = source.tensor
        if source.alias != index or tensor.numel() == 0:
            continue
        if tensor.is_cpu and tensor.stride() == buffer.stride():
            moves += pieces(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            is_all &= not source.is_made
            continue
        is_all = False
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices.add(tensor.device)
    move(moves)
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
