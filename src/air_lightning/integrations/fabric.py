"""Binds Fabric's strategy to AirCheckpointIO, so that every rank of a loop takes part.

Fabric asks a CheckpointIO on rank 0 alone, and under its sharded strategies never. What is bound
here is bound on the *instance* of one strategy; Fabric's own methods stay as they are::

    fabric.save(path, state)  -> strategy.save_checkpoint        every rank
        all ranks are here; the save before is published, or its error raised; the state
        (fabric_state.py) and this rank's position (fabric_position.py) become entries; rank 0's
        choice of the directory; they are staged; the rest is in the background
    fabric.load(path, state)  -> strategy.load_checkpoint        every rank
        where the checkpoint is now; what it is of is compared with the state; each rank reads what
        it holds; all or none of the ranks go on; loaders, and generators last
    fabric.load_raw(path, module)  likewise, for one module
    fabric.launch()           -> strategy.setup_environment      tensor parallel ranks read the same
    fabric.setup(...)         -> strategy.setup_module           what DDP averages is noted

``Fabric(plugins=[AirCheckpointIO()])`` is attached when the first module was set up, through
Fabric's own entry point (``fabric_entry.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAFSDPStrategy,
    XLAStrategy,
)

from air_lightning.checkpoint.catalog import find_latest_valid
from air_lightning.checkpoint.restore import Stored, read_rank_blobs
from air_lightning.checkpoint.sight import UNSEEN_S, when_seen
from air_lightning.checkpoint.state import Entries, to_keyed_entries
from air_lightning.checkpoint.together import together
from air_lightning.checkpoint.weights import read_weights
from air_lightning.data.stream import set_share
from air_lightning.errors import (
    CheckpointMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
)
from air_lightning.integrations import fabric_position, files
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.choice import of_rank_zero
from air_lightning.integrations.entrance import Entrance
from air_lightning.integrations.fabric_require import require_state
from air_lightning.integrations.fabric_state import Filters, Sorted, State, note_reduced, progress
from air_lightning.integrations.located import Located, locate
from air_lightning.integrations.strategies import data_share

_T = TypeVar("_T")

_BINDING = "_air_lightning_binding"
_SUPPORTED = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, FSDPStrategy)
# Subclasses of those above that keep their state elsewhere.
_REFUSED = (DeepSpeedStrategy, XLAStrategy, XLAFSDPStrategy, SingleDeviceXLAStrategy)


def attach_after_setup(io: AirCheckpointIO, fabric: Any, module: Any) -> None:
    """Attach to a Fabric that has just set up a module."""
    if getattr(fabric.strategy, _BINDING, None) is None:
        note_reduced(getattr(module, "_forward_module", None))
    io.attach(fabric)


def attach(io: AirCheckpointIO, fabric: Any) -> "FabricBinding":
    """Bind a Fabric's strategy to a plugin, once.

    Raises:
        InvalidTypeError: It is no Fabric.
        InvalidArgumentError: The strategy is of no kind whose state this release can save, or it
            has another plugin of ours.
    """
    if not isinstance(fabric, Fabric):
        raise InvalidTypeError(_no_fabric(fabric))
    strategy: Any = fabric.strategy
    if not isinstance(strategy, _SUPPORTED) or isinstance(strategy, _REFUSED):
        raise InvalidArgumentError(
            f"AirCheckpointIO was attached to a Fabric with {type(strategy).__name__}; this "
            f"release saves under {', '.join(kind.__name__ for kind in _SUPPORTED)} and their "
            "subclasses (not DeepSpeed, not XLA). Choose one of these, or do not attach."
        )
    binding: FabricBinding | None = getattr(strategy, _BINDING, None)
    other = binding.io if binding is not None else getattr(strategy, "_checkpoint_io", None)
    if isinstance(other, AirCheckpointIO) and other is not io:
        raise InvalidArgumentError(
            "The Fabric has another AirCheckpointIO already, attached or in plugins=[...]. Use "
            "that one: two plugins would not know of each other's saves."
        )
    if binding is None:
        binding = FabricBinding(fabric, io)
        setattr(strategy, _BINDING, binding)
    return binding


def _no_fabric(given: Any) -> str:
    kind = type(given)
    told = f"attach was given a {kind.__module__}.{kind.__name__}; a lightning.Fabric is wanted."
    if kind.__name__ == "Trainer":
        return f"{told} A Trainer takes the plugin itself: Trainer(plugins=[AirCheckpointIO()])."
    return f"{told} Import it from lightning: the names of lightning_fabric are other classes."


class FabricBinding:
    """The methods that replace those of one strategy instance.

    The originals are called through the class: a bound method of the instance that is kept here
    would be this one again after Fabric's launcher has pickled both for a spawned rank.
    """

    def __init__(self, fabric: Fabric, io: AirCheckpointIO) -> None:
        strategy: Any = fabric.strategy
        self.io = io
        self._fabric = fabric
        self._strategy = strategy
        self._kind: Any = type(strategy)
        self._entrance = Entrance(io.timeout_s)
        self._resumes = False
        self._told: bool | None = None  # weights_only of the resume under way
        if fabric._launched:
            set_share(data_share(strategy))
        strategy.setup_environment = self.setup_environment
        strategy.setup_module = self.setup_module
        strategy.save_checkpoint = self.save_checkpoint
        strategy.load_checkpoint = self.load_checkpoint

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return bool(self._strategy.is_global_zero)

    def setup_environment(self) -> None:
        """Let ranks that hold parts of one layer read the same files, once they are known."""
        self._kind.setup_environment(self._strategy)
        set_share(data_share(self._strategy))

    def setup_module(self, module: Any) -> Any:
        """Note what DDP averages when it wraps a module."""
        wrapped = self._kind.setup_module(self._strategy, module)
        note_reduced(wrapped)
        return wrapped

    def save_checkpoint(
        self,
        path: Any,
        state: State,
        storage_options: Any | None = None,
        filter: Filters | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Every rank's part of a save."""
        self._entrance.enter()
        self.io.connect()
        self.io.wait()
        # Asked for a state, a loader or a callable of the user's may raise on one rank alone; and
        # what cannot be saved is to leave no directory.
        entries, told = together(
            lambda: self._entries(state, filter or {}), f"Saving {path}", self.io.group
        )
        # Whether a complete checkpoint is in the way must look the same to all.
        target = self._agree(lambda: self.io.choose_target(path))
        self.io.save_entries(entries, target, **told, storage_options=storage_options)

    def _entries(self, state: State, filters: Filters) -> tuple[Entries, dict[str, Any]]:
        """This rank's entries, and what the manifest tells of them."""
        values = Sorted(self._strategy, state)
        collected = values.collect(filters)
        loaders = {**self.io.registered, **values.loaders}
        entries = to_keyed_entries(
            collected.state,
            models=collected.models,
            optimizers=collected.optimizers,
            rank=self.io.rank,
            rank_blob=fabric_position.blob_of(loaders),
            alike=collected.alike,
        )
        step, epoch = progress(state)
        return entries, {"step": step, "epoch": epoch, "weights_only": not values.optimizers}

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> State:
        """Every rank's part of a load; gives what the state did not ask for."""
        weights_only = self._told if weights_only is None else weights_only
        self.io.connect()
        self.io.wait()
        located = self._agree(lambda: locate(path, self.io.storage_options, resumable=False))
        target, is_lightnings = located.target, located.is_file or located.is_lightnings
        if isinstance(state, torch.optim.Optimizer) and not is_lightnings:
            raise InvalidArgumentError(
                f"load_raw({target}) was given a {type(state).__name__}; a directory holds the "
                'states of several objects by key: fabric.load(path, {"optimizer": optimizer}).'
            )
        if isinstance(state, torch.nn.Module):
            self._load_raw(located, state, strict, weights_only)
            return {}
        if is_lightnings:
            return self._load_lightnings(located, state, strict, weights_only)
        return self._load(located, {} if state is None else state, strict, weights_only)

    def _load(
        self, located: Located, state: State, strict: bool, weights_only: bool | None
    ) -> State:
        target = located.target
        values = together(lambda: Sorted(self._strategy, state), f"Loading {target}", self.io.group)
        live = values.live()

        def read() -> Stored:
            stored = Stored(self.io.reader(target), rank=self.io.rank, weights_only=weights_only)
            values.check(stored, live, strict=strict)
            if isinstance(self._strategy, ModelParallelStrategy | FSDPStrategy) and state:
                # What nothing here is sharded like, each rank would read whole for nobody.
                stored.leave_out(stored.with_tensors() - state.keys())
            stored.read(live)
            return stored

        stored = self._on_all(located, read)
        values.put(stored.checkpoint, strict=strict)
        # As for a save: what is the user's may refuse its state on one rank alone.
        together(
            lambda: values.put_others(state, stored.checkpoint), f"Loading {target}", self.io.group
        )
        if values.is_resumed or self._resumes:
            self._restore_position(target, stored, values, strict, weights_only)
        return stored.checkpoint

    def _restore_position(
        self, target: str, stored: Stored, values: Sorted, strict: bool, weights_only: bool | None
    ) -> None:
        def read_blobs(ranks: Iterable[int]) -> list[Any]:
            # Many small reads from as many files: what they cost is the wait for each.
            reader = self.io.reader(target, thread_count=16)
            return read_rank_blobs(reader, ranks, weights_only=weights_only)

        fabric_position.restore(
            {**self.io.registered, **values.loaders},
            stored.rank_blob,
            self._agree(lambda: fabric_position.Origin.of(stored.rank_blob)),
            read_blobs,
            strict=strict,
            agree=self._agree,
            on_all=lambda step: together(step, f"Loading {target}", self.io.group),
        )

    def _load_raw(
        self,
        located: Located,
        module: torch.nn.Module,
        strict: bool,
        weights_only: bool | None,
    ) -> None:
        values = Sorted(self._strategy, {"model": module})
        live = values.weights("model")

        def read() -> Mapping[str, Any]:
            if located.is_file:
                return files.weights_in(
                    files.load_file(located.target, weights_only), located.target
                )
            reader = self.io.reader(located.target)
            weights: Mapping[str, Any] = read_weights(
                reader, reader.read_metadata(), weights_only=weights_only, live=live
            )["state_dict"]
            return weights

        saved = self._on_all(located, read)
        values.put_raw("model", saved, strict=strict)

    def _on_all(self, located: Located, read: Callable[[], _T]) -> _T:
        """Read on every rank: one that fails alone would leave the others in a collective."""
        step = read
        if located.is_whole and not self.is_global_zero:
            bound_s = min(UNSEEN_S, self.io.timeout_s / 2)  # others wait for it in a collective
            step = partial(when_seen, read, located.target, self.io.storage_options, bound_s)
        return together(step, f"Loading {located.target}", self.io.group)

    def _load_lightnings(
        self, located: Located, state: Any, strict: bool, weights_only: bool | None
    ) -> State:
        sharded = isinstance(self._strategy, ModelParallelStrategy | FSDPStrategy)
        if not sharded and not located.is_file:
            raise CheckpointMismatchError(
                f"{located.target} was saved by Fabric itself under ModelParallelStrategy or "
                f"FSDPStrategy, and {self._kind.__name__} does not read that. Load it under such a "
                "strategy and save it with AirCheckpointIO, which any reads; or take the weights "
                "alone: fabric.load_raw(path, model)."
            )
        left: State = self._kind.load_checkpoint(
            self._strategy,
            path=files.place(located.target),
            state=state,
            strict=strict,
            **files.told(weights_only),
        )
        return left

    def resume(
        self, root: Any, state: State, *, strict: bool, weights_only: bool | None
    ) -> str | None:
        """Load the newest valid checkpoint below a root, as rank 0 finds it."""
        self.io.connect()
        self.io.wait()
        together(lambda: require_state(state), f"Resuming from {root}", self.io.group)
        with_moments = any(isinstance(value, torch.optim.Optimizer) for value in state.values())

        path = self._agree(
            lambda: find_latest_valid(
                root, resumable=with_moments, storage_options=self.io.storage_options
            )
        )
        if path is not None:
            with self._restoring_all(weights_only):
                self._fabric.load(path, state, strict=strict)
        return path

    @contextmanager
    def _restoring_all(self, weights_only: bool | None) -> Iterator[None]:
        # Not through fabric.load: before Lightning 2.6 it does not know the argument.
        self._resumes, self._told = True, weights_only
        try:
            yield
        finally:
            self._resumes, self._told = False, None

    def _agree(self, choose: Callable[[], _T]) -> _T:
        """Rank 0's choice, or its error, on every rank."""
        return of_rank_zero(self._strategy, choose)
