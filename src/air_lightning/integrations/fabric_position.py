"""What each rank alone knows of a Fabric loop: loader positions and random generators.

In one blob per rank, in the commit of the checkpoint::

    save     blob_of(loaders)   the states of loaders by name, and the generators'
    restore  Restored           same number of ranks: each rank its own
                                another one: what all ranks left, where a loader is elastic
             generators last: nothing may draw between them and the loop's first step

Iterating over a loader of ours draws nothing from the global generators, so the loop's first batch
may come after.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.utils.data

from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
from air_lightning.data.stream import current_rank
from air_lightning.errors import InvalidArgumentError, StateError
from air_lightning.integrations import regrid

_log = logging.getLogger("air_lightning")

_VERSION = 1
KIND = "fabric"


def is_loader(value: Any) -> bool:
    """Whether a value is one whose state differs between ranks."""
    return isinstance(value, torch.utils.data.DataLoader | torch.utils.data.Dataset)


def require_loader(name: Any, given: Any) -> Any:
    """Return a loader without Fabric's wrapper.

    Raises:
        InvalidArgumentError: It has no state.
    """
    loader = getattr(given, "_dataloader", given)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    raise InvalidArgumentError(
        f"A {type(loader).__name__} was given as {name!r}, whose position cannot be saved: it has "
        "no state_dict and load_state_dict. Use air_lightning.DataLoader, or leave it out."
    )


def blob_of(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """The blob of this rank."""
    rank, world_size = current_rank()
    return {
        "version": _VERSION,
        "kind": KIND,
        "rank": rank,
        "world_size": world_size,
        "loaders": {name: loader.state_dict() for name, loader in loaders.items()},
        "rng": capture_rng_state(),
    }


class Origin(NamedTuple):
    """What rank 0's blob tells all ranks of the run that saved it."""

    version: Any
    kind: Any
    world_size: int
    loaders: list[str]

    @classmethod
    def of(cls, blob: Mapping[str, Any] | None) -> "Origin | None":
        """As a blob tells it; None without one, or where it is a Trainer's."""
        if not blob or blob.get("kind") != KIND:
            return None
        return cls(blob.get("version"), KIND, blob["world_size"], list(blob["loaders"]))


def restore(
    loaders: Mapping[str, Any],
    blob: Mapping[str, Any] | None,
    origin: Origin | None,
    read_blobs: regrid.ReadBlobs,
    *,
    strict: bool,
    agree: Callable[[Callable[[], Any]], Any],
    on_all: Callable[[Callable[[], None]], None],
) -> None:
    """Give loaders and generators back to this rank; every rank calls it.

    Args:
        loaders: By name.
        blob: This rank's, or None when the checkpoint has none of this rank.
        origin: What rank 0's blob tells, so that every rank decides alike.
        read_blobs: Reads those of other ranks.
        strict: Whether a loader without a position is an error.
        agree: Gives rank 0's answer to a question, or its error, to every rank.
        on_all: Does a step on every rank, and raises on each what failed on one.

    Raises:
        StateError: Of another version, or a loader has no position in it.
        GridMismatchError: It was saved with other ranks or workers, and a loader is not elastic.
        CheckpointError: A loader refused its state on another rank.
    """
    known = [] if origin is None else origin.loaders
    if origin is not None and origin.version != _VERSION:
        raise StateError(
            f"The per-rank state has version {origin.version!r}; this release reads version "
            f"{_VERSION}. Load it with the release that wrote it."
        )
    missing = [name for name in loaders if name not in known]
    if missing and strict:
        raise StateError(
            f"The checkpoint has no position of the loader {missing[0]!r}; it has "
            f"{', '.join(map(repr, known)) or 'none'}. Name loaders as when it was saved, or load "
            "with strict=False: they then begin anew."
        )
    if origin is None:
        return
    wanted = [name for name in loaders if name in known]
    restored = {name: loaders[name] for name in wanted}
    _restore_loaders(restored, blob, origin, read_blobs, agree=agree, on_all=on_all)
    if blob:
        restore_rng_state(blob["rng"])
    else:
        _log.info(
            "The checkpoint was saved with %d ranks: this one's random generators are as this "
            "start seeded them.",
            origin.world_size,
        )


def _restore_loaders(
    loaders: Mapping[str, Any],
    blob: Mapping[str, Any] | None,
    origin: Origin,
    read_blobs: regrid.ReadBlobs,
    *,
    agree: Callable[[Callable[[], Any]], Any],
    on_all: Callable[[Callable[[], None]], None],
) -> None:
    own = [(blob or {"loaders": {}})["loaders"].get(name) for name in loaders]

    def states_of_all() -> list[list[Any] | None]:
        here = current_rank()[1]
        objects = list(loaders.values())
        if origin.world_size == here and not any(map(regrid.is_elsewhere, objects, own)):
            return [None] * len(objects)

        def read(ranks: Any) -> list[Any]:
            return [_as_trainers(blob, list(loaders)) for blob in read_blobs(ranks)]

        return regrid.read_states(read, objects, own, origin.world_size, here).states

    if not loaders:
        return
    of_all = agree(states_of_all)

    def load() -> None:
        for loader, state, states in zip(loaders.values(), own, of_all, strict=True):
            loader.load_state_dict(states or state)

    on_all(load)


def _as_trainers(blob: Any, names: list[str]) -> Any:
    """A blob in the form that regrid.py reads."""
    return blob and {"loaders": [blob["loaders"][name] for name in names], "epoch_done": False}
