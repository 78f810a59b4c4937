"""Checkpoints that Lightning itself wrote: single files, and directories of sharded strategies."""

import os
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from air_lightning.volumes import path as volume_path
from air_lightning.volumes.storage import open_storage


def is_lightnings(target: str, options: dict[str, Any] | None) -> bool:
    """Whether a checkpoint is a file, or a directory of Lightning's own sharded format."""
    local = volume_path.local_dir(target)
    sharded = local is not None and os.path.isfile(os.path.join(local, "meta.pt"))
    return sharded or is_file(target, options)


def is_file(target: str, options: dict[str, Any] | None) -> bool:
    """Whether there is a single file of this path."""
    local = volume_path.local_dir(target)
    if local is not None:
        return os.path.isfile(local)
    parent = open_storage(volume_path.parent(target), allow_local=True, storage_options=options)
    name = volume_path.name(target)
    return any(not entry.is_dir and entry.name == name for entry in parent.list_dir())


def load_file(target: str, weights_only: bool | None) -> Any:
    """Load a single file as Lightning does."""
    return TorchCheckpointIO().load_checkpoint(place(target), weights_only=weights_only)


def save_file(checkpoint: dict[str, Any], target: str, options: Any | None) -> None:
    """Write a single file as Lightning does."""
    TorchCheckpointIO().save_checkpoint(checkpoint, place(target), options)


def place(target: str) -> str:
    """The path under which Lightning finds what is at a path of ours."""
    return volume_path.local_dir(target) or target
