"""Recover from the newest checkpoint that is complete, and keep no more than is needed.

The loop is that of async_save.py. What a kill in the middle of a save leaves behind has no
``.metadata``, for that is written last; it is passed over, as is a directory of which a file is
missing or short. Old ones, and what was left behind, are deleted once a newer one is complete.
"""

import torch.distributed as dist
from async_save import Saves, restore
from common import arguments, batch_of, build, finish, ranks, train_step

from air_lightning import find_latest_valid, list_checkpoints, prune_checkpoints


def choose(checkpoints: str) -> str | None:
    """The newest complete checkpoint, chosen by one rank: listings may differ for some seconds."""
    choice: list[str | None] = [None]
    if dist.get_rank() == 0:
        for record in list_checkpoints(checkpoints):
            print(f"{record.path}: step {record.step}, {record.reason or 'complete'}", flush=True)
        choice = [find_latest_valid(checkpoints)]
        print(f"resumed from {choice[0]}" if choice[0] else "started fresh", flush=True)
    dist.broadcast_object_list(choice)
    return choice[0]


def main() -> None:
    args = arguments("Goes on from the newest complete checkpoint, and deletes old ones.")
    with ranks() as rank:
        model, optimizer = build()
        saves = Saves(args.checkpoints)
        latest = choose(args.checkpoints)
        start = 0 if latest is None else restore(latest, model, optimizer)
        for step in range(start, args.steps):
            train_step(model, optimizer, step, batch_of(step, rank))
            if (step + 1) % args.save_every == 0:
                saves.finish()
                if rank == 0:
                    prune_checkpoints(args.checkpoints, keep_last=2)
                saves.start(step + 1, model, optimizer)
        saves.finish()
        finish(model)


if __name__ == "__main__":
    main()
