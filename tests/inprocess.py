"""Ranks of a process group that is only said to be there, so that one process is each in turn."""

import contextlib
from collections.abc import Iterator

import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one of so many ranks, whose collectives do nothing; none at all if it is the only one."""
    if world_size == 1:
        yield
        return
    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
