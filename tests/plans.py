"""Entries of a save's plan, for as many simulated ranks as one likes."""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def item(name: str, rows: int, at: int = 0, total: int | None = None) -> WriteItem:
    """A float32 tensor of so many rows of 64, or its rows from ``at`` on of ``total``."""
    total = rows if total is None else total
    chunk = ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([rows, 64]))
    properties = TensorProperties(torch.float32)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.TENSOR if rows == total else WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size([total, 64])),
    )
