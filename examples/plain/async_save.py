"""Save with ``dcp.async_save``: training waits until its state is copied, not until it is written.

The process group needs a back end for the CPU: see ``ranks`` in common.py.
"""

from concurrent.futures import Future
from typing import Any

import torch.distributed.checkpoint as dcp
from common import arguments, batch_of, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from air_lightning import UCVolumeReader, UCVolumeWriter


class Saves:
    """At most one save at a time, in the background."""

    def __init__(self, checkpoints: str) -> None:
        self.checkpoints = checkpoints
        self.future: Future[Any] | None = None

    def start(self, step: int, model: Any, optimizer: Any) -> None:
        self.finish()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optimizer_state, "step": step}
        writer = UCVolumeWriter(f"{self.checkpoints}/step_{step}")
        self.future = dcp.async_save(state, storage_writer=writer)

    def finish(self) -> None:
        """Waits for the save in flight, and raises its error if it failed."""
        if self.future is not None:
            self.future.result()


def restore(checkpoint: str, model: Any, optimizer: Any) -> int:
    """Gives the number of steps that were done."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 0}
    dcp.load(state, storage_reader=UCVolumeReader(checkpoint))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return int(state["step"])


def main() -> None:
    args = arguments("Saves with dcp.async_save.")
    with ranks() as rank:
        model, optimizer = build()
        saves = Saves(args.checkpoints)
        checkpoint = newest(args.checkpoints)
        start = 0 if checkpoint is None else restore(checkpoint, model, optimizer)
        for step in range(start, args.steps):
            train_step(model, optimizer, step, batch_of(step, rank))
            # What is saved is the number of steps done. The number of this step, with the weights
            # after it, would have it done twice.
            if (step + 1) % args.save_every == 0:
                saves.start(step + 1, model, optimizer)
        saves.finish()
        finish(model)


if __name__ == "__main__":
    main()
