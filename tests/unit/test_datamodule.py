"""AirDataModule: what it builds, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from air_lightning import (
    AirDataModule,
    EmptyVolumeError,
    InvalidArgumentError,
    InvalidPathError,
    write_manifest,
)
from conftest import Volume


@pytest.fixture
def texts(volume: Volume) -> str:
    """A volume with four text files and one of another kind."""
    for number in range(4):
        (volume.directory / f"{number}.txt").write_text(str(number))
    (volume.directory / "notes.md").write_text("not a sample")
    return volume.path


def read(path: str) -> int:
    """A decode function."""
    return int(Path(path).read_text())


def test_decode_as_an_argument(texts: str) -> None:
    """Samples are what the given function makes of each local path."""
    module = AirDataModule(train=texts, pattern="*.txt", decode=read, num_workers=0, batch_size=2)
    assert sorted(int(x) for batch in module.train_dataloader() for x in batch) == [0, 1, 2, 3]


def test_decode_by_a_subclass(texts: str) -> None:
    """A subclass that overrides decode needs nothing else."""

    class Squares(AirDataModule):
        def decode(self, path: str) -> int:
            return read(path) ** 2

    module = Squares(val=texts, pattern="*.txt", num_workers=0)
    assert [int(batch[0]) for batch in module.val_dataloader()] == [0, 1, 4, 9]


def test_only_training_is_shuffled(texts: str) -> None:
    """Training order depends on the seed; the other stages keep the list's order."""
    orders = set()
    for seed in range(4):
        module = AirDataModule(
            train=texts, test=texts, seed=seed, decode=read, num_workers=0, pattern="*.txt"
        )
        orders.add(tuple(int(batch[0]) for batch in module.train_dataloader()))
        assert [int(batch[0]) for batch in module.test_dataloader()] == [0, 1, 2, 3]
    assert len(orders) > 1


def test_a_stage_without_validation_files(texts: str) -> None:
    """Without val= there is no validation loader, which Lightning takes as no validation."""
    assert AirDataModule(train=texts, num_workers=0).val_dataloader() == []


@pytest.mark.parametrize("stage", ["train", "test", "predict"])
def test_a_stage_that_was_given_no_path(texts: str, stage: str) -> None:
    """Asking for a stage without a path names that stage and the remedy."""
    module = AirDataModule(val=texts, num_workers=0)
    with pytest.raises(InvalidArgumentError, match=f"{stage}=<path>"):
        getattr(module, f"{stage}_dataloader")()


def test_no_path_at_all() -> None:
    """A data module of nothing is refused when it is made."""
    with pytest.raises(InvalidArgumentError, match="train="):
        AirDataModule()


@pytest.mark.parametrize(
    "path", ["images", "/Volumes/a/b", "/data/images", "", "/Volumes/a/b/../c"]
)
def test_a_path_that_is_none(path: str) -> None:
    """Each path is checked when the module is made, before a process group or a worker exists."""
    with pytest.raises(InvalidPathError):
        AirDataModule(train=path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 0),
        ("batch_size", None),
        ("batch_size", True),
        ("batch_size", 2.0),
        ("uneven", "cut"),
        ("uneven", []),
        ("on_error", "ignore"),
        ("seed", "1"),
        ("seed", True),
        ("shuffle", "yes"),
        ("drop_last", 1),
        ("read_ahead", -1),
        ("min_free_bytes", -1),
        ("timeout", -1),
        ("elastic", 1),
        ("pin_memory", None),
        ("num_workers", -2),
        ("num_workers", True),
        ("prefetch_factor", 0),
        ("pattern", 5),
        ("pattern", ""),
        ("cache_dir", 5),
        ("cache_dir", ""),
        ("decode", "function"),
        ("storage_options", "anon"),
    ],
)
def test_an_option_that_cannot_work(texts: str, option: str, value: object) -> None:
    """An option that cannot work is refused when the module is made, with the value given."""
    with pytest.raises(InvalidArgumentError, match=option) as caught:
        AirDataModule(train=texts, **{option: value})
    assert repr(value) in str(caught.value)


def test_numpys_whole_numbers(texts: str) -> None:
    """NumPy's integers are taken where an int is wanted."""
    number = np.int64(2)
    module = AirDataModule(
        train=texts, batch_size=number, seed=number, num_workers=np.int64(0), decode=read
    )
    assert type(module.seed) is type(module.batch_size) is int
    assert module.train_dataset().seed == 2


def test_a_reloaded_loader_has_the_same_list_and_cache(texts: str, volume: Volume) -> None:
    """Every loader of a stage begins anew, and downloads and lists nothing a second time."""
    module = AirDataModule(train=texts, pattern="*.txt", num_workers=0)
    first = [batch[0] for batch in module.train_dataloader()]
    for number in range(4):
        (volume.directory / f"{number}.txt").unlink()
    again = module.train_dataloader()
    assert again.epoch == 0
    assert [batch[0] for batch in again] == first


def test_elastic_is_a_matter_of_training(texts: str) -> None:
    """elastic=True reaches the training loader; the other loaders have no position to move."""
    module = AirDataModule(train=texts, val=texts, num_workers=0, elastic=True)
    assert module.train_dataloader().elastic is True
    assert module.val_dataloader().elastic is False
    assert AirDataModule(train=texts, num_workers=0).train_dataloader().elastic is False


def test_an_empty_stage(texts: str) -> None:
    """A pattern that nothing matches names the path and the pattern."""
    module = AirDataModule(train=texts, pattern="*.png", num_workers=0)
    with pytest.raises(EmptyVolumeError, match=r"data.*\*\.png"):
        module.train_dataloader()


def test_a_stage_with_a_manifest_takes_its_list(texts: str, tmp_path: Path) -> None:
    """Each stage has its own; one for a stage without a path is refused."""
    write_manifest(texts, tmp_path / "list", pattern="*.txt")
    manifests = {"train": str(tmp_path / "list")}
    module = AirDataModule(train=texts, val=texts, manifests=manifests, num_workers=0)
    assert len(module.train_dataloader()) == 4
    assert len(module.val_dataloader()) == 5
    for wrong in ({"test": "list"}, ["list"], "list"):
        with pytest.raises(InvalidArgumentError, match=r"manifests=.*by stage, of \['train'\]"):
            AirDataModule(train=texts, manifests=wrong)


def test_manifests_can_be_given_on_a_command_line(texts: str, tmp_path: Path) -> None:
    """jsonargparse, and with it LightningCLI, reads a dict or single stages."""
    jsonargparse = pytest.importorskip("jsonargparse")
    write_manifest(texts, tmp_path / "list", pattern="*.txt")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(AirDataModule, "data")
    for given in (
        f'--data.manifests={{"train": "{tmp_path}/list"}}',
        f"--data.manifests.train={tmp_path}/list",
    ):
        options = parser.parse_args([f"--data.train={texts}", "--data.num_workers=0", given])
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        assert len(instantiate(options).data.train_dataloader()) == 4
