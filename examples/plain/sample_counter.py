"""Checkpoint the data pipeline by a counter of one's own, for a map-style dataset.

The order of the samples follows from seed and epoch, so a counter says where the run was: the
batches of the epoch that were consumed are passed over. They are loaded again for that; the state
of an ``air_lightning.DataLoader`` over files (examples/plain_torch.py) touches none of them.
"""

import torch
import torch.distributed.checkpoint as dcp
from common import FEATURES, arguments, build, finish, newest, ranks, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DistributedSampler, TensorDataset

from air_lightning import DataLoader, UCVolumeReader, UCVolumeWriter

SAMPLES, BATCH_SIZE = 96, 4


def main() -> None:
    args = arguments("Counts samples, and passes over those that were consumed.")
    with ranks():
        model, optimizer = build()
        samples = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(2))
        dataset = TensorDataset(samples)
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(dataset, seed=3)
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=0)
        step = start_epoch = samples_seen = 0
        latest = newest(args.checkpoints)
        if latest is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": 0, "epoch": 0, "samples_seen": 0}
            dcp.load(state, storage_reader=UCVolumeReader(latest))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            step, start_epoch = state["step"], state["epoch"]
            samples_seen = state["samples_seen"]
        resume_batch = samples_seen // BATCH_SIZE
        epoch = start_epoch
        while step < args.steps:
            sampler.set_epoch(epoch)
            for number, (batch,) in enumerate(loader):
                # In the epoch that was interrupted only.
                if epoch == start_epoch and number < resume_batch:
                    continue
                if step == args.steps:
                    break
                train_step(model, optimizer, step, batch)
                step += 1
                samples_seen += len(batch)
                if step % args.save_every == 0:
                    weights, moments = get_state_dict(model, optimizer)
                    state = {
                        "model": weights,
                        "optim": moments,
                        "step": step,
                        "epoch": epoch,
                        "samples_seen": samples_seen,
                    }
                    writer = UCVolumeWriter(f"{args.checkpoints}/step_{step}", epoch=epoch)
                    dcp.save(state, storage_writer=writer)
            epoch, samples_seen = epoch + 1, 0
        finish(model)


if __name__ == "__main__":
    main()
