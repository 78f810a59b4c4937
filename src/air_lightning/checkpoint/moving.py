"""Move blocks of memory by two threads, of which the calling one may come later.

A helper takes blocks from one end of a list, the caller from the other, until none is left::

    Copying(blocks)   the helper begins
    finish(more)      the caller joins in; returns when all blocks are where they belong
    abandon()         or calls it off; returns when nothing is written any more

While the caller is in Python, a helper that did so too would get the interpreter's lock once in
5 ms (``sys.getswitchinterval``). So it takes many blocks at a time, and gives them to torch in one
call, which lets go of the lock. Once the caller has joined in it takes fewer, and near the end few:
on a busy machine the caller would wait for a helper that has no core.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from air_lightning.checkpoint.ending import at_exit
from air_lightning.volumes.threads import start_thread

_PIECE = 4 << 20  # bytes; small against a time slice of the scheduler, large against a lock
WHOLE = 16 << 20  # bytes up to which a tensor need not be cut
_SHARE_ALONE, _SHARE_JOINED = 4, 8  # the helper takes this part of what is left at a time
_HELPED = 128 << 20  # bytes from which a helper is worth waiting for its last block


class Block(NamedTuple):
    """Memory to move; where it is that of two tensors with the same strides, these, too."""

    to: int
    source: int
    nbytes: int
    buffer: torch.Tensor | None = None
    tensor: torch.Tensor | None = None


def pieces(to: int, source: int, nbytes: int) -> Iterator[Block]:
    """Cut one move into blocks."""
    for start in range(0, nbytes, _PIECE):
        yield Block(to + start, source + start, min(_PIECE, nbytes - start))


def is_helped(nbytes: int) -> bool:
    """Whether so many bytes are moved sooner by two threads."""
    return nbytes >= _HELPED and _cores() > 1


def move(blocks: list[Block]) -> None:
    """Move blocks, with a helper where that is sooner."""
    if is_helped(sum(block.nbytes for block in blocks)):
        Copying(blocks).finish()
        return
    for block in blocks:
        ctypes.memmove(*block[:3])


class Copying:
    """A helper at work; either ``finish`` or ``abandon`` ends it.

    Args:
        blocks: What it moves. Nobody may free this memory until the end.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._left = deque(blocks)
        self._at_work = threading.Lock()
        self._failed: list[BaseException] = []
        self._share = _SHARE_ALONE
        self._pid = os.getpid()
        start_thread(self._help_out, "air-lightning-stage")  # without one, the caller moves all

    @property
    def is_ours(self) -> bool:
        """Whether its helper is this process's, and not that of one it was forked from."""
        return self._pid == os.getpid()

    def finish(self, more: Iterable[Block] = ()) -> None:
        """Move what is left, together with the helper.

        Args:
            more: Blocks to be moved besides.
        """
        self._share = _SHARE_JOINED
        self._left.extend(more)
        try:
            while block := _taken(self._left.pop):
                ctypes.memmove(*block[:3])
        finally:  # interrupted, too, nothing may write here afterwards
            self.abandon()
        if self._failed:
            raise self._failed[0]

    def abandon(self) -> None:
        """Let the helper end with the blocks that it is at."""
        interruption: BaseException | None = None
        while True:
            try:
                self._left.clear()
                # Wait for a portion that is being copied, not for a helper that never got a core.
                # In a process forked meanwhile the lock is held for ever: there is no helper.
                if self.is_ours:
                    with self._at_work:
                        pass
                break
            except BaseException as raised:  # noqa: BLE001 - by a handler of signals; raised below
                # Whoever caught it could free what is read, and a next save meet what is written.
                interruption = raised
        if interruption is not None:
            raise interruption

    def _help_out(self) -> None:
        thread = threading.current_thread()
        _helpers.append(thread)
        if not _is_ending:
            self._help()
        _helpers.remove(thread)

    def _help(self) -> None:
        with self._at_work:
            try:
                in_one_call = _loops_alone()
                while portion := self._portion():
                    _move_portion(portion, in_one_call=in_one_call)
            except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
                # Before the lock is let go of: the caller, who waits for that, looks once.
                self._failed.append(error)

    def _portion(self) -> list[Block]:
        wanted = max(1, len(self._left) // self._share)
        taken = (_taken(self._left.popleft) for _ in range(wanted))
        return [block for block in taken if block is not None]


_helpers: list[threading.Thread] = []
_is_ending = False


def _end_helpers() -> None:
    """Let the helpers be done: one that comes back from torch to no interpreter aborts the process.

    What they are at ends soon, also where a daemon began it that will never finish it.
    """
    global _is_ending  # noqa: PLW0603 - of the process
    _is_ending = True
    for helper in tuple(_helpers):  # each takes itself out
        helper.join()


at_exit(_end_helpers)


def _taken(pop: Callable[[], Block]) -> Block | None:
    try:
        return pop()
    except IndexError:  # the other thread took the last one, or called it off
        return None


def _move_portion(portion: list[Block], *, in_one_call: bool) -> None:
    buffers, tensors = [], []
    run = Block(0, 0, 0)
    for block in portion:
        if in_one_call and block.buffer is not None and block.tensor is not None:
            buffers.append(block.buffer)
            tensors.append(block.tensor)
        elif (run.to + run.nbytes, run.source + run.nbytes) == (block.to, block.source):
            run = Block(run.to, run.source, run.nbytes + block.nbytes)
        else:
            ctypes.memmove(*run[:3])
            run = block
    ctypes.memmove(*run[:3])
    if buffers:
        with torch.inference_mode():  # buffers may have been made in it
            torch._foreach_copy_(buffers, tensors)


def _loops_alone() -> bool:
    """Make torch's loops on this thread stay on it, and say whether they do.

    Spread over OpenMP threads they would wait for each other, and for a core. The number is each
    thread's own in OpenMP; ``torch.set_num_threads`` would set that of the process.
    """
    if torch.get_num_threads() > 1:
        set_number = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
        if set_number is not None:
            set_number(1)
    return torch.get_num_threads() == 1


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
