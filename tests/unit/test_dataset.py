"""UCVolumeDataset: what it delivers, where it resumes, what it refuses."""

import contextlib
import copy
import gc
import json
import os
import pickle
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch.utils.data

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.manifest import write_manifest
from air_lightning.data.stream import Checkpointable, Grid, set_worker
from air_lightning.errors import (
    AirError,
    EmptyVolumeError,
    FileChangedError,
    FileVanishedError,
    GridMismatchError,
    InvalidArgumentError,
    InvalidPathError,
    StateError,
    StorageError,
    VolumeNotMountedError,
)
from ranks import run_ranks


def read(path: str) -> str:
    return Path(path).read_text()[:4]


def numbers(count: int) -> list[str]:
    return [f"{number:04}" for number in range(count)]


def take(dataset, count: int) -> list[str]:
    passing = iter(dataset)
    taken = [read(next(passing)) for _ in range(count)]
    passing.close()
    return taken


def test_files_come_sorted_below_the_path_as_local_copies(volume):
    """Every file once, in the order of relative paths, at a path that ends in its own."""
    names = volume.write(10)
    dataset = UCVolumeDataset(volume.path)
    paths = list(dataset)
    assert len(dataset) == 10
    assert all(path.endswith(f"/{name}") for path, name in zip(paths, names, strict=True))
    assert not any(path.startswith(str(volume.directory)) for path in paths)


def test_each_epoch_is_shuffled_in_its_own_way(volume):
    """Passes move on through the epochs; set_epoch goes to any of them; seeds differ."""
    volume.write(20)
    dataset = UCVolumeDataset(volume.path, shuffle=True, seed=3)
    epochs = [[read(path) for path in dataset] for _ in range(3)]
    assert dataset.epoch == 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == numbers(20) for epoch in epochs)
    dataset.set_epoch(1)
    assert [read(path) for path in dataset] == epochs[1]
    assert dataset.epoch == 2
    other = UCVolumeDataset(volume.path, shuffle=True, seed=4)
    assert [read(path) for path in other] != epochs[0]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_forked_workers_share_out_the_files(volume, num_workers):
    """Under torch's own loader, too, each file comes once an epoch, and all are cached once."""
    volume.write(20)
    dataset = UCVolumeDataset(volume.path, shuffle=True).map(read)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert Counter(loader) == Counter(numbers(20))
    for number in numbers(20):
        (volume.directory / f"part{int(number) % 3}" / f"{number}.txt").unlink()
    assert Counter(loader) == Counter(numbers(20))


@pytest.mark.parametrize(
    ("uneven", "lengths"), [("keep", [3, 2, 2]), ("pad", [3] * 3), ("drop", [2] * 3)]
)
def test_uneven_lists_are_kept_padded_or_cut(volume, uneven, lengths):
    """slice_length says what each stream delivers; len() what the rank does."""
    volume.write(7)
    dataset = UCVolumeDataset(volume.path, uneven=uneven)
    delivered = []
    for worker, length in enumerate(lengths):
        with set_worker(worker, 3):
            assert dataset.slice_length(Grid(0, 1, worker, 3)) == length
            assert len(dataset) == sum(lengths)
            dataset.set_epoch(0)
            mine = [read(path) for path in dataset]
            assert len(mine) == length
            delivered += mine
    expected = {"keep": 7, "pad": 7, "drop": 6}[uneven]
    assert len(set(delivered)) == expected


def test_dropping_everything_is_an_error(volume):
    """Fewer files than streams leave none with uneven="drop"; the error gives both numbers."""
    volume.write(2)
    dataset = UCVolumeDataset(volume.path, uneven="drop")
    with set_worker(0, 3), pytest.raises(EmptyVolumeError, match="2 files for 3 streams"):
        next(iter(dataset))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_a_state_resumes_at_the_very_file(volume, shuffle, stop):
    """What was delivered and what comes after a resume are the uninterrupted epoch; also twice."""
    volume.write(9)
    whole = UCVolumeDataset(volume.path, shuffle=shuffle)
    list(whole)
    expected = [read(path) for path in whole]
    first = UCVolumeDataset(volume.path, shuffle=shuffle)
    first.set_epoch(1)
    delivered = take(first, stop)
    second = UCVolumeDataset(volume.path, shuffle=shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    delivered += take(second, 2)
    third = UCVolumeDataset(volume.path, shuffle=shuffle)
    third.load_state_dict(second.state_dict())
    assert third.epoch == 1
    delivered += [read(path) for path in third]
    assert delivered == expected
    assert len(list(third)) == 9
    assert third.epoch == 3


def test_an_iterator_that_is_never_used_takes_no_position(volume):
    """It is the next one's, and state_dict() goes on telling it; an epoch that is over stays so."""
    volume.write(6)
    dataset = UCVolumeDataset(volume.path)
    state = {"version": 1, "delivered": 4, "rank": 0, "worker_id": 0, "epoch": 2}
    dataset.load_state_dict(state)
    for _ in range(2):
        iter(dataset).close()
        assert dataset.state_dict()["delivered"] == 4
    assert [read(path) for path in dataset] == ["0002", "0005"]
    assert len(list(dataset)) == 6
    assert dataset.epoch == 4


def test_a_child_that_goes_on_with_its_parents_iterator_is_told_so(volume):
    """At once, even where bad files are skipped; the parent goes on undisturbed."""
    names = volume.write(30)
    passing = iter(UCVolumeDataset(volume.path, read_ahead=8, on_error="skip"))
    next(passing)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(passing)
        except AirError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as said:
        assert b"went on with an iterator that its parent" in said.read()
    os.waitpid(pid, 0)
    assert len(list(passing)) == len(names) - 1


def test_resuming_touches_no_file_of_the_prefix(volume):
    """Files delivered before may be unreadable by now: a mount that lost them is enough."""
    names = volume.write(9)
    first = UCVolumeDataset(volume.path)
    take(first, 5)
    second = UCVolumeDataset(volume.path)
    second.load_state_dict(first.state_dict())
    for name in names[:5]:
        (volume.directory / name).unlink()
    assert len(list(second)) == 4


def test_the_end_of_an_epoch_resumes_at_the_next_with_every_file(volume):
    """Also when the pass was never asked for more, and when files were added since."""
    volume.write(6)
    finished, stopped = (UCVolumeDataset(volume.path, shuffle=True) for _ in range(2))
    list(finished)
    take(stopped, 6)
    volume.put("later/0006.txt", b"0006....")
    for state in (finished.state_dict(), stopped.state_dict()):
        assert (state["epoch"], state["delivered"]) == (0, 6)
        resumed = UCVolumeDataset(volume.path, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert sorted(read(path) for path in resumed) == numbers(7)


def test_a_finished_stream_stays_empty_while_its_epoch_is_asked_for(volume):
    """A worker that is done waits for the others: set_epoch before the load says so."""
    volume.write(6)
    first = UCVolumeDataset(volume.path)
    list(first)
    resumed = UCVolumeDataset(volume.path)
    resumed.set_epoch(0)
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == []
    assert len(list(resumed)) == 6
    assert resumed.epoch == 2


def test_a_dict_of_the_four_documented_keys_is_enough(volume):
    """Version, count, rank and worker seed the stream in the current epoch."""
    volume.write(6)
    dataset = UCVolumeDataset(volume.path)
    dataset.load_state_dict({"version": 1, "delivered": 4, "rank": 0, "worker_id": 0})
    assert len(list(dataset)) == 2


def test_set_epoch_to_another_one_drops_a_loaded_position(volume):
    """The same epoch keeps it."""
    volume.write(6)
    dataset = UCVolumeDataset(volume.path)
    state = {"version": 1, "delivered": 4, "rank": 0, "worker_id": 0, "epoch": 2}
    dataset.load_state_dict(state)
    dataset.set_epoch(2)
    assert len(list(dataset)) == 2
    dataset.load_state_dict(state)
    dataset.set_epoch(3)
    assert dataset.state_dict()["delivered"] == 0
    assert len(list(dataset)) == 6


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"version": 2}, StateError, "version 2"),
        ({"version": True}, StateError, "version True"),
        ({"version": None}, StateError, "version None"),
        ({"delivered": -1}, StateError, "delivered=-1"),
        ({"delivered": "3"}, StateError, "delivered='3'"),
        ({"delivered": 7}, StateError, "7 files were delivered"),
        ({"epoch": -1}, StateError, "epoch=-1"),
        ({"rank": 1}, StateError, "rank 1, worker 0, and this is rank 0, worker 0"),
        ({"worker_id": 3}, StateError, "rank 0, worker 3"),
        ({"files": 7}, StateError, "files=7"),
        ({"grid": {"world_size": 2, "num_workers": 1}}, GridMismatchError, "world_size=2"),
        ({"order": {"seed": 8}}, StateError, "seed=8"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(volume, change, error, said):
    """The error is a ValueError with the values; the dataset starts as if nothing was loaded."""
    volume.write(6)
    dataset = UCVolumeDataset(volume.path)
    state = UCVolumeDataset(volume.path).state_dict() | {"delivered": 3} | change
    with pytest.raises(error) as caught:
        dataset.load_state_dict(state)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(list(dataset)) == 6
    with pytest.raises(StateError, match="A list was given"):
        dataset.load_state_dict([1])


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda volume: volume.write(8), "6 files then, 8 now: 2 added"),
        (lambda volume: (volume.directory / "part0/0000.txt").unlink(), "5 now: 1 removed"),
        (
            lambda volume: (volume.directory / "part0/0000.txt").rename(volume.directory / "other"),
            "as many files (6), but some were replaced by others or renamed",
        ),
    ],
)
def test_a_changed_list_is_refused_mid_epoch_and_taken_at_its_start(volume, alter, said):
    """The refusal says how many came or went, and what to do."""
    volume.write(6)
    dataset = UCVolumeDataset(volume.path)
    start = dataset.state_dict()
    take(dataset, 3)
    middle = dataset.state_dict()
    alter(volume)
    changed = UCVolumeDataset(volume.path)
    with pytest.raises(StateError, match=r"set_epoch\(1\)") as caught:
        changed.load_state_dict(middle)
    assert said in str(caught.value)
    changed.load_state_dict(start)
    assert len(list(changed)) == len(changed)


def test_map_keeps_state_and_composes(volume):
    """A mapped dataset is checkpointable, and maps again."""
    volume.write(6)
    mapped = UCVolumeDataset(volume.path, shuffle=True, seed=5).map(read).map(int)
    assert isinstance(mapped, Checkpointable)
    passing = iter(mapped)
    head = [next(passing) for _ in range(2)]
    again = UCVolumeDataset(volume.path, shuffle=True, seed=5).map(read).map(int)
    again.load_state_dict(mapped.state_dict())
    assert sorted(head + list(again)) == list(range(6))
    assert (mapped.seed, mapped.epoch, len(mapped), mapped.skipped) == (5, 0, 6, 0)
    assert mapped.slice_length(Grid(0, 2, 0, 1)) == 3
    assert mapped.file_list_state() == again.file_list_state()
    mapped.set_epoch(4)
    assert mapped.epoch == 4
    passing.close()
    with pytest.raises(InvalidArgumentError, match="map"):
        mapped.source.map("not a function")


def test_a_decoder_that_fails_names_the_file(volume):
    """The decoder's own error comes through, and which file it was is on record."""
    volume.write(6)
    volume.put("part1/0001.txt", b"truncated")
    dataset = UCVolumeDataset(volume.path).map(lambda path: int(read(path)))
    with pytest.raises(ValueError, match="trun") as caught:
        list(dataset)
    if hasattr(caught.value, "__notes__"):
        assert f"{volume.path}/part1/0001.txt" in caught.value.__notes__[0]


def test_the_failing_file_is_logged(volume, caplog):
    """On every Python version the log names it."""
    volume.put("bad.txt", b"truncated")
    with pytest.raises(ValueError, match="trun"):
        list(UCVolumeDataset(volume.path).map(lambda path: int(read(path))))
    assert f"{volume.path}/bad.txt" in caplog.text


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_skipping_puts_a_good_file_in_place_of_a_bad_one(volume, bad, caplog):
    """As many items come, none of them bad; it is counted and logged, and the same on resume."""
    names = volume.write(6, folders=1)
    volume.put(names[bad], b"truncated")

    def make():
        return UCVolumeDataset(volume.path, on_error="skip").map(lambda path: int(read(path)))

    dataset = make()
    whole = list(dataset)
    assert len(whole) == 6
    assert set(whole) == set(range(6)) - {bad}
    assert dataset.skipped == 1
    assert names[bad] in caplog.text
    for stop in range(6):
        first, second = make(), make()
        passing = iter(first)
        head = [next(passing) for _ in range(stop)]
        second.load_state_dict(first.state_dict())
        assert head + list(second) == whole
        passing.close()


@pytest.mark.parametrize("bad", [range(40), range(20, 60), range(60, 100)])
def test_a_long_run_of_bad_files_is_skipped_while_there_are_good_ones(volume, bad):
    """However many bad files follow one another, wherever they are, all items come."""
    names = volume.write(100, folders=1)
    for number in bad:
        volume.put(names[number], b"bad")

    def make():
        return UCVolumeDataset(volume.path, on_error="skip").map(lambda path: int(read(path)))

    whole = make()
    items = list(whole)
    assert len(items) == 100
    assert whole.skipped == len(bad)
    assert not set(items) & set(bad)
    resumed = make()
    resumed.load_state_dict({"version": 1, "delivered": bad[30], "rank": 0, "worker_id": 0})
    assert len(list(resumed)) == 100 - bad[30]


def test_one_good_file_is_enough_after_a_resume(volume):
    """Far behind, it is what was delivered last; a state keeps its place, checked."""
    names = volume.write(61, folders=1)
    for name in names[1:]:
        volume.put(name, b"bad")

    def make():
        return UCVolumeDataset(volume.path, on_error="skip").map(lambda path: int(read(path)))

    first, second = make(), make()
    passing = iter(first)
    head = [next(passing) for _ in range(40)]
    state = first.state_dict()
    second.load_state_dict(state)
    assert head + list(second) == [0] * 61
    with pytest.raises(StateError, match="good=61"):
        make().load_state_dict({**state, "good": 61})
    passing.close()


def test_skipping_ends_where_every_file_is_bad(volume):
    """A volume of bad files is an error, chained to the first one's, not an endless search."""
    volume.write(40)

    def refuse(path):
        raise OSError(f"cannot decode {path}")

    dataset = UCVolumeDataset(volume.path, on_error="skip").map(refuse)
    with pytest.raises(StorageError, match=r"nor can any of the \d+ other files") as caught:
        list(dataset)
    assert isinstance(caught.value.__cause__, OSError)


def test_files_that_vanish_or_change_after_listing_are_named(volume, tmp_path):
    """Each raises at its own place, with the path as users know it."""
    names = volume.write(6)
    write_manifest(volume.path, tmp_path / "manifest")
    dataset = UCVolumeDataset(volume.path)
    (volume.directory / names[4]).unlink()
    with pytest.raises(FileVanishedError, match=f"{volume.path}/{names[4]}"):
        take(dataset, 5)
    dataset = UCVolumeDataset(volume.path, manifest=tmp_path / "manifest")
    volume.put(names[2], b"short")
    with pytest.raises(FileChangedError, match=f"{volume.path}/{names[2]}.* 8 bytes and 5 came"):
        list(dataset)


def test_the_file_just_yielded_outlives_any_shortage(volume):
    """With no free disk at all, each path can be read until the next is asked for."""
    volume.write(30)
    disk = os.statvfs(tempfile.gettempdir())
    nothing_free = disk.f_blocks * disk.f_frsize - 1
    dataset = UCVolumeDataset(volume.path, min_free_bytes=nothing_free)
    assert sorted(read(path) for path in dataset) == numbers(30)
    assert sorted(read(path) for path in dataset) == numbers(30)


def test_a_shared_cache_serves_other_datasets_and_restarts(volume, tmp_path):
    """What one dataset downloaded is not downloaded by the next, of a file that is the same."""
    volume.write(6)
    list(UCVolumeDataset(volume.path, cache_dir=tmp_path / "cache"))
    gc.collect()
    second = UCVolumeDataset(volume.path, cache_dir=str(tmp_path / "cache"))
    for path in volume.directory.rglob("*.txt"):
        status = path.stat()
        path.write_bytes(b"x" * status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sorted(read(path) for path in second) == numbers(6)


def test_a_private_cache_goes_with_its_dataset_in_its_own_process(volume, tmp_path, monkeypatch):
    """A copy keeps it, a forked child does not remove it, and the last reference does."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    volume.write(3)
    dataset = UCVolumeDataset(volume.path)
    twin = copy.deepcopy(dataset)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    holder = [dataset]
    del dataset
    assert run_ranks(_drop, holder) == [0]
    holder.clear()
    gc.collect()
    assert sorted(read(path) for path in twin) == numbers(3)
    del twin
    gc.collect()
    assert list((tmp_path / "tmp").iterdir()) == []


def _drop(holder) -> None:
    holder.clear()
    gc.collect()


def open_files() -> set[tuple[str, str]]:
    """The numbers of open files, and what they are; what libraries keep open may go at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_nothing_runs_on_after_a_pass_ends_in_any_way(volume):
    """Exhausted, abandoned, or raised through: no thread and no open file is left."""
    volume.write(20)
    dataset = UCVolumeDataset(volume.path)
    descriptors, threads = open_files(), set(threading.enumerate())
    list(dataset)
    passing = iter(dataset)
    next(passing)
    passing.close()
    with pytest.raises(KeyError):
        list(dataset.map({}.__getitem__))
    passing = iter(UCVolumeDataset(volume.path))
    next(passing)
    del passing
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert open_files() <= descriptors


def test_an_object_store_streams_like_a_volume():
    """Any fsspec URL will do, with workers forked after the file system was opened."""
    from air_lightning.volumes.storage import open_storage

    storage = open_storage("memory://test-dataset/data")
    for number in range(6):
        storage.write_bytes(f"{number}/{number:04}.txt", f"{number:04}".encode())
    dataset = UCVolumeDataset("memory://test-dataset/data").map(read)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(loader) == numbers(6)
    storage.remove_tree()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": "yes"}, "shuffle='yes'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": None}, "seed=None"),
        ({"pattern": ""}, "pattern=''"),
        ({"pattern": 3}, "pattern=3"),
        ({"uneven": "cut"}, "'keep', 'pad', 'drop'"),
        ({"on_error": "ignore"}, "'raise', 'skip'"),
        ({"read_ahead": -1}, "read_ahead=-1"),
        ({"read_ahead": True}, "read_ahead=True"),
        ({"read_ahead": 1025}, "read_ahead=1025"),
        ({"pattern": "[z-a]"}, "pattern='[z-a]'"),
        ({"storage_options": [("anon", True)]}, "storage_options of type list"),
        ({"storage_options": {1: 2}}, "storage_options of type dict"),
        ({"min_free_bytes": -1}, "min_free_bytes=-1"),
        ({"cache_dir": ""}, "cache_dir=''"),
        ({"cache_dir": "s3://bucket"}, "cache_dir='s3://bucket'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(volume, options, said):
    """The error is a ValueError with what was given and what is wanted."""
    volume.write(1)
    with pytest.raises(InvalidArgumentError, match="wanted") as caught:
        UCVolumeDataset(volume.path, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("options", [{"min_free_bytes": -1}, {"pattern": "*.png"}])
def test_a_constructor_that_fails_leaves_no_cache(volume, tmp_path, monkeypatch, options):
    """Its directory is gone with the error, though the traceback still holds the dataset."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    volume.write(1)
    with pytest.raises(ValueError, match="wanted|matches") as caught:
        UCVolumeDataset(volume.path, **options)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert caught.value.__traceback__ is not None


def test_a_dataset_that_is_pickled_says_what_to_do_instead(volume):
    """The error names forked workers, also for a mapped dataset."""
    volume.write(1)
    dataset = UCVolumeDataset(volume.path)
    for one in (dataset, dataset.map(read)):
        with pytest.raises(TypeError, match="wanted are forked workers"):
            pickle.dumps(one)


def test_paths_that_cannot_work_are_refused_at_once(volume, tmp_path, monkeypatch):
    """No volume path, no file, no match, no mount: each at construction."""
    with pytest.raises(InvalidPathError, match="file://"):
        UCVolumeDataset(str(tmp_path))
    with pytest.raises(EmptyVolumeError, match=r"/Volumes/main/default/data.*pattern=None"):
        UCVolumeDataset(volume.path)
    volume.write(1)
    with pytest.raises(EmptyVolumeError, match=r"/Volumes/main/default/data.*'\*\.png'"):
        UCVolumeDataset(volume.path, pattern="*.png")
    with pytest.raises(InvalidArgumentError, match="epoch=-1"):
        UCVolumeDataset(volume.path).set_epoch(-1)
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path / "gone"))
    with pytest.raises(VolumeNotMountedError):
        UCVolumeDataset(volume.path)


def test_a_cache_in_the_listed_directory_is_refused(volume, tmp_path):
    """What is cached would be listed next; through a link too, but not below a dot-directory."""
    volume.write(2)
    (tmp_path / "link").symlink_to(volume.directory)
    for inside in (volume.directory, volume.directory / "part0" / "cache", tmp_path / "link" / "c"):
        for path in (volume.path, f"file://{volume.directory}"):
            with pytest.raises(InvalidArgumentError, match=r"cache_dir=.*own directory /.*|file:"):
                UCVolumeDataset(path, cache_dir=inside)
    assert not (volume.directory / "part0" / "cache").exists()
    for outside in (volume.directory / ".cache" / "x", tmp_path / "volumes" / "main"):
        assert len(list(UCVolumeDataset(volume.path, cache_dir=outside))) == 2
