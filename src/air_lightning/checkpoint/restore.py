"""DCP entries back to a training state: the blob first, then every entry that it lists.

The promises are those of state.py; ``places.py`` describes the blob.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.compare import compare_models
from air_lightning.checkpoint.names import clean
from air_lightning.checkpoint.places import (
    TRAINER_KEY,
    VERSION,
    Place,
    put,
    rank_key,
    unpack_paths,
    unpack_places,
)
from air_lightning.checkpoint.planner import LoadPlanner, load
from air_lightning.errors import CheckpointMismatchError, CorruptCheckpointError


def read_checkpoint(
    reader: StorageReader,
    *,
    rank: int,
    weights_only: bool | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    state_dict: Mapping[str, Any] | None = None,
    strict: bool = True,
    sharding: Mapping[str, Any] | None = None,
    moments: bool = True,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read back the checkpoint that ``to_entries`` turned into entries.

    Args:
        reader: Of the checkpoint's directory.
        rank: The rank whose own blob is wanted.
        weights_only: As of ``torch.load``, for the blobs; None means True.
        process_group: The ranks that read together; an error of one is then raised on all.
        no_dist: Read alone.
        state_dict: The live model's. It is compared with the checkpoint before tensors are read,
            and where it holds DTensors, theirs is the sharding of what is loaded.
        strict: Whether missing and unexpected names are errors; other shapes always are.
        sharding: Live tensors by name, in the place of ``state_dict`` where nothing is to be
            compared, since the host may yet change what was loaded.
        moments: Whether optimizer states are wanted; without, they are neither read nor there.

    Returns:
        The checkpoint dict, equal to what was saved, with its tensors on the CPU (DTensors where
        their mesh is); and the rank's blob, None if there was no such rank.

    Raises:
        CheckpointMismatchError: The directory is none of this package, or of another model.
        CorruptCheckpointError: An entry is not there.
    """
    stored = Stored(
        reader,
        rank=rank,
        weights_only=weights_only,
        process_group=process_group,
        no_dist=no_dist,
    )
    if not moments:
        stored.leave_out(["optimizer_states"])
    if state_dict is not None:
        stored.compare("state_dict", state_dict, strict=strict)
    return stored.read(sharding or state_dict or {}), stored.rank_blob


class Stored:
    """A checkpoint whose blobs were read, and whose tensors are still to be.

    Attributes:
        checkpoint: The checkpoint dict, with None where tensors belong.
        rank_blob: What the rank alone saved, None if there was no such rank.
        models: The keys of modules' weights, where the saver chose the keys; else None.

    Args:
        reader: As of :func:`read_checkpoint`, as are the others.
        rank: As there.
        weights_only: As there.
        process_group: As there.
        no_dist: As there.

    Raises:
        CheckpointMismatchError: The directory is none of this package.
        CorruptCheckpointError: An entry is not there.
    """

    def __init__(
        self,
        reader: StorageReader,
        *,
        rank: int,
        weights_only: bool | None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = True,
    ) -> None:
        self._reader = reader
        self._weights_only = weights_only
        self._ranks: dict[str, Any] = {"process_group": process_group, "no_dist": no_dist}
        blobs: dict[str, Any] = {TRAINER_KEY: None, rank_key(rank): None}
        planner = LoadPlanner(weights_only=weights_only, allow_partial_load=True)
        self._metadata = load(blobs, reader, planner, **self._ranks)
        self.where = str(getattr(reader, "checkpoint_id", reader))
        content = checked_trainer(blobs[TRAINER_KEY], self.where)
        self.checkpoint: dict[Any, Any] = content["checkpoint"]
        self.rank_blob: dict[str, Any] | None = blobs[rank_key(rank)]
        self.models: list[Any] | None = content.get("models")
        self._scalars = content["scalars"]
        self._places = unpack_places(content["places"])
        self._sizes = {
            place.key: _tensor_metadata(self._metadata, place.key, self.where)
            for place in self._places
        }

    def leave_out(self, keys: Iterable[Any]) -> None:
        """Neither read nor give these keys of the checkpoint."""
        for key in keys:
            self.checkpoint.pop(key, None)
        self._places = [place for place in self._places if place.path[0] in self.checkpoint]

    def with_tensors(self) -> set[Any]:
        """The keys of the checkpoint under which there are entries to read."""
        return {place.path[0] for place in self._places}

    def compare(self, key: Any, live: Mapping[str, Any], *, strict: bool) -> None:
        """Compare the weights under a key with a live model's, before any is read.

        Raises:
            CheckpointMismatchError: They are of another model.
        """
        # Each place in the model's state, by name, with the shape that was saved.
        shapes = {
            clean(str(place.path[1])): self._sizes[place.key].size
            for place in self._places
            if place.path[0] == key and len(place.path) == 2
        }
        names = [clean(str(name)) for name in self.checkpoint.get(key) or ()]
        known = {clean(name): value for name, value in live.items()}
        compare_models(names, shapes, known, strict=strict, where=self.where)

    def read(self, live: Mapping[str, Any]) -> dict[Any, Any]:
        """Read the tensors into the checkpoint, and return it.

        Args:
            live: Tensors by the name that entries are to be like, for their sharding.
        """
        known = {clean(name): tensor for name, tensor in live.items()}
        tensors = {
            place.key: _room(place, self._sizes[place.key], known, self.where)
            for place in self._places
        }
        planner = LoadPlanner(weights_only=self._weights_only)
        load(tensors, self._reader, planner, metadata=self._metadata, **self._ranks)
        for place in self._places:
            put(self.checkpoint, place.path, _as_saved(tensors[place.key], place))
        for packed, paths in self._scalars:
            for path, scalar in zip(unpack_paths(paths), packed, strict=True):
                if path[0] in self.checkpoint:
                    put(self.checkpoint, path, scalar.clone())
        return self.checkpoint


def read_rank_blobs(
    reader: StorageReader, ranks: Iterable[int], *, weights_only: bool | None
) -> list[Any]:
    """Read what these ranks alone saved, by this process alone; None for a rank without a blob.

    Args:
        reader: Of the checkpoint's directory.
        ranks: Whose blobs are wanted.
        weights_only: As of ``torch.load``; None means True.
    """
    blobs: dict[str, Any] = {rank_key(rank): None for rank in ranks}
    planner = LoadPlanner(weights_only=weights_only, allow_partial_load=True)
    load(blobs, reader, planner, process_group=None, no_dist=True)
    return list(blobs.values())


def checked_trainer(content: Any, where: str) -> dict[str, Any]:
    """Return the trainer's blob, once it is known to be one of ours and of a known version."""
    if not isinstance(content, dict):
        raise CheckpointMismatchError(
            f"{where} is a DCP checkpoint without the entry {TRAINER_KEY}; one that "
            "AirCheckpointIO saved is wanted. Load it with torch.distributed.checkpoint.load."
        )
    if content.get("version") != VERSION:
        raise CheckpointMismatchError(
            f"{where} has state version {content.get('version')!r}; this release reads version "
            f"{VERSION}. Install the release of air_lightning that saved it."
        )
    return content


def _tensor_metadata(metadata: Metadata, key: str, where: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata.get(key)
    if not isinstance(found, TensorStorageMetadata):
        raise CorruptCheckpointError(
            f"{where} has no tensor {key}, which its entry {TRAINER_KEY} lists. The checkpoint "
            "was altered; resume from another one (find_latest_valid)."
        )
    return found


def _room(
    place: Place, saved: TensorStorageMetadata, live: Mapping[str, Any], where: str
) -> torch.Tensor:
    try:
        return _target(place, saved, live)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{where} tells of a tensor {place.key} of shape {tuple(saved.size)}, for which there "
            f"is no memory ({str(error).splitlines()[0]}). Unless the model is as large, the "
            "checkpoint was altered; resume from another one (find_latest_valid)."
        ) from error


def _target(place: Place, saved: TensorStorageMetadata, live: Mapping[str, Any]) -> torch.Tensor:
    """Return an empty tensor to load into."""
    dtype = saved.properties.dtype
    like = live.get(clean(place.like or ""))
    if isinstance(like, DTensor) and like.shape == saved.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if place.stride is not None:
        return torch.empty_strided(saved.size, place.stride, dtype=dtype, device="cpu")
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def _as_saved(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    if place.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=place.requires_grad)
    return tensor.requires_grad_() if place.requires_grad else tensor
