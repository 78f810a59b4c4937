"""Objects on their way into a checkpoint: bytes from the moment of the save, or the error.

Serialized where the training waits (``serialize``); looked through where they are written, in the
background (``warn_of_unsafe``), as that takes longer. Whoever will be unable to load an object
without running code learns at the save under which of his own keys it is, and what to pass where:
a Trainer's user and a Fabric loop's are told different things.
"""

import io
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from air_lightning.checkpoint.harmless import harmless_names
from air_lightning.checkpoint.outline import StandIn, outline
from air_lightning.checkpoint.places import TRAINER_KEY
from air_lightning.errors import SaveFailedError

_log = logging.getLogger("air_lightning")
_warned: set[frozenset[str]] = set()


@dataclass(frozen=True)
class SerializedBlob:
    """An object as ``torch.save`` wrote it; later changes to the object do not reach it.

    Attributes:
        data: The bytes of the file.
        error: Why there are no bytes. It is raised when the save is planned, so that all ranks
            learn of it; raised earlier, the other ranks would wait for this one until the timeout.
        is_fabrics: Whether a Fabric loop gave it, not a Trainer.
    """

    data: bytes
    error: Exception | None = None
    is_fabrics: bool = False

    @classmethod
    def of(cls, value: object) -> "SerializedBlob":
        """Serialize ``value`` now.

        Args:
            value: What ``torch.save`` accepts.
        """
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return cls(buffer.getvalue())


def serialize(
    key: str, value: Mapping[str, Any], parts: Mapping[Any, Any], *, is_fabrics: bool
) -> SerializedBlob:
    """Serialize a blob, or give one that carries its error.

    Args:
        key: Of its entry.
        value: The blob.
        parts: What of it is named by the user's keys.
        is_fabrics: As of ``SerializedBlob``.
    """
    try:
        return replace(SerializedBlob.of(value), is_fabrics=is_fabrics)
    except Exception as cause:  # noqa: BLE001 - pickling runs the user's code
        names = ", ".join(repr(name) for name, part in parts.items() if not _pickles(part))
        source = (
            "in the state given to fabric.save, or in the state_dict of a loader"
            if is_fabrics
            else "from on_save_checkpoint, state_dict of callbacks and hyper-parameters"
        )
        error = SaveFailedError(
            f"The part {key} of the checkpoint cannot be pickled: {cause}. Plain values and "
            f"tensors are wanted; look at what is under {names or 'its keys'} (lambdas, locks and "
            f"open files do not work): {source}."
        )
        error.__cause__ = cause
        return SerializedBlob(b"", error, is_fabrics)


def _pickles(value: Any) -> bool:
    try:
        SerializedBlob.of({"value": value})
    except Exception:  # noqa: BLE001 - see above
        return False
    return True


def warn_of_unsafe(key: str, blob: SerializedBlob) -> None:
    """Say at the save, not at the resume, that a blob will be refused by ``weights_only``."""
    names = frozenset(get_unsafe_globals_in_checkpoint(io.BytesIO(blob.data))) - harmless_names()
    if not names or names in _warned:
        return
    _warned.add(names)
    is_state = blob.is_fabrics and key == TRAINER_KEY
    keys = ", ".join(repr(name) for name in keys_that_need(blob.data, names))
    _log.warning(
        "%s holds objects%s that do not load with weights_only=True: %s. Resuming will need "
        "torch.serialization.add_safe_globals([...]) with these, or %s, which runs code of the "
        "checkpoint; or save plain values.",
        "The state given to fabric.save" if is_state else f"The checkpoint entry {key}",
        f" (under {keys})" if keys else "",
        ", ".join(sorted(names)),
        _loading(is_fabrics=blob.is_fabrics),
    )


def _loading(*, is_fabrics: bool) -> str:
    if is_fabrics:
        return "fabric.load(..., weights_only=False) or resume(..., weights_only=False)"
    return "fit(..., weights_only=False)"


def keys_that_need(data: bytes, names: Collection[str]) -> list[Any]:
    """The keys of a blob's content under which globals are referred to; runs nothing of it.

    Args:
        data: What ``torch.save`` wrote.
        names: The globals, as ``get_unsafe_globals_in_checkpoint`` names them.

    Returns:
        Keys of the state, or of the blob where it holds none; none where that cannot be told.
    """
    try:
        content = outline(io.BytesIO(data))
        parts = content.get("checkpoint", content)
        return [key for key, part in parts.items() if _refers([part], names)]
    except Exception:  # noqa: BLE001 - a message's detail, never a reason for a save to fail
        return []


def _refers(todo: list[Any], names: Collection[str]) -> bool:
    """Whether stand-ins for these globals are anywhere below."""
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = item if isinstance(item, type) else type(item)
        if issubclass(kind, StandIn) and kind.stands_for in names:
            return True
        if isinstance(item, StandIn):
            todo += item.parts
        elif isinstance(item, dict):
            todo += (*item.keys(), *item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
    return False


def nbytes(entries: Mapping[str, Any]) -> int:
    """Bytes that this rank has of tensors and blobs."""
    total = 0
    for value in entries.values():
        if isinstance(value, SerializedBlob):
            total += len(value.data)
        elif isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            total += local.nbytes
    return total
