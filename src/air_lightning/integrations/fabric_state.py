"""The state of a Fabric loop: which of its values are what, taken for a save and put back.

``fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3, "loader": loader})``::

    sort      modules, optimizers, loaders (differ by rank), and the rest
    collect   their state dicts, live; the filters of ``fabric.save``
    put       into modules and optimizers in place, ``load_state_dict`` of what has one, else the
              value into the state

Names of parameters have the key of their module before them, as a state may hold several modules.
"""

import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.fabric.utilities.types import _Stateful
from torch.nn.parallel import DistributedDataParallel

from air_lightning.checkpoint.names import clean, renamed
from air_lightning.checkpoint.restore import Stored
from air_lightning.checkpoint.sharding import fitted
from air_lightning.checkpoint.state import optimizer_names
from air_lightning.errors import CheckpointMismatchError
from air_lightning.integrations.fabric_position import is_loader, require_loader
from air_lightning.integrations.fabric_require import (
    no_such_key,
    require_dict,
    require_groups,
    require_savable,
    require_state,
)
from air_lightning.integrations.strategies import load_moments, load_weights, reduced

_log = logging.getLogger("air_lightning")

Filters = Mapping[str, Callable[[str, Any], bool]]
State = dict[Any, Any]

REDUCED = "_air_lightning_reduced"  # on a DDP module: the names that it averages


class Collected(NamedTuple):
    """What ``to_keyed_entries`` wants to know of a state."""

    state: State
    models: list[str]
    optimizers: dict[str, Mapping[int, str] | None]
    alike: dict[str, torch.Tensor]


class Sorted:
    """The values of a state by their kinds.

    Args:
        strategy: Fabric's.
        state: What ``fabric.save`` or ``fabric.load`` was given, unwrapped.

    Raises:
        InvalidTypeError: It is no dict.
        InvalidArgumentError: A value cannot be saved, or not where it is.
    """

    def __init__(self, strategy: Any, state: Mapping[Any, Any]) -> None:
        require_state(state)
        self._strategy = strategy
        self.state = state
        for key, value in state.items():
            require_savable(key, value)
        self.modules = _of(state, torch.nn.Module)
        self.optimizers = _of(state, torch.optim.Optimizer)
        self.loaders = {k: require_loader(k, v) for k, v in state.items() if is_loader(v)}
        self._flats = self._flat_parameters()

    @property
    def is_resumed(self) -> bool:
        """Whether loading this goes on with a training, rather than begins one from weights."""
        return bool(self.optimizers or self.loaders)

    def weights(self, key: Any) -> dict[str, Any]:
        """The live weights of a module."""
        module = self.modules[key]
        if key in self._flats:
            flat: dict[str, Any] = self._flats[key].weights()
            return flat
        state: dict[str, Any] = self._strategy.get_module_state_dict(module)
        return state

    def collect(self, filters: Filters) -> Collected:
        """The state dicts of everything but loaders, and what belongs to their saving."""
        collected: State = {}
        names: dict[str, Mapping[int, str] | None] = {}
        for key, value in self.state.items():
            if key in self.loaders:
                continue
            if key in self.modules:
                taken: Any = self.weights(key)
            elif key in self.optimizers:
                taken, names[key] = self._moments(value)
            else:
                taken = value.state_dict() if isinstance(value, _Stateful) else value
            _keep(collected, key, taken, filters.get(key))
        models = [key for key in self.modules if key in collected]
        return Collected(collected, models, names, self._alike())

    def live(self) -> dict[str, Any]:
        """What this rank holds, by the names of entries: how much of each is to be loaded."""
        live: dict[str, Any] = {}
        for key in self.modules:
            weights = self.weights(key)
            live.update({f"{key}.{clean(name)}": tensor for name, tensor in weights.items()})
            if key == "state_dict":  # a Trainer's checkpoint names its parameters without it
                live.update({clean(name): tensor for name, tensor in weights.items()})
        return live

    def check(self, stored: Stored, live: Mapping[str, Any], *, strict: bool) -> None:
        """Refuse a checkpoint of something else before anything is read or changed.

        Raises:
            CheckpointMismatchError: A key is missing, or what is under it is of another kind,
                model or optimizer.
        """
        for key in self.state:
            if key in self.loaders:
                continue
            if key not in stored.checkpoint:
                if strict:
                    raise no_such_key(key, stored)
            elif key in self.modules:
                prefix = f"{key}."
                wanted = {k[len(prefix) :]: v for k, v in live.items() if k.startswith(prefix)}
                require_dict(key, stored, "a module's weights")
                stored.compare(key, wanted, strict=strict)
            elif key in self.optimizers:
                require_dict(key, stored, "an optimizer's state")
                require_groups(self.optimizers[key], stored, key)

    def put(self, checkpoint: State, *, strict: bool) -> None:
        """Give modules and optimizers their state, which leaves ``checkpoint``."""
        for key, value in self.state.items():
            if key in self.modules and key in checkpoint:
                self._put_weights(key, checkpoint.pop(key), strict=strict)
            elif key in self.optimizers and key in checkpoint:
                self._put_moments(value, checkpoint.pop(key))

    def put_others(self, target: State, checkpoint: State) -> None:
        """Give the rest theirs, likewise, after the optimizers that schedulers are of."""
        for key, value in self.state.items():
            if key in self.loaders or key not in checkpoint:
                continue
            saved = checkpoint.pop(key)
            if isinstance(value, _Stateful):
                value.load_state_dict(saved)
            else:
                target[key] = fitted(saved, value)

    def put_raw(self, key: Any, saved: Mapping[str, Any], *, strict: bool) -> None:
        """Give one module its weights.

        Raises:
            CheckpointMismatchError: They are another module's.
        """
        try:
            self._put_weights(key, saved, strict=strict)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"The weights are another module's: {error}. Build the module that was saved, or "
                "load with strict=False to leave out what differs in name."
            ) from error

    def _put_weights(self, key: Any, saved: Mapping[str, Any], *, strict: bool) -> None:
        module = self.modules[key]
        if key in self._flats:
            self._flats[key].load_weights(saved, strict)
        elif isinstance(self._strategy, ModelParallelStrategy):
            load_weights(module, saved, strict)
        else:
            wanted = self._strategy.get_module_state_dict(module)
            self._strategy.load_module_state_dict(module, renamed(saved, wanted), strict=strict)

    def _put_moments(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        flat = self._flat_of(optimizer)
        if flat is not None:
            flat.load_moments(optimizer, saved)
        else:
            load_moments(optimizer, saved)

    def _moments(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Mapping[int, str] | None]:
        flat = self._flat_of(optimizer)
        if flat is not None:
            state, names = flat.moments(optimizer)
            key = next(key for key, other in self._flats.items() if other is flat)
            return state, {number: f"{key}.{name}" for number, name in names.items()}
        named = [
            (f"{key}.{name}", parameter)
            for key, module in self.modules.items()
            for name, parameter in _inner(module).named_parameters()
        ]
        return self._strategy.get_optimizer_state(optimizer), optimizer_names(named, optimizer)

    def _flat_parameters(self) -> dict[Any, Any]:
        if not isinstance(self._strategy, FSDPStrategy):
            return {}
        # Not at the top: it needs private classes of torch's that no other strategy does.
        from torch.distributed.fsdp import FullyShardedDataParallel

        from air_lightning.integrations.fsdp import FlatParameters

        return {
            key: FlatParameters(module, self._strategy.root_device)
            for key, module in self.modules.items()
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
        }

    def _flat_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """The FSDP1 module whose parameters an optimizer steps, if it is one."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for flat in self._flats.values():
            if mine & {id(parameter) for parameter in flat.model.parameters()}:
                return flat
        return None

    def _alike(self) -> dict[str, torch.Tensor]:
        """The parameters that DDP averaged since it wrapped their module."""
        alike: dict[str, torch.Tensor] = {}
        for key, module in self.modules.items():
            noted = vars(module).get(REDUCED, ())
            now = reduced(module) if noted else {}
            if noted and not now:
                continue  # a hook averages as it likes
            named = _inner(module).named_parameters(remove_duplicate=False)
            parameters = {clean(name): parameter for name, parameter in named}
            alike.update({f"{key}.{n}": parameters[n] for n in noted if n in parameters})
        return alike


def note_reduced(module: Any) -> None:
    """Note on a module that DDP has just wrapped what it averages, before any is unfrozen."""
    if isinstance(module, DistributedDataParallel) and REDUCED not in vars(module):
        vars(module)[REDUCED] = tuple(reduced(module))


def progress(state: Mapping[Any, Any]) -> tuple[int | None, int | None]:
    """The step and the epoch that a state tells: of ``global_step``, else ``step``; ``epoch``."""
    steps = (_whole(state.get(key)) for key in ("global_step", "step"))
    return next((step for step in steps if step is not None), None), _whole(state.get("epoch"))


def _whole(value: Any) -> int | None:
    """A whole number as an int: of NumPy's and torch's too, which loops count with; no bool."""
    # Both have an __index__ for their truth values, or had one.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # the last of tensors without storage
        return None


_told: set[bool] = set()


def tell_of_attach() -> None:
    """Say once that one rank writes what all could."""
    if not _told:
        _told.add(True)
        _log.warning(
            "Fabric gives a CheckpointIO what rank 0 has, and asks no other rank: this checkpoint "
            "is written by rank 0 alone, without loader positions and generators. Call "
            "AirCheckpointIO().attach(fabric) once, and every rank saves its part."
        )


def _of(state: Mapping[Any, Any], kind: type) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if isinstance(value, kind)}


def _inner(module: Any) -> torch.nn.Module:
    inner: torch.nn.Module = (
        module.module if isinstance(module, DistributedDataParallel) else module
    )
    return inner


def _keep(target: State, key: Any, value: Any, wanted: Callable[[str, Any], bool] | None) -> None:
    """As Fabric filters: entries of dicts alone; a key of which nothing is left is not there."""
    if wanted is None or not isinstance(value, dict):
        target[key] = value
        return
    left = {name: item for name, item in value.items() if wanted(name, item)}
    if left:
        target[key] = left
