"""Who writes what all ranks hold: agreed by one small collective, before plans are made.

Under DDP each rank holds every parameter and its moments. torch's planner lets each rank list them
all, sends all lists to one rank, and drops the repetitions there: work and memory that grow with
ranks times tensors. Where all ranks name the same tensors, each can work out for itself which ones
it writes. Where they do not, or when a rank failed before, torch's way decides.

Either way may choose any rank that lists a tensor. So what differs between ranks (running
statistics, metrics) has to be listed by one rank alone: ``state.py`` sees to it.
"""

import hashlib
import heapq
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_DIGEST = 32


def own_share(
    entries: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    *,
    unshared: Collection[str] = (),
) -> dict[str, Any]:
    """Return what this rank writes; a collective, which every rank of the group takes part in.

    Args:
        entries: Flat; the same key on several ranks holds the same value.
        process_group: The ranks that save together.
        unshared: Keys that no other rank has.
    """
    common = {
        key: value.nbytes
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and key not in unshared
    }
    if dist.get_world_size(process_group) == 1 or not _all_equal(entries, common, process_group):
        return dict(entries)
    mine = dist.get_rank(process_group)
    writers = share_out(common, dist.get_world_size(process_group))
    return {key: value for key, value in entries.items() if writers.get(key, mine) == mine}


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return a writer for each key: the largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    writers = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        load, rank = heapq.heappop(loads)
        writers[key] = rank
        heapq.heappush(loads, (load + max(sizes[key], 1), rank))
    return writers


def _all_equal(
    entries: Mapping[str, Any], keys: Mapping[str, int], process_group: dist.ProcessGroup | None
) -> bool:
    digest = hashlib.sha256()
    for key in sorted(keys):
        digest.update(f"{key}\0{entries[key].dtype}{tuple(entries[key].shape)}\0".encode())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    world = dist.get_world_size(process_group)
    found = [torch.zeros(_DIGEST, dtype=torch.uint8, device="cpu") for _ in range(world)]
    dist.all_gather(found, own, group=process_group)
    return all(torch.equal(one, own) for one in found)
