"""Single files as Lightning itself reads and writes them, and what belongs in a checkpoint."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from air_lightning.errors import CheckpointMismatchError
from air_lightning.volumes import path as volume_path


def load_file(target: str, weights_only: bool | None) -> Any:
    """Load a single file as Lightning does."""
    return TorchCheckpointIO().load_checkpoint(place(target), **told(weights_only))


def told(weights_only: bool | None) -> dict[str, bool]:
    """The argument for Lightning's own methods; none where nothing was said.

    Before 2.6 they do not know it.
    """
    return {} if weights_only is None else {"weights_only": weights_only}


def save_file(checkpoint: dict[str, Any], target: str, options: Any | None) -> None:
    """Write a single file as Lightning does."""
    TorchCheckpointIO().save_checkpoint(checkpoint, place(target), options)


def place(target: str) -> str:
    """The path under which Lightning finds what is at a path of ours."""
    return volume_path.local_dir(target) or target


def weights_in(loaded: Any, target: str) -> Mapping[str, Any]:
    """A file's state dict: all of it, or what Lightning keeps under a key."""
    if isinstance(loaded, Mapping):
        for key in ("state_dict", "model"):
            if isinstance(loaded.get(key), Mapping):
                inner: Mapping[str, Any] = loaded[key]
                return inner
        return loaded
    raise CheckpointMismatchError(
        f"{target} holds a {type(loaded).__name__}; a module's state dict is wanted, or a "
        "checkpoint with one under 'state_dict' or 'model'."
    )


def is_trainers(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a Trainer's keys, rather than those of a Fabric loop's choice."""
    return "pytorch-lightning_version" in checkpoint or "state_dict" in checkpoint


def require_trainers(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Refuse what a Fabric loop saved where a Trainer's checkpoint is wanted.

    Raises:
        CheckpointMismatchError: It is none.
    """
    if not is_trainers(checkpoint):
        raise CheckpointMismatchError(
            f"{path} is no Trainer's checkpoint: it has {', '.join(map(str, checkpoint))}. What a "
            "Fabric loop saved resumes in a Fabric loop. For the weights alone, load an export of "
            "it into the model (air-lightning export PATH OUT.safetensors)."
        )
