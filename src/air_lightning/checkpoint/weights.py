"""The weights of any DCP directory: ours, plain ones, and Lightning's own sharded ones.

Which entries are weights is told by the names under which they were saved: those below a
``state_dict`` or ``model`` on the first or second level, else, where there is no nesting and every
entry is a tensor, all of them. Of a Fabric loop's checkpoint, whose keys are the user's, the blob
tells. Nothing else is read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.harmless import harmless_allowed
from air_lightning.checkpoint.manifest import is_missing
from air_lightning.checkpoint.names import clean
from air_lightning.checkpoint.places import TRAINER_KEY, unpack_places
from air_lightning.checkpoint.planner import LoadPlanner, load
from air_lightning.checkpoint.reader import UCVolumeReader
from air_lightning.checkpoint.restore import checked_trainer
from air_lightning.checkpoint.unpickle import load_blob
from air_lightning.errors import CheckpointMismatchError
from air_lightning.volumes.storage import Storage

_HEADS = ("state_dict", "model")
_EXTRA = "meta.pt"  # where Lightning's sharded checkpoints keep all but tensors


def read_weights(
    reader: UCVolumeReader,
    metadata: Metadata,
    *,
    weights_only: bool | None,
    live: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the weights, as full tensors on the CPU.

    Args:
        reader: Of the directory.
        metadata: What its ``read_metadata`` gave.
        weights_only: As of ``torch.load``, for entries that are no tensors; None means True.
        live: A module's state dict; where it holds a DTensor, only this rank's part is read.

    Returns:
        A dict with ``state_dict`` alone.

    Raises:
        CheckpointMismatchError: The names do not tell which entries are weights.
    """
    blob: dict[str, Any] = {TRAINER_KEY: None}
    content: dict[str, Any] = {}
    if TRAINER_KEY in metadata.state_dict_metadata:
        load(blob, reader, LoadPlanner(weights_only=weights_only), process_group=None, no_dist=True)
        content = checked_trainer(blob[TRAINER_KEY], reader.path)
    head = _chosen(content["models"], reader.path) if content.get("models") else None
    if head is None:
        names = names_of_weights(metadata, reader.path)
        left = content.get("checkpoint", {}).get("state_dict")
    else:
        names = {
            place.key: ".".join(map(str, place.path[1:]))
            for place in unpack_places(content["places"])
            if place.path[0] == head
        }
        left = content["checkpoint"][head]
    known = {clean(name): value for name, value in (live or {}).items()}
    entries: dict[str, Any] = {
        key: _empty(metadata, key, known.get(clean(name))) for key, name in names.items()
    }
    load(entries, reader, LoadPlanner(weights_only=weights_only), process_group=None, no_dist=True)
    state = {name: entries[key] for key, name in names.items()}
    return {"state_dict": {**state, **_leftovers(left)}}


def _chosen(models: Sequence[Any], where: str) -> Any:
    """The key of the only module, or of the one that has a usual name."""
    usual = [key for key in models if key in _HEADS]
    if len(models) == 1 or usual:
        return (usual or models)[0]
    raise CheckpointMismatchError(
        f"{where} holds several models, {', '.join(map(str, models))}, none of which is called "
        "'state_dict' or 'model': which one is wanted cannot be told. Load them by their keys: "
        f"fabric.load(path, {{{str(models[0])!r}: model}}, strict=False)."
    )


def read_extra(storage: Storage, *, weights_only: bool | None) -> dict[str, Any]:
    """Read what Lightning's sharded checkpoint holds beside tensors; empty where there is none."""
    try:
        data = storage.read_bytes(_EXTRA)
    except OSError as error:
        if not is_missing(error):
            raise
        return {}
    with harmless_allowed():
        extra = load_blob(data, weights_only=weights_only, path=f"{storage.root}/{_EXTRA}")
    return extra if isinstance(extra, dict) else {}


def names_of_weights(metadata: Metadata, where: str) -> dict[str, str]:
    """Return the name of each weight by the key of its entry.

    Args:
        metadata: The directory's.
        where: The directory, for the message.

    Raises:
        CheckpointMismatchError: The names of the entries do not tell.
    """
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = {key: _path(planned.get(key), key) for key in metadata.state_dict_metadata}
    for depth in range(2):
        for head in _HEADS:
            found = {
                key: ".".join(map(str, path[depth + 1 :]))
                for key, path in paths.items()
                if len(path) > depth + 1 and path[depth] == head
            }
            if found:
                return found
    if TRAINER_KEY in paths:
        return {}  # DCP could hold none of them: they are in the blob
    flat = all(len(path) == 1 for path in paths.values())
    entries = metadata.state_dict_metadata.values()
    if paths and flat and all(isinstance(entry, TensorStorageMetadata) for entry in entries):
        return {key: key for key in paths}
    tops = ", ".join(sorted({str(path[0]) for path in paths.values()})[:8])
    raise CheckpointMismatchError(
        f"{where} does not tell which of its entries are weights. It has {tops or 'none'}; wanted "
        "weights under 'state_dict' or 'model', or tensors alone. Load it with "
        "torch.distributed.checkpoint.load and save the part that you want with torch.save."
    )


def _path(planned: Any, key: str) -> tuple[Any, ...]:
    return planned if isinstance(planned, tuple) and planned else (key,)


def _empty(metadata: Metadata, key: str, like: Any) -> torch.Tensor | None:
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")


def _leftovers(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return what DCP could not hold, which ``state.py`` left in the blob; None marks the rest."""
    found: dict[str, Any] = {}
    if not isinstance(state, Mapping):
        return found
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= _leftovers(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found
