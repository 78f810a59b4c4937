"""Gradients that are being accumulated when a save is made, each rank's own.

Between two steps of an optimizer they are a part of the training's state that nothing else holds.
They go into the rank's blob, and only then: an optimizer that stepped in the batch before the save
has used its own up.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.tensor import DTensor

_log = logging.getLogger("air_lightning")


class Gradients:
    """Knows which optimizers of a Trainer have gradients that they are still to step with."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._watched: list[Any] = []
        self._handles: list[Any] = []
        self._stepped: set[int] = set()
        self._stepped_before: set[int] = set()
        self._has_backward = False

    def watch(self) -> None:
        """Note the steps of the optimizers that there are now; others are none of this fit's."""
        for handle in self._handles:
            handle.remove()
        # What is only like an optimizer, as Lightning takes it, tells nobody of its steps.
        optimizers = self._trainer.strategy.optimizers
        self._watched = [each for each in optimizers if hasattr(each, "register_step_post_hook")]
        self._handles = [each.register_step_post_hook(self._on_step) for each in self._watched]
        self._stepped, self._stepped_before = set(), set()

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self._stepped.add(id(optimizer))

    def on_batch_start(self) -> None:
        """Note that a batch begins."""
        self._stepped_before, self._stepped = self._stepped, set()
        self._has_backward = False

    def on_backward(self) -> None:
        """Note that the gradients of the open batch are among the others from now on."""
        self._has_backward = True

    def capture(self, *, is_open: bool) -> dict[str, torch.Tensor]:
        """The gradients that a step is still to come of, by parameter name.

        Args:
            is_open: Whether a batch is being trained on, which the resumed run does again.
        """
        if is_open and self._has_backward:
            return {}  # this batch's own are among them, and would count twice
        stepped = self._stepped_before if is_open else self._stepped
        pending = dict(self._pending(stepped))
        if pending and isinstance(self._trainer.strategy, FSDPStrategy):
            _log.warning(
                "Gradients that FSDPStrategy accumulates are not saved: after a resume from this "
                "checkpoint the next step lacks them. ModelParallelStrategy's are."
            )
            return {}
        return pending

    def _pending(self, stepped: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting = {
            id(parameter)
            for optimizer in self._watched
            if id(optimizer) not in stepped
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if not waiting:
            return
        for name, parameter in self._trainer.lightning_module.named_parameters():
            gradient = parameter.grad
            if id(parameter) in waiting and gradient is not None and _is_plain(gradient, parameter):
                yield name, _own(gradient)

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put gradients back before the first batch; its backward adds to them."""
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if name in saved:
                parameter.grad = _like(saved[name].to(parameter.device), parameter)


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return bool(gradient.placements == parameter.placements)
    return gradient.layout == torch.strided


def _own(gradient: torch.Tensor) -> torch.Tensor:
    here = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    here = here.detach()
    # Of a view, as into a bucket of DDP's, the whole bucket would be pickled.
    return here.clone() if here.untyped_storage().nbytes() > here.nbytes else here


def _like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
