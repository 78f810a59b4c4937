"""Cut a whole tensor to what this rank holds of it, without a word to the other ranks."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def sharded_like(value: torch.Tensor, like: DTensor) -> DTensor:
    """Return ``value`` as a DTensor on the mesh of ``like``.

    Args:
        value: The whole tensor, the same on every rank.
        like: Its sharding is taken in each dimension that is as long as its own; in others, as a
            factored moment has, every rank keeps the whole.
    """
    mesh = like.device_mesh
    placements = [
        placement if _applies(placement, value, like) else Replicate()
        for placement in like.placements
    ]
    local = value.detach()
    sizes, starts = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    for dim, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        local = local.narrow(dim, min(start, value.shape[dim]), size)
    return DTensor.from_local(
        # A copy: a view would keep the whole tensor in memory.
        local.to(like.to_local().device, copy=True).contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )


def _applies(placement: Any, value: torch.Tensor, like: DTensor) -> bool:
    dim = getattr(placement, "dim", None)
    return dim is not None and dim < value.dim() and value.shape[dim] == like.shape[dim]


def fitted(value: object, like: object) -> object:
    """Return ``value`` cut like ``like``, if that is a DTensor and ``value`` a whole tensor."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return sharded_like(value, like)
