"""Who writes what all ranks hold: agreed before anything is staged, so that each stages its part.

Under DDP each rank holds every parameter and its moments. torch's planner lets each rank list them
all, sends all lists to one rank, and drops the repetitions there: work and memory that grow with
ranks times tensors. Where all ranks name the same tensors, each can work out for itself which ones
it writes, and copies no others. In order:

1. each rank takes fingerprints of what it holds like the others, *if* that is still so;
2. one collective tells whether all ranks name the same tensors; otherwise torch's way decides;
3. where there are any of step 1, another compares their fingerprints: those that differ are rank
   0's. No more than these two, whatever the number of tensors.

torch's way may choose any rank that lists a tensor. So what differs between ranks (running
statistics, metrics) has to be listed by one rank alone: ``state.py`` sees to it.
"""

import hashlib
import heapq
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.envelope import is_plain, raw_bytes
from air_lightning.checkpoint.staging import is_dense, require_memory

_DIGEST = 32
_ROW = 512  # bytes of a row in a fingerprint taken on a device
_SPREAD = 0x1E3779B97F4A7C15  # odd, its bits without a pattern
_PRIME = (1 << 61) - 1


class Alike(dict[str, torch.Tensor]):
    """The live parameters that ranks hold alike, by name.

    Attributes:
        unsure: Names of those that were equal once, and that nothing keeps equal.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor] | None = None, unsure: Collection[str] = ()
    ) -> None:
        super().__init__(parameters or {})
        self.unsure = frozenset(unsure)


def own_share(
    entries: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    *,
    unshared: Collection[str] = (),
    unsure: Collection[str] = (),
) -> dict[str, Any]:
    """Return what this rank writes; collectives, in which every rank of the group takes part.

    Args:
        entries: Flat; the same key on several ranks holds the same value.
        process_group: The ranks that save together.
        unshared: Keys that no other rank has.
        unsure: Keys whose values may differ between ranks; then rank 0's counts.

    Raises:
        Exception: This rank's tensors could not be looked at. The other ranks go on, for they would
            wait for this one otherwise.
    """
    ranks, mine = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks == 1:
        return dict(entries)
    common = {
        key: value.nbytes
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and key not in unshared
    }
    prints: dict[str, int] = {}
    failure: Exception | None = None
    digest = os.urandom(_DIGEST)  # like no other rank's
    try:
        require_memory({key: entries[key] for key in unsure})
        prints = {key: fingerprint(entries[key]) for key in sorted(unsure)}
        digest = _digest(entries, common, unsure)
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
    is_same = _all_equal(digest, process_group)
    if failure is not None:
        raise failure
    unlike = _unlike(prints, process_group) if is_same else set(unsure)
    kept = {key: v for key, v in entries.items() if mine == 0 or key not in unlike}
    if not is_same:
        return kept
    writers = share_out({k: size for k, size in common.items() if k not in unlike}, ranks)
    return {key: value for key, value in kept.items() if writers.get(key, mine) == mine}


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return a writer for each key: the largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    writers = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        load, rank = heapq.heappop(loads)
        writers[key] = rank
        heapq.heappush(loads, (load + max(sizes[key], 1), rank))
    return writers


def like_own_share(tensors: Sequence[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """Return tensors of the sizes that a rank will get, before there are keys: sizes decide."""
    writers = share_out({str(i): tensor.nbytes for i, tensor in enumerate(tensors)}, ranks)
    return [tensor for i, tensor in enumerate(tensors) if writers[str(i)] == rank]


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that tells two ranks whether they hold the same values."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0
    if is_plain(tensor) and is_dense(tensor):
        return zlib.crc32(raw_bytes(tensor))
    return fingerprint_on_device(tensor)


def fingerprint_on_device(tensor: torch.Tensor) -> int:
    """The same for memory that the processor does not reach: sums, weighted by where they lie."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # of a view; it could not be taken as whole words
        flat = flat.clone()
    whole = flat.nbytes // _ROW * _ROW
    rows = flat[:whole].view(torch.int32).view(-1, _ROW // 4)
    # Of columns as well: a row's sum does not tell the order in it.
    sums = [rows.sum(axis, dtype=torch.int64) for axis in (1, 0)]
    numbers = torch.cat([*sums, flat[whole:].to(torch.int64)])
    # Weights without a pattern: by evenly spaced ones, differences in four places may cancel.
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device) * _SPREAD
    weights = (weights ^ (weights >> 29)) * _SPREAD
    return int((numbers * (weights ^ (weights >> 32))).sum()) % _PRIME


def _digest(entries: Mapping[str, Any], keys: Collection[str], unsure: Collection[str]) -> bytes:
    digest = hashlib.sha256()
    for key in sorted(keys):
        kind = f"{entries[key].dtype}{tuple(entries[key].shape)}{key in unsure}"
        digest.update(f"{key}\0{kind}\0".encode())
    return digest.digest()


def _all_equal(digest: bytes, process_group: dist.ProcessGroup | None) -> bool:
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    world = dist.get_world_size(process_group)
    found = [torch.zeros(_DIGEST, dtype=torch.uint8, device="cpu") for _ in range(world)]
    dist.all_gather(found, own, group=process_group)
    return all(torch.equal(one, own) for one in found)


def _unlike(prints: Mapping[str, int], process_group: dist.ProcessGroup | None) -> set[str]:
    """Return the keys whose fingerprints differ between any two ranks, the same set on all."""
    if not prints:
        return set()
    own = torch.tensor(list(prints.values()), dtype=torch.int64, device="cpu")
    # The least of both signs tells the least and the largest in one collective.
    least = torch.cat([own, -own])
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=process_group)
    lowest, highest = least.chunk(2)
    differs = (lowest != -highest).tolist()
    return {key for key, is_other in zip(prints, differs, strict=True) if is_other}
