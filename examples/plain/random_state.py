"""Checkpoint the random generators: the noise after a restart is the noise there would have been.

Each rank has its own, so each saves them under a key of its own. ``capture_rng_state`` and
``restore_rng_state`` do the same in one call (examples/plain_torch.py).
"""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from common import arguments, batch_of, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from air_lightning import UCVolumeReader, UCVolumeWriter


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_rng_state(rng: dict[str, Any]) -> None:
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    torch.cuda.set_rng_state_all(rng["cuda"])


def augment(batch: torch.Tensor) -> torch.Tensor:
    factor, shift = random.uniform(0.9, 1.1), np.random.normal() / 10
    return factor * batch + shift + 0.1 * torch.randn_like(batch)


def main() -> None:
    args = arguments("Saves and restores the random generators.")
    with ranks() as rank:
        model, optimizer = build()
        seed_everything(100 + rank)
        step = 0
        key = f"rng.{rank}"
        latest = newest(args.checkpoints)
        if latest is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": 0, key: rng_state()}
            dcp.load(state, storage_reader=UCVolumeReader(latest))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            step = state["step"]
            # Last of all: whatever draws from them in the meantime would be in the way.
            set_rng_state(state[key])
        while step < args.steps:
            train_step(model, optimizer, step, augment(batch_of(step, rank)))
            step += 1
            if step % args.save_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step, key: rng_state()}
                dcp.save(state, storage_writer=UCVolumeWriter(f"{args.checkpoints}/step_{step}"))
        finish(model)


if __name__ == "__main__":
    main()
