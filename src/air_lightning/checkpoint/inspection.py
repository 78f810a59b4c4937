"""What a checkpoint holds, and whether all of it loads: what needs torch and no process group."""

import os
from collections import Counter
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.checkpoint.harmless import harmless_allowed
from air_lightning.checkpoint.location import refuse_link_out
from air_lightning.checkpoint.manifest import METADATA
from air_lightning.checkpoint.reader import UCVolumeReader, refuse_foreign_files
from air_lightning.checkpoint.unpickle import load_blob, load_metadata
from air_lightning.errors import AirError
from air_lightning.volumes.storage import Storage


def inspect_checkpoint(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe a sound checkpoint, as plain JSON types.

    Args:
        path: The checkpoint's directory.
        storage_options: Passed to fsspec.

    Returns:
        Its step, epoch, world size, counts, sizes in bytes, the versions of the libraries that
        wrote it, and one dict for each entry.

    Raises:
        CheckpointError: It is not a sound checkpoint.
    """
    record = verify_checkpoint(path, storage_options=storage_options)
    reader = UCVolumeReader(path, storage_options=storage_options)
    metadata = reader.read_metadata()
    manifest = reader.read_manifest()
    entries = _entries(metadata)
    tensors = [entry for entry in entries if entry["shape"] is not None]
    return {
        "path": record.path,
        "step": record.step,
        "epoch": record.epoch,
        "world_size": record.world_size,
        "time": record.time,
        "size": record.size,
        "tensors": len(tensors),
        "objects": len(entries) - len(tensors),
        "files": len({info.relative_path for info in metadata.storage_data.values()}),
        "versions": dict(manifest.versions) if manifest else {},
        "entries": entries,
    }


def damaged_item(storage: Storage) -> str | None:
    """Load every stored item of a checkpoint without a manifest; says which one cannot be.

    Args:
        storage: The checkpoint's directory.

    Returns:
        What is wrong, or None.
    """
    try:
        metadata = load_metadata(storage.read_bytes(METADATA), path=f"{storage.root}/{METADATA}")
        refuse_foreign_files(metadata, storage.root)
        for index, info in metadata.storage_data.items():
            refuse_link_out(storage.root, info.relative_path)
            data = storage.read_bytes(info.relative_path, info.offset, info.length)
            if len(data) != info.length:
                return f"{info.relative_path} ends before {index.fqn}, which it should hold"
            if not getattr(info, "transform_descriptors", None):
                with harmless_allowed():
                    load_blob(data, path=f"{index.fqn} in {info.relative_path}")
    except (OSError, AirError) as error:
        return str(error)
    return None


def _entries(metadata: Metadata) -> list[dict[str, Any]]:
    stored: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        stored[index.fqn] += info.length
    return [
        {"name": name, **_kind(entry), "size": stored[name]}
        for name, entry in sorted(metadata.state_dict_metadata.items())
    ]


def _kind(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, TensorStorageMetadata):
        return {"kind": "object", "shape": None, "shards": None}
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"kind": dtype, "shape": list(entry.size), "shards": len(entry.chunks)}
