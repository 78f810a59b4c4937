"""Checked by mypy alone, never run: the types that users of the public names see."""

from typing import Any

from lightning import Fabric
from typing_extensions import assert_type

from air_lightning import (
    AirCheckpointIO,
    DataLoader,
    UCVolumeDataset,
    export_checkpoint,
    find_latest_valid,
    list_checkpoints,
    write_manifest,
)
from air_lightning.checkpoint.catalog import CheckpointRecord

dataset = UCVolumeDataset("/Volumes/a/b/c", shuffle=True, seed=1, uneven="pad")
loader = DataLoader(dataset, batch_size=2)

assert_type(find_latest_valid("/Volumes/a/b/c"), str | None)
assert_type(list_checkpoints("/Volumes/a/b/c"), list[CheckpointRecord])
assert_type(export_checkpoint("/Volumes/a/b/c/d", "d.ckpt"), str)
assert_type(loader.state_dict(), dict[str, Any])
assert_type(loader.statistics(), dict[str, float])
assert_type(len(dataset), int)
assert_type(write_manifest("/Volumes/a/b/c", "/Volumes/a/b/d/list", pattern="*.png"), int)

plugin = AirCheckpointIO().attach(Fabric())
assert_type(plugin, AirCheckpointIO)
assert_type(plugin.resume("/Volumes/a/b/c", {"step": 0}), str | None)
