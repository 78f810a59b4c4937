"""One file out of a checkpoint directory, for programs that know nothing of directories.

In order: what ``out`` asks for, by its extension, and whether something is there already; the
source's files by their sizes; what its index claims, before memory is taken for it; whether so much
fits beside ``out``, and a file can be made there; then all of it to the CPU, and one write that
appears under the name of ``out`` whole or not at all.

Memory at its peak: what is exported (for ``.safetensors`` the weights alone) once, and a few read
buffers of some hundred MB. A ``.safetensors`` file is made in ``TMPDIR`` first: its library writes
to local files only.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata

from air_lightning.checkpoint import attempt
from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.checkpoint.claims import claimed_bytes, require_stored
from air_lightning.checkpoint.places import TRAINER_KEY
from air_lightning.checkpoint.reader import UCVolumeReader
from air_lightning.checkpoint.restore import read_checkpoint
from air_lightning.checkpoint.room import no_room
from air_lightning.checkpoint.weights import names_of_weights, read_extra, read_weights
from air_lightning.errors import (
    AirError,
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    InvalidArgumentError,
    StorageError,
)
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import Storage, open_storage

_LIGHTNING = "pytorch-lightning_version"  # load_from_checkpoint asks for it
_PIECE = 8 << 20

PathLike = str | os.PathLike[str]


def export_checkpoint(
    path: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> str:
    """Write a checkpoint directory as one file.

    From a checkpoint of ``AirCheckpointIO``, of any strategy and number of ranks, a ``.ckpt`` has
    what Lightning's own file has: ``LightningModule.load_from_checkpoint`` reads it, and
    ``Trainer.fit(ckpt_path=...)`` resumes from it without this package. Left out is what only one
    rank knows: loader positions and random generators. From other DCP directories, and Lightning's
    own sharded ones, come the weights.

    Args:
        path: The checkpoint's directory: a volume path, an fsspec URL or a local path.
        out: The file, ``.ckpt`` or ``.safetensors`` (weights alone; needs safetensors), wherever
            ``path`` may be.
        overwrite: Replace a file that is there already.
        weights_only: As of ``torch.load``, for the objects of the checkpoint; None means True.
            False runs what they hold.
        storage_options: Passed to fsspec, for both.

    Returns:
        ``out``, as users see it.

    Raises:
        InvalidArgumentError: ``out`` has another extension, or is there already.
        CheckpointError: ``path`` is no sound checkpoint, or has no weights that can be told.
        UnsafeCheckpointError: Reading it would run code.
        StorageError: ``out`` cannot be written, or has no room, which is found out before anything
            is read; or reading or writing failed.
    """
    target = paths.normalize(out, allow_local=True)
    write = _writer(target)
    storage = open_storage(paths.parent(target), allow_local=True, storage_options=storage_options)
    _require_free(storage, target, overwrite)
    source = attempt.newest(paths.normalize(path, allow_local=True), storage_options)
    try:
        found = _look_at(source, storage_options, weights_alone=write is _write_safetensors)
        if found.weights_alone:
            _require_scratch(target, found.nbytes())
        _require_place(storage, target, found.nbytes())
        checkpoint = found.read(weights_only)
    except (AirError, OSError):
        raise
    except Exception as error:  # what was altered may be anything where something else was
        raise CorruptCheckpointError(
            f"{source} cannot be put together: {type(error).__name__}: {error}. It was altered, or "
            "is larger than the memory of this machine. find_latest_valid(root) names the newest "
            "sound checkpoint."
        ) from error
    write(checkpoint, storage, paths.name(target))
    return target


_Writer: TypeAlias = Callable[[dict[str, Any], Storage, str], None]


def _writer(target: str) -> _Writer:
    extension = os.path.splitext(paths.name(target))[1].lower()
    if extension == ".ckpt":
        return _write_ckpt
    if extension != ".safetensors":
        raise InvalidArgumentError(
            f"{target} was given to export to; wanted is a file name that ends in .ckpt (all that "
            "Lightning needs) or .safetensors (weights)."
        )
    try:
        import safetensors.torch  # noqa: F401 - said now, not after minutes of reading
    except ImportError as error:
        raise InvalidArgumentError(
            f"{target} was given to export to, and safetensors is not installed. "
            "pip install safetensors (the extra is air-lightning[export]), or export to a .ckpt."
        ) from error
    return _write_safetensors


def _require_free(storage: Storage, target: str, overwrite: bool) -> None:
    name = paths.name(target)
    try:
        found = [entry for entry in storage.list_dir() if entry.name == name]
    except FileNotFoundError:
        return
    if not found:
        return
    if found[0].is_dir:
        raise InvalidArgumentError(
            f"{target} was given to export to, and is a directory (a checkpoint of this package is "
            "one); give another name."
        )
    if not overwrite:
        raise InvalidArgumentError(
            f"{target} is there already. Give another name, or overwrite=True (--force) to replace "
            "it."
        )


class _Source(NamedTuple):
    """A checkpoint whose index was read, and nothing else."""

    reader: UCVolumeReader
    directory: Storage
    metadata: Metadata
    weights_alone: bool

    @property
    def is_ours(self) -> bool:
        return TRAINER_KEY in self.metadata.state_dict_metadata

    def nbytes(self) -> int:
        """How many bytes the tensors to be exported have."""
        if self.is_ours and not self.weights_alone:
            return claimed_bytes(self.metadata, self.metadata.state_dict_metadata)
        return claimed_bytes(self.metadata, names_of_weights(self.metadata, self.reader.path))

    def read(self, weights_only: bool | None) -> dict[str, Any]:
        """All that is to be exported, on the CPU."""
        if self.is_ours and not self.weights_alone:
            checkpoint, _ = read_checkpoint(
                self.reader, rank=0, weights_only=weights_only, process_group=None, no_dist=True
            )
            return checkpoint
        weights = read_weights(self.reader, self.metadata, weights_only=weights_only)
        if self.weights_alone:
            return weights
        return read_extra(self.directory, weights_only=weights_only) | weights


def _look_at(source: str, options: dict[str, Any] | None, *, weights_alone: bool) -> _Source:
    verify_checkpoint(source, storage_options=options)
    directory = open_storage(source, allow_local=True, storage_options=options)
    reader = UCVolumeReader(source, storage_options=options)
    metadata = reader.read_metadata()
    require_stored(metadata, directory)
    return _Source(reader, directory, metadata, weights_alone)


def _require_place(storage: Storage, target: str, needed: int) -> None:
    """Refuse a target that cannot be written, before minutes of reading.

    Some storage says so at a write only, so a small file is written beside the target.
    """
    free = storage.free_bytes()
    if free is not None and needed > free:
        raise no_room(f"an export to {target}", needed, free, "Free space, or export elsewhere.")
    probe = f".air-export-{secrets.token_hex(4)}"
    try:
        storage.write_bytes(probe, b"x")
        storage.remove(probe)
    except (AirError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None
        # Not the error's own text: it names the probe.
        reason = str(error) if number is None else os.strerror(number)
        ours = StorageError(
            f"{target} cannot be written ({reason}), and nothing was read. Export to a place where "
            "files can be made and removed."
        )
        ours.errno = number
        raise ours from error


def _require_scratch(target: str, needed: int) -> None:
    """Refuse weights that do not fit where safetensors' own library writes them first."""
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    if needed > free:
        remedy = "Set TMPDIR to a directory with more, or export to a .ckpt, which needs none."
        raise no_room(f"an export to {target} by way of {directory}", needed, free, remedy)


def _write_ckpt(checkpoint: dict[str, Any], storage: Storage, name: str) -> None:
    states = checkpoint.get("optimizer_states")
    if isinstance(states, list):
        checkpoint["optimizer_states"] = [_with_numbers(state) for state in states]
    checkpoint.setdefault(_LIGHTNING, version("lightning"))
    try:
        with storage.open_write(name) as stream:
            torch.save(checkpoint, stream)
    except RuntimeError as error:
        # torch's writer hides what the stream raised behind a message about positions.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _with_numbers(state: Any) -> Any:
    """Return an optimizer's state with numbers for parameters, where sharding made them names."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return state
    names = [name for group in groups for name in group.get("params", ())]
    if not any(isinstance(name, str) for name in names):
        return state
    # torch numbers parameters in the order of the groups.
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **state,
        "state": {numbers.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }


def _write_safetensors(checkpoint: dict[str, Any], storage: Storage, name: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = _flat(checkpoint)
    with tempfile.TemporaryDirectory(prefix="air-export-") as directory:
        local = f"{directory}/weights"
        try:
            save_file(tensors, local, metadata={"format": "pt"})
        except (SafetensorError, ValueError, KeyError) as error:
            raise StorageError(
                f"safetensors could not write {paths.join(storage.root, name)}: {error}. It needs "
                f"as much free disk in {directory} (TMPDIR) as the weights are large, and dtypes "
                "that it knows; a .ckpt needs neither."
            ) from error
        with open(local, "rb") as source, storage.open_write(name) as stream:
            shutil.copyfileobj(source, stream, _PIECE)


def _flat(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights as safetensors wants them: contiguous, and none in another's memory."""
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    taken: set[int] = set()
    for name, value in _leaves(checkpoint["state_dict"]):
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            others.append(name)
            continue
        tensor = value.detach().contiguous()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    if others:
        raise CheckpointMismatchError(
            f"The state_dict has entries that are no dense tensors, which .safetensors cannot "
            f"hold: {', '.join(others[:5])}. Export to a .ckpt, which can."
        )
    if not tensors:
        raise CheckpointError("The checkpoint has no weights, so there is nothing to export.")
    return tensors


def _leaves(state: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(state, Mapping):
        return [(prefix, state)]
    dot = f"{prefix}." if prefix else ""
    return [leaf for key, value in state.items() for leaf in _leaves(value, f"{dot}{key}")]
