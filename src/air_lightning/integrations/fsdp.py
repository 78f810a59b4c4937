"""FSDPStrategy (FSDP1): its flat parameters as DTensors by name, and back.

FSDP1 alone knows which part of a flat parameter is which weight, so its own sharded state dicts
are taken, on the device. They hold ShardedTensors, cut like a DTensor with ``Shard(0)``; these are
given out as DTensors around the same memory, and made of them again for loading.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from air_lightning.checkpoint.names import renamed
from air_lightning.checkpoint.sharding import fitted
from air_lightning.checkpoint.state import is_storable
from air_lightning.integrations.strategies import ModelParallelState


class FlatParameters:
    """One FSDP1 module's state, whole parameters in place of the flat ones; all collective.

    Args:
        model: The module.
        device: Where its shards are.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model = model
        self._device = device
        self._mesh: DeviceMesh | None = None

    def weights(self) -> dict[str, Any]:
        """The live weights."""
        return {name: self._as_dtensor(value) for name, value in self._live().items()}

    def moments(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[int, str]]:
        """The live moments by integer id, and the parameter name of each id."""
        named = self._named(optimizer)
        names = _names_in(named)
        ids = {name: number for number, name in enumerate(names)}
        state = {
            ids[name]: {key: self._as_dtensor(value) for key, value in values.items()}
            for name, values in named["state"].items()
        }
        groups = [
            {**group, "params": [ids[name] for name in group["params"]]}
            for group in named["param_groups"]
        ]
        return {"state": state, "param_groups": groups}, dict(enumerate(names))

    def load_weights(self, saved: Mapping[str, Any], strict: bool) -> None:
        """Put weights into the flat parameters."""
        live = self._live()
        state = {
            name: self._like(value, live.get(name)) for name, value in renamed(saved, live).items()
        }
        with self._shards():
            self.model.load_state_dict(state, strict=strict)

    def load_moments(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Put moments into an optimizer.

        Raises:
            ValueError: A parameter group has another size.
        """
        live = self._live()
        names = _matched_names(state, self._named(optimizer))
        moments = {
            names[number]: {
                key: self._like(value, live[names[number]]) for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        groups = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ]
        with self._shards():
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                self.model, optimizer, {"state": moments, "param_groups": groups}
            )
        optimizer.load_state_dict(flat)

    def _shards(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
        return context

    def _live(self) -> dict[str, Any]:
        with self._shards():
            state: dict[str, Any] = self.model.state_dict()
            return state

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with self._shards():
            named: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
            return named

    def _as_dtensor(self, value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(value._process_group, self._device.type)
        size, shards = value.size(), value.local_shards()
        return DTensor.from_local(
            shards[0].tensor
            if shards
            else torch.empty((0, *size[1:]), dtype=value.dtype, device=self._device),
            self._mesh,
            (Shard(0),),
            run_check=False,
            shape=size,
            stride=torch.empty(size, device="meta").stride(),
        )

    def _like(self, value: Any, live: Any) -> Any:
        if not isinstance(live, ShardedTensor):
            return fitted(value, live)
        cut = fitted(value, self._as_dtensor(live))
        if not isinstance(cut, DTensor) or cut.shape != live.size():
            return value
        shards = [LocalShard(cut.to_local(), shard.metadata) for shard in live.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=live.metadata(), process_group=live._process_group
        )


class FsdpState(ModelParallelState):
    """FSDP1; each step is a collective one, since FSDP1 gathers a module to take it apart."""

    @override
    def bind(self) -> None:
        """As for FSDP2."""
        self._names: dict[int, dict[int, str]] = {}
        self._flat: FlatParameters | None = None
        super().bind()

    @override
    def _saves_shards(self) -> bool:
        return bool(self.strategy._state_dict_type == "sharded")

    @property
    def flat(self) -> FlatParameters:
        """Of the module that the strategy has now: it wraps one after this is bound."""
        if self._flat is None or self._flat.model is not self.strategy.model:
            self._flat = FlatParameters(self.strategy.model, self.strategy.root_device)
        return self._flat

    @override
    def model_state(self) -> dict[str, Any]:
        """The live weights."""
        return self.flat.weights()

    @override
    def sharding(self) -> Mapping[str, torch.Tensor]:
        """The weights as they lie on this rank."""
        return self.model_state()

    @override
    def staged_here(self) -> list[torch.Tensor]:
        """The flat parameters' shards, and their moments."""
        states = [state for own in self.strategy.optimizers for state in own.state.values()]
        moments = [value for state in states for value in state.values()]
        weights = [parameter.detach() for parameter in self.strategy.model.parameters()]
        return [v for v in (*weights, *moments) if is_storable(v) and v.dim() > 0]

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The live moments, by integer id."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state, self._names[id(optimizer)] = self.flat.moments(optimizer)
        return state

    @override
    def optimizer_names(self, count: int) -> Sequence[Mapping[int, str] | None]:
        """The names of the last ``optimizer_state``, which the checkpoint at hand is of."""
        return [self._names[id(optimizer)] for optimizer in self.strategy.optimizers[:count]]

    @override
    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Put weights into the flat parameters."""
        self.flat.load_weights(checkpoint["state_dict"], strict)

    @override
    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Put moments into the optimizers.

        Raises:
            ValueError: A parameter group has another size.
        """
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.strategy.optimizers, states, strict=True):
            self.flat.load_moments(optimizer, state)


def _names_in(named: Mapping[str, Any]) -> list[str]:
    return [name for group in named["param_groups"] for name in group["params"]]


def _matched_names(state: Mapping[str, Any], named: Mapping[str, Any]) -> dict[int, str]:
    """The live names of the saved ids, by their places in the groups, as torch matches them."""
    names: dict[int, str] = {}
    groups = zip(state["param_groups"], named["param_groups"], strict=True)
    for saved, live in groups:
        names.update(zip(saved["params"], live["params"], strict=True))
    return names
