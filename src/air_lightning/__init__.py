"""Stream training files from volumes, save through asynchronous DCP, and resume exactly.

Public names are imported on first use, so that ``import air_lightning`` loads neither torch,
Lightning nor MLflow: the command line starts in a fraction of a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from air_lightning.checkpoint.catalog import (
        find_latest_valid,
        list_checkpoints,
        prune_checkpoints,
        verify_checkpoint,
    )
    from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
    from air_lightning.checkpoint.export import export_checkpoint
    from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
    from air_lightning.data.dataset import UCVolumeDataset
    from air_lightning.data.loader import DataLoader
    from air_lightning.data.manifest import write_manifest
    from air_lightning.data.stream import Checkpointable
    from air_lightning.errors import (
        AirError,
        CheckpointError,
        CheckpointMismatchError,
        CorruptCheckpointError,
        EmptyVolumeError,
        FileChangedError,
        FileVanishedError,
        GridMismatchError,
        InvalidArgumentError,
        InvalidPathError,
        InvalidTypeError,
        ManifestError,
        NotCheckpointableError,
        RankMismatchError,
        SaveFailedError,
        StateError,
        StorageError,
        UnsafeCheckpointError,
        VolumeNotMountedError,
        WorkerDiedError,
    )
    from air_lightning.integrations.checkpoint_io import AirCheckpointIO
    from air_lightning.integrations.datamodule import AirDataModule
    from air_lightning.integrations.resume import AirResume

_HOMES = {
    "air_lightning.checkpoint.catalog": (
        "find_latest_valid",
        "list_checkpoints",
        "prune_checkpoints",
        "verify_checkpoint",
    ),
    "air_lightning.checkpoint.dcp": ("UCVolumeReader", "UCVolumeWriter"),
    "air_lightning.checkpoint.export": ("export_checkpoint",),
    "air_lightning.checkpoint.rng": ("capture_rng_state", "restore_rng_state"),
    "air_lightning.data.dataset": ("UCVolumeDataset",),
    "air_lightning.data.loader": ("DataLoader",),
    "air_lightning.data.manifest": ("write_manifest",),
    "air_lightning.data.stream": ("Checkpointable",),
    "air_lightning.errors": (
        "AirError",
        "CheckpointError",
        "CheckpointMismatchError",
        "CorruptCheckpointError",
        "EmptyVolumeError",
        "FileChangedError",
        "FileVanishedError",
        "GridMismatchError",
        "InvalidArgumentError",
        "InvalidPathError",
        "InvalidTypeError",
        "ManifestError",
        "NotCheckpointableError",
        "RankMismatchError",
        "SaveFailedError",
        "StateError",
        "StorageError",
        "UnsafeCheckpointError",
        "VolumeNotMountedError",
        "WorkerDiedError",
    ),
    "air_lightning.integrations.checkpoint_io": ("AirCheckpointIO",),
    "air_lightning.integrations.datamodule": ("AirDataModule",),
    "air_lightning.integrations.resume": ("AirResume",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AirCheckpointIO",
    "AirDataModule",
    "AirError",
    "AirResume",
    "CheckpointError",
    "CheckpointMismatchError",
    "Checkpointable",
    "CorruptCheckpointError",
    "DataLoader",
    "EmptyVolumeError",
    "FileChangedError",
    "FileVanishedError",
    "GridMismatchError",
    "InvalidArgumentError",
    "InvalidPathError",
    "InvalidTypeError",
    "ManifestError",
    "NotCheckpointableError",
    "RankMismatchError",
    "SaveFailedError",
    "StateError",
    "StorageError",
    "UCVolumeDataset",
    "UCVolumeReader",
    "UCVolumeWriter",
    "UnsafeCheckpointError",
    "VolumeNotMountedError",
    "WorkerDiedError",
    "__version__",
    "capture_rng_state",
    "export_checkpoint",
    "find_latest_valid",
    "list_checkpoints",
    "prune_checkpoints",
    "restore_rng_state",
    "verify_checkpoint",
    "write_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
