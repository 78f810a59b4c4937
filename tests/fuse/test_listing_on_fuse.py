"""Listing a real FUSE mount: what it is asked for, how often, and what happens when it hangs."""

import errno
import os
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from slow_mount import Mount, has_fuse, slow_mount

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from air_lightning.errors import FileVanishedError, StorageError
from air_lightning.volumes.storage import open_storage
from air_lightning.volumes.walk import Walk
from ranks import run_ranks

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not has_fuse() and not os.environ.get("AIR_REQUIRE_ALL"), reason="no FUSE on this machine"
    ),
]

FILES = 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty files in four directories."""
    for number in range(FILES):
        path = tmp_path / "source" / f"part{number % 4}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number:03}")
    return tmp_path / "source"


def asked(mount: Mount, operation: str) -> Counter[str]:
    """How often an operation was asked of each file."""
    return Counter(
        path for done, path in mount.calls() if done == operation and path.endswith(".txt")
    )


def test_listing_asks_no_file_for_anything(source):
    """Names and types are all that is asked for: each directory is read once, no file touched."""
    with slow_mount(source) as mount:
        files = open_storage(f"file://{mount}").list_files()
        read = Counter(path for operation, path in mount.calls() if operation == "readdir")
        assert asked(mount, "getattr") == {}
    assert read == Counter({"/": 1, "/part0": 1, "/part1": 1, "/part2": 1, "/part3": 1})
    assert len(files) == FILES


def test_where_the_mount_gives_no_types_they_are_asked_for_in_threads(tmp_path):
    """The list is the same, and it does not take one request after the other."""
    names = [f"{number:03}.txt" for number in range(400)]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    with slow_mount(tmp_path, types=False, entry_timeout_s=1000.0) as mount:
        # Names that are new to it the kernel looks up one after the other within a directory.
        for name in names:
            os.stat(f"{mount}/{name}")
        with mount.holding("getattr", until=6, name=".txt"):
            files = open_storage(f"file://{mount}").list_files()
    assert [info.name for info in files] == names


def test_links_and_types_are_as_on_disk_where_the_mount_gives_none(source):
    """An entry that is asked about is what it is; an error that passes costs a line in the log."""
    with slow_mount(source) as mount:
        wanted = list(open_storage(f"file://{mount}").list_files(sizes=True))
    with slow_mount(source, types=False) as mount:
        mount.fail("getattr", errno.EIO, name="part3", times=2)
        mount.fail("getattr", errno.EIO, name="010.txt", times=2)
        files = open_storage(f"file://{mount}").list_files(sizes=True)
        assert list(files) == wanted
        mount.fail("getattr", errno.EACCES, name="011.txt")
        with pytest.raises(StorageError, match=r"Could not stat .*part3/011\.txt.*permissions"):
            open_storage(f"file://{mount}").list_files()


def test_an_error_in_a_directory_ends_the_listing(source):
    """One that cannot be read is the error of the whole, at once."""
    with slow_mount(source) as mount:
        mount.fail("readdir", errno.EACCES, name="part2")
        with pytest.raises(StorageError, match="Could not list .*/part2.*Check the permissions"):
            open_storage(f"file://{mount}").list_files()


@pytest.mark.parametrize("read_ahead", [0, 4])
def test_a_cold_file_costs_one_stat_and_one_open(source, read_ahead):
    """The open uses what the kernel learned by the stat; a second epoch asks for nothing."""
    with slow_mount(source, attr_timeout_s=1000.0) as mount:
        dataset = UCVolumeDataset(f"file://{mount}", read_ahead=read_ahead)
        for _ in range(2):
            assert len(list(dataset)) == FILES
        once = {f"/part{number % 4}/{number:03}.txt": 1 for number in range(FILES)}
        assert asked(mount, "getattr") == once
        assert asked(mount, "open") == once


def test_sizes_are_asked_for_in_the_threads_that_read_ahead(source):
    """One that is not told keeps no other from being asked for."""
    with slow_mount(source, entry_timeout_s=1000.0) as mount:
        # Names that are new to it the kernel looks up one after the other within a directory.
        for path in source.glob("*/*"):
            os.stat(f"{mount}/{path.relative_to(source)}")
        dataset = UCVolumeDataset(f"file://{mount}", read_ahead=16, shuffle=True)
        with mount.holding("getattr", until=2, name=".txt"):
            assert len(list(dataset)) == FILES


def test_what_one_worker_learned_the_others_know(source):
    """With a loader's forked workers too, each file is asked for its size once in two epochs."""
    with slow_mount(source, attr_timeout_s=0.0) as mount:
        dataset = UCVolumeDataset(f"file://{mount}", shuffle=True)
        loader = DataLoader(dataset, batch_size=None, num_workers=3)
        assert len(list(loader)) == FILES
        first = asked(mount, "getattr")
        assert len(list(loader)) == FILES
        assert set(first) == {f"/part{number % 4}/{number:03}.txt" for number in range(FILES)}
        assert asked(mount, "getattr") == first
        del loader


def test_a_file_that_vanished_before_its_size_was_asked_for_is_named_or_replaced(source):
    """As one that vanishes before its download is."""
    with slow_mount(source) as mount:
        strict = UCVolumeDataset(f"file://{mount}")
        lenient = UCVolumeDataset(f"file://{mount}", on_error="skip")
        (source / "part1" / "001.txt").unlink()
        with pytest.raises(FileVanishedError, match=r"part1/001\.txt was listed and is no longer"):
            list(strict)
        assert len(list(lenient)) == FILES
        assert lenient.skipped == 1


def test_an_error_while_a_size_is_asked_for_is_retried(source, caplog):
    """EIO on a stat costs a line in the log; one that stays is an error of that file alone."""
    caplog.set_level("DEBUG", "air_lightning")
    with slow_mount(source) as mount:
        dataset = UCVolumeDataset(f"file://{mount}")
        mount.fail("getattr", errno.EIO, name="part2/006", times=2)
        assert len(list(dataset)) == FILES
        assert "part2/006.txt" in caplog.text
        refused = UCVolumeDataset(f"file://{mount}")
        mount.fail("getattr", errno.EACCES, name="part2/006")
        delivered = []
        with pytest.raises(StorageError, match=r"Could not stat .*part2/006\.txt.*permissions"):
            delivered.extend(map(os.path.basename, refused))
        assert len(delivered) == 21


def test_a_listing_that_hangs_ends_and_names_the_directory(source):
    """After the stated time without progress, while it still hangs; without a hang it is whole."""
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}")
        assert len(Walk(storage._call, storage.root).run(str(mount))) == FILES
        mount.hang("readdir")
        told = rf"no progress for 1 s; .* for file://{mount}"
        with pytest.raises(StorageError, match=told) as caught:
            Walk(storage._call, storage.root, stall_s=1.0).run(str(mount))
        assert caught.value.errno == errno.ETIMEDOUT
        mount.heal()


@pytest.mark.slow
def test_the_ranks_of_a_node_list_a_mount_once(source, tmp_path, monkeypatch):
    """Each directory is read once for four ranks; a second dataset of each is listed once more."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with slow_mount(source, list_delay_s=0.2) as mount:
        path = f"file://{mount}"
        for times in (1, 2):
            assert run_ranks(_construct, path, times, world_size=4) == [0] * 4
        read = Counter(path for operation, path in mount.calls() if operation == "readdir")
    assert set(read.values()) == {3}


def _construct(path: str, times: int) -> None:
    dist.init_process_group("gloo")
    states = [None] * 4
    for _ in range(times):
        dist.barrier()
        dist.all_gather_object(states, UCVolumeDataset(path).file_list_state())
        assert states == [states[0]] * 4
        assert states[0]["count"] == FILES
