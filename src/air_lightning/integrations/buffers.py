"""Buffers in which a rank differs from rank 0, whose own are in the checkpoint.

DDP copies rank 0's buffers to the others before a forward pass, but not after a pass without
gradients to be reduced: with manual optimization never again in a start, with accumulated
gradients or after a validation not at once. The sharded strategies never do. Running statistics
then differ between ranks, and a resume that gives all of them rank 0's is not exact. So::

    save     prints    what rank 0 has, where nothing will make the others equal; goes to all ranks
                       with the path, in one message
             capture   each other rank's own, of those alone that differ, for its blob
    restore  on as many ranks: the own ones, and whether DDP copies before the next pass
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from air_lightning.checkpoint.names import clean
from air_lightning.checkpoint.sharing import fingerprint
from air_lightning.checkpoint.state import is_storable


class Buffers:
    """The buffers of a Trainer's module.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def prints(self, checkpoint: Mapping[str, Any]) -> dict[str, int]:
        """Fingerprints of this rank's, by name; none where they do not matter.

        Args:
            checkpoint: The Trainer's checkpoint dict.
        """
        if self._trainer.world_size == 1 or self._will_be_equal():
            return {}
        return {name: fingerprint(value) for name, value in self._saved(checkpoint).items()}

    def capture(self, checkpoint: Mapping[str, Any], first: Mapping[str, int]) -> dict[str, Any]:
        """What this rank's blob says of its buffers.

        Args:
            checkpoint: As of ``prints``.
            first: What ``prints`` gave on rank 0.
        """
        own = {}
        if first and not self._trainer.is_global_zero:
            own = {
                name: value.detach().cpu().clone()
                for name, value in self._saved(checkpoint).items()
                if name in first and fingerprint(value) != first[name]
            }
        ddp = self._ddp()
        return {"buffers": own, "syncs_buffers": ddp is None or ddp.require_forward_param_sync}

    def go_on(self, *, syncs: bool) -> None:
        """Let DDP copy rank 0's or not, on all ranks alike: a rank that did alone would hang.

        Args:
            syncs: Whether it was to do so when the checkpoint was saved.
        """
        ddp = self._ddp()
        if ddp is not None and not syncs:
            ddp.require_forward_param_sync = False

    def restore(self, blob: Mapping[str, Any]) -> None:
        """Put this rank's own back, in the place of rank 0's."""
        saved = blob.get("buffers") or {}
        with torch.no_grad():
            for name, live in self._live().items():
                if name in saved and saved[name].shape == live.shape:
                    live.copy_(saved[name])

    def _ddp(self) -> Any:
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    def _will_be_equal(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.will_sync_module_buffers())

    def _live(self) -> dict[str, torch.Tensor]:
        return {
            clean(name): value
            for name, value in self._trainer.lightning_module.named_buffers()
            if is_storable(value) and not isinstance(value, DTensor)
        }

    def _saved(self, checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Of the live ones those that are saved; of a checkpoint of weights alone none."""
        if "optimizer_states" not in checkpoint:
            return {}
        names = {clean(str(name)) for name in checkpoint.get("state_dict") or ()}
        return {name: value for name, value in self._live().items() if name in names}
