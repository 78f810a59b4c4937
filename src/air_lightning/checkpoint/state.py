"""A training state to DCP entries and back, with no moment of Adam lost and no key changed.

Writing (:func:`to_entries`): the checkpoint dict is walked once. Each tensor of the model and of
the optimizers becomes an entry of its own, and None stands in its place in what is left. The rest
(counters, param_groups, scalars such as Adam's ``step``, empty dicts, types and the order of keys)
is one blob, ``air.trainer``, together with the list of places: which entry belongs where. Reading
(``restore.py``) loads the blob, then every entry on the list, and puts it in its place.
Keys are never parsed, so parameter names may hold dots, and integer ids stay integers. DCP alone
makes them strings, and AdamW then restores nothing, without an error.

Ranks differ in some of what all of them have: running statistics of BatchNorm, metrics. So rank 0
gives every tensor, and the others only what is equal, and the shards; else a checkpoint would mix
what belongs to several ranks. What was equal once and should still be (frozen parameters under DDP)
is marked, for the ranks to compare (``sharing.py``).

What DCP cannot hold (sparse, quantized, nested and meta tensors, foreign tensor classes) stays in
the blob, as does the whole state of an optimizer whose ids have no parameter names.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.blobs import SerializedBlob, serialize
from air_lightning.checkpoint.names import clean
from air_lightning.checkpoint.places import (
    RESERVED,
    TRAINER_KEY,
    VERSION,
    Path,
    Place,
    pack,
    rank_key,
)
from air_lightning.checkpoint.restore import read_checkpoint
from air_lightning.checkpoint.sharing import Alike
from air_lightning.checkpoint.staging import is_dense
from air_lightning.checkpoint.suspended import no_collections

__all__ = ["read_checkpoint", "to_entries", "to_keyed_entries"]


class Entries(dict[str, "torch.Tensor | SerializedBlob"]):
    """Flat entries by key.

    Attributes:
        unshared: Keys of the plain tensors that this rank alone gives.
        unsure: Keys of those that every rank gives, if they are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unshared: set[str] = set()
        self.unsure: set[str] = set()


_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
# Packed together; torch.stack takes them all, and Adam's steps are among them.
_SCALARS = (torch.float32, torch.float64, torch.int64)
_TRAINERS_OWN = "pytorch-lightning_version"  # every Trainer's checkpoint has this key
_log = logging.getLogger("air_lightning")


def optimizer_names(
    module_named_parameters: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> Mapping[int, str] | None:
    """Map the integer ids of ``optimizer.state_dict()`` to parameter names.

    Args:
        module_named_parameters: What ``module.named_parameters()`` yields.
        optimizer: Any optimizer with ``param_groups``.

    Returns:
        The names, or None if a parameter of the optimizer is none of the module's.
    """
    names: dict[int, str] = {}
    for name, parameter in module_named_parameters:
        names.setdefault(id(parameter), name)
    ids: dict[int, int] = {}  # torch counts each parameter once, in the order of the groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ids.setdefault(id(parameter), len(ids))
    if not all(identity in names for identity in ids):
        return None
    return {number: names[identity] for identity, number in ids.items()}


@no_collections()
def to_entries(
    checkpoint: Mapping[str, Any],
    *,
    optimizer_names: Sequence[Mapping[int, str] | None],
    rank: int,
    rank_blob: Mapping[str, Any],
    alike: Mapping[str, torch.Tensor] | None = None,
) -> Entries:
    """Turn a Lightning checkpoint into flat DCP entries.

    Blobs are serialized at once; tensors are those of the checkpoint itself, still to be staged.

    Args:
        checkpoint: The Trainer's checkpoint dict, which is left unchanged.
        optimizer_names: For each of ``checkpoint["optimizer_states"]`` the parameter name of each
            integer id, or None where there is no such mapping.
        rank: This process's rank. What ranks hold alike, each of them gives; rank 0 alone the rest.
        rank_blob: What only this rank knows.
        alike: The live parameters, by name without those of wrappers, that are equal on all ranks,
            and so their moments; an ``Alike`` knows of which this is not sure.

    Returns:
        ``state_dict.<name>``, ``optimizer_states.<i>.state.<parameter>.<name>`` (names without
        those of wrappers), on rank 0 ``air.trainer``, and ``air.rank.<rank>``. A blob that cannot
        be serialized carries its error, which the save then raises on every rank.
    """
    taker = _Taker(alike or {}, {"state_dict"})
    rest = dict(checkpoint)
    if "state_dict" in rest:
        rest["state_dict"] = taker.take_model(rest["state_dict"])
    states = rest.get("optimizer_states")
    if type(states) is list:
        rest["optimizer_states"] = [
            taker.take_optimizer(
                f"optimizer_states.{i}",
                ("optimizer_states", i),
                state,
                optimizer_names[i] if i < len(optimizer_names) else None,
            )
            for i, state in enumerate(states)
        ]
    return _complete(taker, rest, rank, rank_blob)


@no_collections()
def to_keyed_entries(
    state: Mapping[Any, Any],
    *,
    models: Sequence[str],
    optimizers: Mapping[str, Mapping[int, str] | None],
    rank: int,
    rank_blob: Mapping[str, Any],
    alike: Mapping[str, torch.Tensor] | None = None,
) -> Entries:
    """Turn a state whose keys are its owner's choice into flat DCP entries, as ``to_entries`` does.

    Tensors under every key become entries, however deep in plain dicts and lists they are.

    Args:
        state: State dicts and plain values by key.
        models: The keys of modules' state dicts.
        optimizers: For each key of an optimizer's state the parameter name of each integer id, with
            the key of its model before it (``model.layer.weight``); None where there is none.
        rank: As of ``to_entries``.
        rank_blob: As of ``to_entries``.
        alike: As of ``to_entries``, by such names.

    Returns:
        ``<key>.<name>``, ``<key>.state.<parameter>.<name>`` for optimizers, and the blobs.
    """
    taker = _Taker(alike or {}, set(models))
    rest: dict[Any, Any] = {}
    for key, value in state.items():
        names = optimizers.get(str(key))
        if names is None:
            rest[key] = taker.take(value, clean(str(key)), (key,))
        else:
            rest[key] = taker.take_optimizer(str(key), (key,), value, names)
    return _complete(taker, rest, rank, rank_blob, models=list(models))


def _complete(
    taker: "_Taker", rest: dict[Any, Any], rank: int, rank_blob: Mapping[str, Any], **more: Any
) -> Entries:
    """The entries of this rank: what it gives of those taken, and the blobs."""
    entries: Entries = taker.entries
    if rank == 0:
        entries[TRAINER_KEY] = _trainer_blob(rest, taker, more)
    else:
        for key in entries.unshared:
            del entries[key]
        entries.unshared.clear()
    entries[rank_key(rank)] = serialize(
        rank_key(rank), dict(rank_blob), rank_blob, is_fabrics="models" in more
    )
    return entries


class _Taker:
    """Takes tensors out of a nested state: entries, their places, and what is left."""

    def __init__(self, alike: Mapping[str, torch.Tensor], models: Collection[str]) -> None:
        self.alike = alike
        self.models = models  # the first keys under which weights are
        self.unsure = alike.unsure if isinstance(alike, Alike) else frozenset[str]()
        self.entries = Entries()
        self.places: list[Place] = []
        self.scalars: dict[torch.dtype, tuple[list[torch.Tensor], list[Path]]] = {}

    def take_model(self, state: Any) -> Any:
        """Return ``state`` with None for each tensor taken."""
        if not _walkable(state):
            return state
        left = _shell(state)
        for name, value in state.items():
            known = clean(str(name))
            left[name] = self.take(value, f"state_dict.{known}", ("state_dict", name), known)
        return left

    def take_optimizer(
        self, prefix: str, where: Path, state: Any, names: Mapping[int, str] | None
    ) -> Any:
        """Return ``state`` with None for each tensor taken; parameters without a name stay."""
        if names is None or type(state) is not dict or not _walkable(state.get("state")):
            return state
        left = dict(state)
        left["state"] = _shell(state["state"])
        for number, value in state["state"].items():
            if number not in names:
                left["state"][number] = value
                continue
            name = clean(names[number])
            key, path = f"{prefix}.state.{name}", (*where, "state", number)
            left["state"][number] = self.take(value, key, path, name)
        return left

    def take(self, value: Any, key: str, path: Path, like: str | None = None) -> Any:
        """Return ``value`` with None for each tensor taken.

        Args:
            value: Anything.
            key: Of its entry, or where the keys of its entries begin.
            path: Where it is in the checkpoint.
            like: The parameter whose sharding it follows; by default the one of its entry's key.
        """
        if _walkable(value):
            left = _shell(value)
            for name, item in value.items():
                known = clean(str(name))
                left[name] = self.take(item, f"{key}.{known}", (*path, name), like)
            return left
        if type(value) is list:
            return [self.take(item, f"{key}.{i}", (*path, i), like) for i, item in enumerate(value)]
        # Two dotted names can give one key; the second value then stays in the blob.
        if not is_storable(value) or key in self.entries or key.startswith(RESERVED):
            return value
        like = key if like is None else like
        if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
            # Each rank holds a summand; DCP would save one rank's.
            value = value.full_tensor()
        # Adam's steps, one for each parameter, cost more as entries than they weigh.
        if path[0] not in self.models and _is_cpu_scalar(value):
            packed, paths = self.scalars.setdefault(value.dtype, ([], []))
            packed.append(value)
            paths.append(path)
            return None
        self.entries[key] = value
        if not isinstance(value, DTensor):
            self._note_standing(value, key, path, like)
        self.places.append(_place(value, key, path, like))
        return None

    def _note_standing(self, value: torch.Tensor, key: str, path: Path, like: str) -> None:
        if not self._is_alike(value, path, like):
            self.entries.unshared.add(key)
        elif like in self.unsure:
            self.entries.unsure.add(key)

    def _is_alike(self, value: torch.Tensor, path: Path, like: str) -> bool:
        parameter = self.alike.get(like)
        if parameter is None or path[0] not in self.models:
            return parameter is not None
        # A callback of rank 0 may have put other weights in the parameter's place.
        return value.data_ptr() == parameter.data_ptr() and value.shape == parameter.shape


def _walkable(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value)


def _shell(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return an empty dict of the same type, with the attributes (``_metadata`` of modules)."""
    shell = type(value)()
    if isinstance(value, OrderedDict):
        shell.__dict__.update(value.__dict__)
    return shell


def is_storable(value: Any) -> bool:
    """Whether a value is a tensor that DCP can hold."""
    if isinstance(value, DTensor):
        return True
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.dtype in _DTYPES
        and not value.is_nested
        and not value.is_meta
    )


def _is_cpu_scalar(value: torch.Tensor) -> bool:
    return (
        type(value) is torch.Tensor
        and value.dim() == 0
        and value.is_cpu
        and value.dtype in _SCALARS
        and not value.requires_grad
    )


def _place(value: torch.Tensor, key: str, path: Path, like: str) -> Place:
    stride = None
    if not isinstance(value, DTensor) and not value.is_contiguous() and is_dense(value):
        stride = tuple(value.stride())
    # The class's own check asks each plain tensor for an attribute that it does not have.
    is_parameter = type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter)
    return Place(key, path, is_parameter, value.requires_grad, stride, like)


def _trainer_blob(rest: dict[str, Any], taker: "_Taker", more: Mapping[str, Any]) -> SerializedBlob:
    content = {
        **more,
        "version": VERSION,
        "checkpoint": rest,
        "places": pack(taker.places),
        "scalars": [(torch.stack(v), pack(paths)) for v, paths in taker.scalars.values()],
    }
    is_fabrics = "models" in more
    blob = serialize(TRAINER_KEY, content, rest, is_fabrics=is_fabrics)
    # Of a Fabric loop's keys none is special: left out, it would be missed at the load.
    if blob.error is None or is_fabrics or not {"hyper_parameters", _TRAINERS_OWN} <= rest.keys():
        return blob
    # Lightning's own file checkpoint drops hyper-parameters that do not pickle, and goes on.
    content["checkpoint"] = {k: v for k, v in rest.items() if k != "hyper_parameters"}
    without = serialize(TRAINER_KEY, content, content["checkpoint"], is_fabrics=False)
    if without.error is None:
        _log.warning("`hyper_parameters` is left out of the checkpoint: %s", blob.error.__cause__)
    return without
