"""Lightning's counters and hooks when an epoch goes on with another number of workers."""

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.optim.lr_scheduler import LRScheduler

from air_lightning import AirCheckpointIO, AirDataModule, AirResume, DataLoader, UCVolumeDataset
from air_lightning.errors import GridMismatchError, InvalidArgumentError, StateError
from air_lightning.integrations.regrid import read_states
from conftest import Volume
from integration.training import Data, Model

pytestmark = [pytest.mark.timeout(500)]

FILES = 44


@pytest.fixture
def numbers(volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A volume of small numbered text files; Lightning's directories are below the current one."""
    for number in range(FILES):
        (volume.directory / f"{number:03d}.txt").write_text(str(number))
    monkeypatch.chdir(tmp_path)
    return volume.path


class Stopped(Exception):
    """What ends a run after its save."""


class Observer(Callback):
    """Notes what is trained on and which hooks run; saves at a moment, and ends the run there."""

    def __init__(
        self, path: str, hook: str = "on_train_batch_end", step: int | None = None
    ) -> None:
        self.path, self.hook, self.step = path, hook, step
        self.batches: list[tuple[int, int, list[str]]] = []
        self.hooks: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.stop(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, idx: int) -> None:
        batch = batch["a"] if isinstance(batch, dict) else batch
        self.batches.append((trainer.current_epoch, idx, list(batch[0])))
        self.stop(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.hooks.append(("validated", trainer.current_epoch))
            self.stop(trainer, "on_validation_end")

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.hooks.append(("begun", trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.hooks.append(("ended", trainer.current_epoch))
        self.stop(trainer, "on_train_epoch_end")

    def stop(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Stopped

    @property
    def files(self) -> dict[int, Counter[str]]:
        """How often each file was trained on, by epoch."""
        found: dict[int, Counter[str]] = {}
        for epoch, _, files in self.batches:
            found.setdefault(epoch, Counter()).update(files)
        return found

    @property
    def counts(self) -> dict[int, list[int]]:
        """The ``batch_idx`` of each batch, by epoch."""
        return {
            epoch: [idx for e, idx, _ in self.batches if e == epoch]
            for epoch in dict.fromkeys(e for e, _, _ in self.batches)
        }


class OfTwo(Model):
    """Trains on the first of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def fit(observer: Observer, data: Any, resume: str | None = None, **options: Any) -> Trainer:
    """Train until the observer stops, or to the end."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[AirCheckpointIO()],
        callbacks=[AirResume(), observer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )
    model = OfTwo() if isinstance(data, Pair) else Model()
    with contextlib.suppress(Stopped):
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return trainer


def files(path: str, num_workers: int, **options: Any) -> Data:
    """Batches of three of the files."""
    options = {"batch_size": 3, "elastic": True, **options}
    return Data(train=path, num_workers=num_workers, **options)


EACH_ONCE = Counter({f"{number:03d}.txt": 1 for number in range(FILES)})


def test_as_many_batches_left_as_an_epoch_has(numbers: str, tmp_path: Path) -> None:
    """After one batch of 15, four workers have 16 batches left, as many as in a whole epoch."""
    first = Observer(f"{tmp_path}/save", step=1)
    fit(first, files(numbers, 0, val=numbers))
    rest = Observer("")
    trainer = fit(rest, files(numbers, 4, val=numbers), first.path)
    assert rest.counts == {0: list(range(16)), 1: list(range(16))}
    assert first.files[0] + rest.files[0] == rest.files[1] == EACH_ONCE
    assert rest.hooks == [
        ("validated", 0),
        ("ended", 0),
        ("begun", 1),
        ("validated", 1),
        ("ended", 1),
    ]
    assert trainer.global_step == 33


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_another_batch_size(
    numbers: str, tmp_path: Path, size: int, hook: str, elastic: bool
) -> None:
    """An epoch goes on in batches of another size to its last file, and is validated once."""
    first, rest = Observer(f"{tmp_path}/save", hook, step=5), Observer("")
    fit(first, files(numbers, 2, val=numbers, elastic=elastic))
    data = files(numbers, 2, val=numbers, elastic=elastic, batch_size=size)
    with pytest.warns(UserWarning, match="another size"):
        fit(rest, data, first.path)
    assert first.files[0] + rest.files[0] == rest.files[1] == EACH_ONCE
    assert rest.counts[0][-1] == rest.counts[1][-1]
    assert [hook for hook in rest.hooks if hook[0] == "validated"] == [
        ("validated", 0),
        ("validated", 1),
    ]


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    grids=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4),
    last=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    hook=st.sampled_from(["on_train_batch_start", "on_train_batch_end"]),
)
@example([(0, 1), (0, 4), (0, 4), (0, 4)], 0, 3, "on_train_batch_end")
@example([(0, 3), (0, 4), (0, 4), (0, 3)], 0, 4, "on_train_batch_end")  # saved at the last batch
def test_any_grids_in_an_epoch(
    numbers: str,
    tmp_path: Path,
    grids: list[tuple[int, int]],
    last: int,
    batch_size: int,
    hook: str,
) -> None:
    """(workers, batches) one after another: each file once, and the last batch_idx is the last."""
    known: Counter[str] = Counter()
    step, path = 0, None
    for number, (workers, batches) in enumerate([*grids, (last, FILES)]):
        step += batches
        observer = Observer(f"{tmp_path}/{number}-{time.monotonic_ns()}", hook, step)
        data = files(numbers, workers, batch_size=batch_size)
        trainer = fit(observer, data, path, max_epochs=1)
        known += sum(observer.files.values(), Counter())
        indices = [idx for _, idx, _ in observer.batches]
        length = len(trainer.train_dataloader)
        if ("ended", 0) in observer.hooks or length - 1 in indices:
            break
        path = observer.path
    assert known == EACH_ONCE
    assert indices == list(range(length))[-len(indices) :]


def test_a_limit_ends_an_epoch_that_another_grid_began(numbers: str, tmp_path: Path) -> None:
    """The epoch after one that went on elsewhere and was cut short is a new one."""
    first, rest = Observer(f"{tmp_path}/save", step=1), Observer("")
    fit(first, files(numbers, 0), limit_train_batches=3)
    fit(rest, files(numbers, 4), first.path, limit_train_batches=3)
    assert rest.counts == {0: [1, 2], 1: [0, 1, 2]}
    undisturbed = Observer("")
    fit(undisturbed, files(numbers, 4), limit_train_batches=3)
    assert rest.batches[2:] == undisturbed.batches[3:]


def test_a_part_of_an_epoch_is_a_part_on_every_grid(numbers: str, tmp_path: Path) -> None:
    """A limit as a fraction counts files: what was trained on elsewhere is not trained on anew."""
    first, rest = Observer(f"{tmp_path}/save", step=6), Observer("")
    fit(first, files(numbers, 0), limit_train_batches=0.5)
    fit(rest, files(numbers, 4), first.path, limit_train_batches=0.5)
    # Of 44 files 26 are left: 10 batches of 16, of which the Trainer takes 8 in an epoch.
    assert rest.counts == {0: [6, 7], 1: list(range(8))}


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_saved_at_an_epochs_end(numbers: str, tmp_path: Path, hook: str, limit: str) -> None:
    """What was saved after an epoch's last batch goes on with the next epoch, all of it."""
    first, rest = Observer(f"{tmp_path}/save", hook, step=15), Observer("")
    fit(first, files(numbers, 0, val=numbers), **{limit: 2 if limit == "max_epochs" else 30})
    amount = 2 if limit == "max_epochs" else 15 + 16
    trainer = fit(rest, files(numbers, 4, val=numbers), first.path, **{limit: amount})
    assert rest.counts == {1: list(range(16))}
    assert rest.files == {1: EACH_ONCE}
    assert rest.hooks[-3:] == [("begun", 1), ("validated", 1), ("ended", 1)]
    assert trainer.global_step == 31


def test_validation_within_an_epoch(numbers: str, tmp_path: Path) -> None:
    """Validation comes where it does in an epoch of this grid, and whole."""
    options = {"val_check_interval": 0.5, "max_epochs": 1}
    first, rest = Observer(f"{tmp_path}/save", "on_validation_end", step=7), Observer("")
    fit(first, files(numbers, 0, val=numbers), **options)
    fit(rest, files(numbers, 4, val=numbers), first.path, **options)
    assert first.files[0] + rest.files[0] == EACH_ONCE
    assert rest.hooks == [("validated", 0), ("ended", 0)]


def test_nothing_is_left_for_this_grid(numbers: str, tmp_path: Path) -> None:
    """Where no worker has a full batch left, the epoch is over, for learning rates too."""
    first, rest = Observer(f"{tmp_path}/save", step=13), Observer("")
    fit(first, files(numbers, 0, drop_last=True))
    trainer = fit(rest, files(numbers, 4, drop_last=True), first.path)
    assert rest.counts == {1: list(range(12))}
    assert trainer.global_step == 13 + 12
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.last_epoch == 2


class Pair(AirDataModule):
    """Two loaders: all of the files, and a fourth of them."""

    mode = "max_size_cycle"

    def train_dataloader(self) -> Any:
        part = UCVolumeDataset(self.paths["train"], pattern="00*.txt", shuffle=True, seed=3)
        options = {**self._loader_options, "batch_size": 2, "elastic": True}
        loaders = {
            "a": DataLoader(self.train_dataset(), **options),
            "b": DataLoader(part, **options),
        }
        return CombinedLoader(loaders, self.mode)

    def decode(self, path: str) -> Any:
        return Data.decode(self, path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "steps"), [("max_size_cycle", 22), ("min_size", 6)])
def test_two_loaders(numbers: str, tmp_path: Path, mode: str, steps: int) -> None:
    """Each of several loaders shares out by itself; the one that ends the epoch ends it here."""
    first, rest = Observer(f"{tmp_path}/save", step=4), Observer("")
    modules = [Pair(numbers, num_workers=workers, elastic=True) for workers in (0, 2)]
    for module in modules:
        module.mode = mode
    fit(first, modules[0], max_epochs=1)
    trainer = fit(rest, modules[1], first.path, max_epochs=1)
    assert rest.hooks == [("ended", 0)]
    known = first.files[0] + rest.files[0]
    if mode == "max_size_cycle":
        assert known == EACH_ONCE
    else:
        assert max(known.values()) == 1
    assert trainer.global_step == steps


def test_without_elastic_both_grids_are_named(numbers: str, tmp_path: Path) -> None:
    """The refusal names the grids and what to do."""
    first = Observer(f"{tmp_path}/save", step=2)
    fit(first, files(numbers, 0))
    with pytest.raises(GridMismatchError, match=r"(?s)num_workers=0.*num_workers=2.*elastic=True"):
        fit(Observer(""), files(numbers, 2, elastic=False), first.path)


def test_a_dataset_of_another_kind_is_refused(numbers: str, tmp_path: Path) -> None:
    """A dataset that cannot share out what is left is told of, elastic or not."""
    first = Observer(f"{tmp_path}/save", step=2)
    data = [files(numbers, workers) for workers in (0, 2)]
    for module in data:
        module.has_length = False
    fit(first, data[0])
    with pytest.raises(GridMismatchError, match=r"redistribute\(\)"):
        fit(Observer(""), data[1], first.path)


class Foreign:
    """A loader with a state that is not ours."""

    num_workers = 3


def test_other_ranks_without_elastic_or_our_loader_are_refused(numbers: str) -> None:
    """The message names ranks and workers of both, and a loader that cannot share out."""
    state = {"world_size": 2, "num_workers": 4}
    loader = DataLoader(UCVolumeDataset(numbers), num_workers=1)
    with pytest.raises(
        GridMismatchError, match=r"2 ranks \(num_workers=4\).* 1 ranks \(num_workers=1\).*elastic"
    ):
        read_states(list, [loader], [state], 2, 1)
    with pytest.raises(GridMismatchError, match="a Foreign cannot share out"):
        read_states(list, [Foreign()], [state], 2, 1)


def test_every_rank_of_then_is_needed_and_each_share_once(numbers: str) -> None:
    """Ranks that read the same files count once, and a rank that is missing is named."""
    loader = DataLoader(UCVolumeDataset(numbers), num_workers=1, elastic=True)
    blobs = [{"loaders": [{"rank": rank // 2}], "epoch_done": True} for rank in range(4)]
    then = read_states(lambda ranks: [blobs[rank] for rank in ranks], [loader], [{}], 4, 1)
    assert then == ([[{"rank": 0}, {"rank": 1}]], True)
    with pytest.raises(StateError, match="4 ranks, and has no positions .* for rank 2"):
        read_states(lambda _: [*blobs[:2], None, blobs[3]], [loader], [{}], 4, 1)


def test_elastic_is_true_or_false() -> None:
    """Something else than a truth value was not meant for it."""
    with pytest.raises(InvalidArgumentError, match="elastic='yes'"):
        AirResume(elastic="yes")  # type: ignore[arg-type]
