"""Random draws where items are made: apart from one another, and the same after a resume."""

import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from air_lightning import AirCheckpointIO, AirResume, DataLoader, UCVolumeDataset
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

FILES = 22


def sample(path: str) -> tuple[int, float, float, float]:
    """The file's number, and a draw of Python's, NumPy's and torch's generator."""
    number = int(Path(path).stem)
    return number, random.random(), float(np.random.rand()), float(torch.rand(()))


def loader_of(volume: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    files = UCVolumeDataset(volume.path, shuffle=True, seed=3).map(sample)
    return DataLoader(files, batch_size=3, num_workers=num_workers, collate_fn=list, **options)


def disturb(number: int) -> None:
    """A new process's generators stand elsewhere."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def seed_all_alike(worker: int) -> None:
    """The init function that gives all workers the same draws under torch's own loader."""
    disturb(0)


@pytest.mark.parametrize("init", [None, seed_all_alike])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_draws_after_a_resume_are_those_of_the_undisturbed_run(volume, workers, init):
    """Interrupted three times in two epochs, all draws of all generators are as they were."""
    volume.write(FILES)
    options = {"worker_init_fn": init} if workers else {}
    whole = loader_of(volume, workers, **options)
    disturb(0)
    wanted = [batch for _ in range(2) for batch in whole]
    seen: list[Any] = []
    state = None
    for number, cut in enumerate((2, 3, 6, len(wanted))):
        disturb(number)
        loader = loader_of(volume, workers, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        while len(seen) < cut:
            for batch in loader:
                seen.append(batch)
                if len(seen) == cut:
                    break
        state = loader.state_dict()
    assert seen == wanted
    draws = [draw for batch in wanted for item in batch for draw in item[1:]]
    assert len(set(draws)) == len(draws)


def draw_two_epochs(volume: Any, results: Path, workers: int) -> None:
    """One rank: writes the draws of two epochs."""
    dist.init_process_group("gloo")
    disturb(0)
    loader = loader_of(volume, workers)
    items = [item for _ in range(2) for batch in loader for item in batch]
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(items))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_two_items_of_any_rank_worker_or_epoch_have_the_same_draws(volume, tmp_path, workers):
    """Three ranks that seeded themselves alike draw apart, and each item's draws are its own."""
    volume.write(FILES)
    results = tmp_path / "results"
    results.mkdir()
    assert run_ranks(draw_two_epochs, volume, results, workers, world_size=3) == [0, 0, 0]
    items = [item for path in results.iterdir() for item in json.loads(path.read_text())]
    assert len(items) == 2 * FILES
    for generator in (1, 2, 3):
        assert len({item[generator] for item in items}) == len(items)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.tensor([[item[1]] for item in batch])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Seen(Callback):
    """Notes the batches, and whether Lightning gave the loader its own init function."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.seeds_workers: bool | None = None

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append([list(item) for item in batch])
        self.seeds_workers = trainer.train_dataloader.worker_init_fn is not None


def fit(volume: Any, directory: Path, max_steps: int, *, lightning_seeds: bool) -> Seen:
    """One Trainer run of so many steps, resumed if there is a checkpoint."""
    if lightning_seeds:
        seed_everything(5, workers=True, verbose=False)
    else:
        disturb(max_steps)
    seen = Seen()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        plugins=[AirCheckpointIO()],
        callbacks=[AirResume(str(directory)), seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), train_dataloaders=loader_of(volume, 2))
    trainer.save_checkpoint(directory / f"step_{max_steps}")
    trainer.strategy.checkpoint_io.wait()
    return seen


def fit_twice(volume: Any, work: Path, lightning_seeds: bool) -> None:
    """Twelve steps in one go, and in two goes of five and seven."""
    torch.set_num_threads(1)
    go = partial(fit, volume, lightning_seeds=lightning_seeds)
    whole = go(work / "whole", 12)
    first, second = go(work / "parts", 5), go(work / "parts", 12)
    assert whole.seeds_workers is first.seeds_workers is lightning_seeds
    assert ("PL_GLOBAL_SEED" in os.environ) is lightning_seeds
    assert len(whole.batches) == 12
    assert len(first.batches) == 5
    assert first.batches + second.batches == whole.batches
    items = [tuple(item[1:]) for batch in whole.batches for item in batch]
    assert len(set(items)) == len(items)


@pytest.mark.parametrize("lightning_seeds", [False, True])
def test_draws_go_on_under_a_trainer_with_and_without_its_seeding(
    volume, tmp_path, lightning_seeds
):
    """Resumed in mid-epoch, draws are as they were, with and without ``seed_everything``."""
    volume.write(FILES)
    log = tmp_path / "log"
    status = run_ranks(fit_twice, volume, tmp_path, lightning_seeds, log=log)
    assert status == [0], log.read_text()


def fragile(path: str) -> tuple[int, float, float, float]:
    """A sample of a decoder that draws before it fails."""
    number, *draws = sample(path)
    if "bad" in Path(path).read_text():
        raise ValueError("bad")
    return number, *draws


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", range(1, 8))
def test_draws_of_files_that_were_skipped_leave_no_trace(volume, workers, cut):
    """Whatever a decoder drew before it failed, a resume gives the same items and draws."""
    for number in range(FILES):
        volume.put(f"{number:04}", b"bad" if number % 8 > 1 else b"good")

    def make() -> DataLoader[Any]:
        files = UCVolumeDataset(volume.path, on_error="skip").map(fragile)
        return DataLoader(files, batch_size=2, num_workers=workers, collate_fn=list)

    whole = list(make())
    first, second = make(), make()
    iterator = iter(first)
    head = [next(iterator) for _ in range(cut)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + list(second) == whole


def test_a_failed_try_changes_no_draw(volume):
    """What comes in place of a bad file is decoded with the draws of that file."""
    for number in range(3):
        volume.put(f"{number:04}", b"good")

    def draws() -> list[Any]:
        files = UCVolumeDataset(volume.path, on_error="skip").map(fragile)
        return [
            item[1:]
            for item in next(iter(DataLoader(files, batch_size=3, num_workers=0, collate_fn=list)))
        ]

    wanted = draws()
    volume.put("0001", b"bad")
    assert draws() == wanted
