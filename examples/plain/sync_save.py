"""Save with ``dcp.save``: training waits until the checkpoint is complete."""

import torch.distributed.checkpoint as dcp
from common import arguments, batch_of, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from air_lightning import UCVolumeReader, UCVolumeWriter


def main() -> None:
    args = arguments("Saves with dcp.save, loads with dcp.load.")
    with ranks() as rank:
        model, optimizer = build()
        step = 0
        checkpoint = newest(args.checkpoints)
        if checkpoint is not None:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optim": optimizer_state, "step": 0}
            dcp.load(state, storage_reader=UCVolumeReader(checkpoint))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
            step = state["step"]
        while step < args.steps:
            train_step(model, optimizer, step, batch_of(step, rank))
            step += 1
            if step % args.save_every == 0:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optim": optimizer_state, "step": step}
                writer = UCVolumeWriter(f"{args.checkpoints}/step_{step}")
                dcp.save(state, storage_writer=writer)
        finish(model)


if __name__ == "__main__":
    main()
