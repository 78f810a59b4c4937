"""Datasets of users' own around ours: decoding wrappers, and many samples per file."""

import importlib.util
import json
import random
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

import air_lightning

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

IMAGES = 21

# Stands for torchvision.transforms.functional, which is not needed for anything else.
TF = types.SimpleNamespace(
    to_tensor=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
)


class ImageDataset(IterableDataset):
    """The decoding wrapper of the training guide, by its shape: a held dataset, iterated over."""

    def __init__(self, path_dataset: air_lightning.UCVolumeDataset):
        self._path_dataset = path_dataset

    def __iter__(self):
        for local_path in self._path_dataset:
            image = Image.open(local_path).convert("RGB")
            yield TF.to_tensor(image)


class ResumableImageDataset(ImageDataset):
    """The same, with the two methods handed on that make it resumable."""

    def state_dict(self):
        return self._path_dataset.state_dict()

    def load_state_dict(self, state_dict):
        self._path_dataset.load_state_dict(state_dict)


@pytest.fixture
def images(volume):
    """A volume of images, each of one grey that says which it is."""
    for number in range(IMAGES):
        folder = volume.directory / "images" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), color=number).save(folder / f"{number:02}.png")
    return f"{volume.path}/images"


def greys(batch):
    """Which images a batch is made of."""
    assert batch.shape[1:] == (3, 4, 4)
    return [round(grey * 255) for grey in batch[:, 0, 0, 0].tolist()]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_guides_decoding_wrapper_works_as_it_is(images, workers):
    """Every image comes once in each epoch, decoded by the workers; there is no state to take."""
    path_dataset = air_lightning.UCVolumeDataset(images)
    dataset = ImageDataset(path_dataset)
    loader = air_lightning.DataLoader(dataset, batch_size=4, num_workers=workers)
    for _ in range(2):
        assert Counter(g for batch in loader for g in greys(batch)) == Counter(range(IMAGES))
    with pytest.raises(TypeError, match="ImageDataset"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_guides_wrapper_resumes_once_it_hands_on_the_state(images, workers):
    """With the two methods, each state of two shuffled epochs resumes with the next batch."""

    def fresh():
        paths = air_lightning.UCVolumeDataset(images, shuffle=True, seed=4)
        dataset = ResumableImageDataset(paths)
        return air_lightning.DataLoader(dataset, batch_size=4, num_workers=workers)

    loader, states, wanted = fresh(), [], []
    for _ in range(2):
        for batch in loader:
            wanted.append(greys(batch))
            states.append(json.dumps(loader.state_dict()))
    half = len(wanted) // 2
    assert Counter(g for batch in wanted[:half] for g in batch) == Counter(range(IMAGES))
    assert Counter(g for batch in wanted[half:] for g in batch) == Counter(range(IMAGES))
    assert wanted[:half] != wanted[half:]
    for done, state in enumerate(states[:-1], 1):
        resumed, seen = fresh(), []
        resumed.load_state_dict(json.loads(state))
        while len(seen) < len(wanted) - done:
            seen += [greys(batch) for batch in resumed]
        assert seen == wanted[done:], f"resumed after batch {done}"


# ---- many samples per file


@pytest.fixture(scope="module")
def example():
    """The module examples/shards.py."""
    path = Path(__file__).parents[2] / "examples" / "shards.py"
    spec = importlib.util.spec_from_file_location("shards_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shards(example, volume):
    """A volume of five shards of 5, 6, 7, 5 and 6 samples."""
    example.write_shards(str(volume.directory / "shards"), 5, 5)
    return f"{volume.path}/shards"


SAMPLES = Counter(
    f"{shard:03}/{number:04}.gray" for shard in range(5) for number in range(5 + shard % 3)
)


def fresh_shards(example, path, workers, batch_size=3):
    dataset = air_lightning.UCVolumeDataset(path, shuffle=True, seed=2)
    return air_lightning.DataLoader(
        example.Shards(dataset), batch_size=batch_size, num_workers=workers
    )


def names(batches):
    """How often each sample was delivered."""
    return Counter(name for batch in batches for name in batch[0])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_of_shards_is_a_place_to_resume(example, shards, workers, batch_size):
    """Resumed after any batch of two epochs, the batches that follow are the same to the bit."""
    loader = fresh_shards(example, shards, workers, batch_size)
    states, wanted, per_epoch = [], [], []
    for _ in range(2):
        before = len(wanted)
        for batch in loader:
            wanted.append(example.record(batch))
            states.append(json.dumps(loader.state_dict()))
        per_epoch.append(wanted[before:])
    assert names(per_epoch[0]) == names(per_epoch[1]) == SAMPLES
    assert list(names(per_epoch[0])) != list(names(per_epoch[1]))
    # Every third for single samples: each resume forks workers.
    for done in range(1, len(wanted), 3 if batch_size == 1 else 1):
        resumed = fresh_shards(example, shards, workers, batch_size)
        resumed.load_state_dict(json.loads(states[done - 1]))
        seen = []
        while len(seen) < len(wanted) - done:
            seen += [example.record(batch) for batch in resumed]
        assert seen == wanted[done:], f"resumed after batch {done}"


@pytest.mark.parametrize("seed", range(3))
def test_shards_interrupted_over_and_over_give_each_sample_once(example, shards, seed):
    """Two workers, two epochs, several resumes of resumes: each sample once in each epoch."""
    chance = random.Random(seed)
    epochs = {0: Counter(), 1: Counter()}
    state, resumes = None, 0
    while True:
        loader = fresh_shards(example, shards, 2)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        if (epoch := loader.epoch) > 1:
            break
        stop = chance.randrange(1, 5)
        for taken, batch in enumerate(loader, 1):
            epochs[epoch] += names([example.record(batch)])
            if taken == stop:
                break
        state = json.dumps(loader.state_dict())
        resumes += 1
    assert epochs == {0: SAMPLES, 1: SAMPLES}
    assert resumes > 5


def test_a_resume_opens_no_shard_that_was_read(example, shards, volume):
    """Only the shard in progress is opened again; those before it may as well be gone."""
    loader = fresh_shards(example, shards, 0)
    iterator, seen = iter(loader), []
    while len({name[:3] for batch in seen for name in batch[0]}) < 3:
        seen.append(example.record(next(iterator)))
    state = json.dumps(loader.state_dict())
    rest = [example.record(batch) for batch in iterator]
    current, done = seen[-1][0][-1][:3], {name[:3] for batch in seen for name in batch[0]}
    resumed = fresh_shards(example, shards, 0)
    for shard in done - {current}:
        (volume.directory / "shards" / f"shard-{shard}.tar").unlink()
    resumed.load_state_dict(json.loads(state))
    assert [example.record(batch) for batch in resumed] == rest


def test_an_abandoned_pass_over_shards_begins_anew(example, shards):
    """Without a load, a pass that was left in the middle of a shard is followed by a whole one."""
    for workers in (0, 2):
        loader = fresh_shards(example, shards, workers)
        next(iter(loader))
        assert names(example.record(batch) for batch in loader) == SAMPLES
        assert loader.epoch == 1
