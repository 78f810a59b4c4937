"""Where a strategy keeps weights and moments, how they are read without a copy, and put back.

Each class below is one kind of strategy, and has the same steps for ``binding.Binding``::

    bind             replaces on the strategy instance what collects its state
    optimizer_names  the parameter name of each id in the optimizers' states
    note_alike       which parameters are equal on all ranks, which then share the writing
    staged_here      what this rank will stage, for memory to be there before the first save
    sharding         what each rank holds of the parameters, so that it loads no more than that
    load_model       after ``on_load_checkpoint``, as under every strategy
    load_optimizers  likewise

Lightning's sharded strategies gather their state to the CPU: a second copy in host memory beside
the one that is staged. Theirs is also another format than DDP's, through torch's
``get_optimizer_state_dict``, which changes the optimizer that it reads. Here every kind gives what
DDP gives, the state by name and integer ids, only with DTensors in it; so a checkpoint of one kind
loads under another. FSDP1 has its class in ``fsdp.py``.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from air_lightning.checkpoint.names import clean, renamed
from air_lightning.checkpoint.sharding import fitted
from air_lightning.checkpoint.sharing import Alike, like_own_share
from air_lightning.checkpoint.state import is_storable, optimizer_names

_log = logging.getLogger("air_lightning")


class ReplicatedState:
    """Single device and DDP: every rank has everything, and Lightning collects and restores it."""

    restores_all = False  # whether the strategy's own load_checkpoint puts weights and moments back

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.alike = Alike()
        self._load_model = strategy.load_model_state_dict
        self._load_optimizers = strategy.load_optimizer_state_dict
        self.bind()

    def bind(self) -> None:
        """Nothing: what Lightning collects is the live state, and it is staged from there."""

    def optimizer_names(self, count: int) -> Sequence[Mapping[int, str] | None]:
        """The parameter names of each of the first ``count`` optimizers, by id."""
        named = list(self.strategy.lightning_module.named_parameters())
        return [optimizer_names(named, optimizer) for optimizer in self.strategy.optimizers[:count]]

    def note_alike(self) -> None:
        """DDP keeps equal what it reduces, and made equal what was frozen when it wrapped it."""
        self.alike = alike_under(self.strategy.model)

    def sharding(self) -> Mapping[str, torch.Tensor]:
        """The weights as they lie on this rank."""
        weights: Mapping[str, torch.Tensor] = self.strategy.lightning_module.state_dict()
        return weights

    def staged_here(self) -> list[torch.Tensor]:
        """As much memory as this rank will stage, as tensors; no collectives."""
        alike = {id(parameter) for parameter in self.alike.values()}
        held = [(clean(name) in self.alike, w) for name, w in self.sharding().items()]
        for optimizer in self.strategy.optimizers:
            for parameter, state in optimizer.state.items():
                held += [(id(parameter) in alike, value) for value in state.values()]
        held = [(shared, v) for shared, v in held if is_storable(v) and v.dim() > 0]
        shared = [value for is_alike, value in held if is_alike]
        own = [value for is_alike, value in held if not is_alike]
        if not self.strategy.is_global_zero:  # rank 0 alone gives what ranks may differ in
            own = [value for value in own if isinstance(value, DTensor)]
        if not shared:
            return own
        return own + like_own_share(shared, dist.get_rank(), dist.get_world_size())

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Put the weights of a checkpoint into the model."""
        wanted = self.strategy.lightning_module.state_dict()
        state = renamed(checkpoint["state_dict"], wanted)
        self._load_model({**checkpoint, "state_dict": state}, strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Put the moments of a checkpoint into the optimizers."""
        self._load_optimizers(checkpoint)


class ModelParallelState(ReplicatedState):
    """FSDP2 and tensor parallel: parameters and moments are DTensors, or whole on every rank."""

    restores_all = True

    def bind(self) -> None:
        """Read the live state: no gathering, no second copy."""
        self.strategy.lightning_module_state_dict = self.model_state
        self.strategy.optimizer_state = self.optimizer_state
        if not self._saves_shards():
            _log.debug(
                "%s was told to save whole state dicts; AirCheckpointIO saves shards all the same.",
                type(self.strategy).__name__,
            )

    @override
    def note_alike(self) -> None:
        """None: nothing averages the gradients of a parameter that is not sharded."""

    def _saves_shards(self) -> bool:
        return bool(self.strategy._save_distributed_checkpoint)

    def model_state(self) -> dict[str, Any]:
        """The live weights."""
        state: dict[str, Any] = self.strategy.lightning_module.state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The live moments, by integer id."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Put weights into the shards; whole ones, as ``on_load_checkpoint`` may give, are cut."""
        load_weights(self.strategy.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Put moments into the optimizers, likewise."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.strategy.optimizers, states, strict=True):
            load_moments(optimizer, state)


def load_weights(module: torch.nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict into a module that may hold DTensors; whole tensors are cut."""
    wanted = module.state_dict()
    # A copy that keeps the attribute from which load_state_dict reads the modules' versions.
    state: Any = copy.copy(renamed(saved, wanted))
    for name in state.keys() & wanted.keys():
        state[name] = fitted(state[name], wanted[name])
    module.load_state_dict(state, strict=strict)


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state, whole tensors cut like the parameters that they belong to."""
    optimizer.load_state_dict(_fitted_moments(state, optimizer))


def alike_under(ddp: Any) -> Alike:
    """The parameters that DDP made equal on all ranks, by every name they have.

    It goes on averaging the gradients of those that were trainable then. Nothing changes the others
    but the module itself, as a codebook that follows the rank's own batches.
    """
    # A hook of the user's may average over some ranks only, as post-local SGD does.
    if not isinstance(ddp, DistributedDataParallel) or vars(ddp).get("_comm_hooks"):
        return Alike()
    parameters = {
        name: parameter
        for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
        if name not in ddp.parameters_to_ignore and not getattr(parameter, "_ddp_ignored", False)
    }
    frozen = [clean(name) for name, value in parameters.items() if not value.requires_grad]
    return Alike({clean(name): value for name, value in parameters.items()}, frozen)


def reduced(ddp: Any) -> dict[str, torch.Tensor]:
    """The parameters whose gradients this module averages over all ranks; none if it is no DDP."""
    alike = alike_under(ddp)
    return {name: value for name, value in alike.items() if name not in alike.unsure}


def data_share(strategy: Any) -> tuple[int, int] | None:
    """Which share of the data this rank reads, and of how many; None for one of its own.

    Ranks that hold parts of one layer need the same batch.
    """
    if not isinstance(strategy, ModelParallelStrategy | FabricModelParallelStrategy):
        return None
    told = strategy.distributed_sampler_kwargs
    return int(told["rank"]), int(told["num_replicas"])


def _fitted_moments(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Other groups than the saved ones are for load_state_dict to refuse.
    parameters: dict[int, torch.Tensor] = {}
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        parameters.update(zip(saved["params"], group["params"], strict=False))
    moments = {
        number: {name: fitted(value, parameters.get(number)) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}
