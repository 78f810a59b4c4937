"""What the trainer's blob says about where each value belongs (state.py writes, restore.py reads).

The blob is a dict of ``version``, ``checkpoint`` (the Trainer's dict, with None where a tensor was
taken), ``places`` (entries), ``scalars`` (zero-dimensional tensors, packed by dtype) and, where the
keys are not the Trainer's, ``models`` (which of them hold a module's weights). The lists are JSON
strings: pickling thousands of small objects would cost the training thread milliseconds.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

RESERVED = "air."  # what begins so is of this package
TRAINER_KEY = "air.trainer"
VERSION = 1

Path: TypeAlias = tuple[str | int, ...]  # the keys and indices that lead into the checkpoint dict


class Place(NamedTuple):
    """Where an entry belongs."""

    key: str  # of the entry
    path: Path
    is_parameter: bool
    requires_grad: bool
    stride: tuple[int, ...] | None  # where it is dense and not contiguous (channels_last)
    like: str | None  # the parameter whose sharding it follows


def rank_key(rank: int) -> str:
    """Return the key of the blob that holds what only ``rank`` knows."""
    return f"air.rank.{rank}"


def pack(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows of strings, numbers, None and sequences of these as one string."""
    return json.dumps(list(rows), separators=(",", ":"))


def unpack_places(text: str) -> list[Place]:
    """Return the places that :func:`pack` made a string of."""
    return [
        Place(key, tuple(path), is_parameter, requires_grad, stride and tuple(stride), like)
        for key, path, is_parameter, requires_grad, stride, like in json.loads(text)
    ]


def unpack_paths(text: str) -> list[Path]:
    """Return the paths that :func:`pack` made a string of."""
    return [tuple(path) for path in json.loads(text)]


def put(checkpoint: dict[str, Any], path: Path, value: object) -> None:
    """Set the value at ``path``, whose containers exist."""
    holder: Any = checkpoint
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
