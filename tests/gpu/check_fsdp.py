"""The sharded strategies on two GPUs, which the test suite cannot do: started by hand.

    torchrun --nproc-per-node 2 tests/gpu/check_fsdp.py

For FSDPStrategy, FSDP2 and tensor parallel: a run that stops and resumes is compared, bit for bit,
with one that does not. Then FSDP1 and FSDP2 go on from what the other one saved. Prints a line for
each, and exits with 1 if one is not right. ``--accelerator cpu`` tries the script itself.
"""

import argparse
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from air_lightning import find_latest_valid
from integration.training import Run, assert_same, diary, result, train

FILES = 22
STRATEGIES = ("fsdp1", "2x1", "1x2")


def resumes_exactly(run: Run) -> None:
    """Train without a stop, and with one; the batches, losses, weights and moments are equal."""
    undisturbed = replace(run, directory=f"{run.directory}/undisturbed")
    stopped = replace(run, directory=f"{run.directory}/stopped")
    train(undisturbed)
    train(replace(stopped, trainer=(*run.trainer, ("max_steps", 8))))
    train(stopped)
    dist.barrier()
    assert diary(stopped) == diary(undisturbed)
    assert_same(result(stopped, dist.get_rank()), result(undisturbed, dist.get_rank()))


def goes_on_from(run: Run, source: str) -> None:
    """Resume from what another strategy saved, and train to the end."""
    path = find_latest_valid(f"{source}/stopped/checkpoints")
    assert path is not None
    train(replace(run, ckpt_path=path, trainer=(("max_epochs", 3),)))
    dist.barrier()
    assert max(batch for _, batch in diary(run)) > 12


def check(name: str, step: Callable[[], None]) -> bool:
    try:
        step()
    except Exception as error:
        print(f"rank {dist.get_rank()}: NOT RIGHT: {name}: {type(error).__name__}: {error}")
        return False
    if dist.get_rank() == 0:
        print(f"right: {name}")
    return True


def volume(root: Path, *, rank: int) -> str:
    """Numbered files that both ranks see."""
    data = root / "data"
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        data.mkdir(parents=True)
        for number in range(FILES):
            (data / f"{number:03d}.txt").write_text(str(number))
    dist.barrier()
    return f"file://{data}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--directory", default="/tmp/air_check_fsdp", help="is emptied")
    arguments.add_argument("--accelerator", default="cuda")
    given = arguments.parse_args()
    backend = "gloo" if given.accelerator == "cpu" else "cpu:gloo,cuda:nccl"
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group(backend)
    if given.accelerator != "cpu":
        torch.cuda.set_device(dist.get_rank())
    data = volume(Path(given.directory), rank=dist.get_rank())
    base = Run(data, "", 2, accelerator=given.accelerator, every_n_steps=2)
    base = replace(base, trainer=(("max_epochs", 2), ("deterministic", True)))
    right = True
    for strategy in STRATEGIES:
        run = replace(base, strategy=strategy, directory=f"{given.directory}/{strategy}")
        right &= check(f"{strategy} resumes exactly", lambda run=run: resumes_exactly(run))
    for strategy, source in (("fsdp1", "2x1"), ("2x1", "fsdp1")):
        target = f"{given.directory}/{strategy}-from-{source}"
        run = replace(base, strategy=strategy, directory=target)
        path = f"{given.directory}/{source}"
        right &= check(
            f"{strategy} goes on from {source}",
            lambda run=run, path=path: goes_on_from(run, path),
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
