"""Little disk, few inodes, few descriptors: slower, but all files come, and none counts as bad."""

import errno
import os
import re
import resource
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from air_lightning import DataLoader, UCVolumeDataset
from air_lightning.data.ahead import ReadAhead
from air_lightning.data.cache import FileCache
from air_lightning.data.listing import take_listing
from air_lightning.errors import StorageError
from air_lightning.volumes.storage import open_storage
from amid import amid

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
MIB = 1 << 20


@pytest.fixture
def mount(tmp_path):
    """Mounts a disk of some size for one test."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
        return disk

    yield mount
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def bucket(tmp_path):
    """An object store of 24 files of 1 MiB, each made of its number."""
    storage = open_storage(f"memory://{tmp_path.name}")
    for number in range(24):
        storage.write_bytes(f"{number:02}", bytes([number]) * MIB)
    yield storage.root
    storage.remove_tree()


def first_byte(path):
    time.sleep(0.002)  # a step of training: what is read ahead fills the disk meanwhile
    return Path(path).read_bytes()[0]


@needs_root
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_files_ahead_that_find_no_room_come_when_they_are_needed(
    bucket, mount, on_error, num_workers
):
    """A disk that holds less than what is read ahead delivers every file once, none skipped."""
    cache = mount("size=10m") / "cache"
    dataset = UCVolumeDataset(bucket, cache_dir=cache, on_error=on_error).map(first_byte)
    loader = DataLoader(dataset, num_workers=num_workers, collate_fn=list)
    for _ in range(2):
        assert Counter(byte for batch in loader for byte in batch) == Counter(range(24))
    assert loader.statistics()["files_skipped"] == 0


@needs_root
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_private_cache_on_a_disk_that_is_too_small_delivers_every_file(
    bucket, mount, num_workers, monkeypatch
):
    """Whole, in each of three epochs: what one worker evicts is never what another one uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(mount("size=10m")))
    dataset = UCVolumeDataset(bucket).map(first_byte)
    loader = DataLoader(dataset, num_workers=num_workers, collate_fn=list)
    for _ in range(3):
        assert Counter(byte for batch in loader for byte in batch) == Counter(range(24))
    assert loader.statistics()["evictions"] > 24
    # Before the disk goes, with its workers.
    del loader, dataset


@needs_root
def test_the_free_share_is_not_for_files_that_are_read_ahead(bucket, mount, caplog):
    """They stop where it begins; that is said once. What is needed at once is fetched anyhow."""
    disk = mount("size=10m")
    storage = open_storage(bucket)
    cache = FileCache(storage, str(disk), 5 * MIB)
    ahead = ReadAhead(cache, take_listing(storage, None), range(24), depth=16)
    ahead.start()
    status = None
    for number in range(24):
        lease = ahead.take()
        assert first_byte(lease.path) == number
        status = os.statvfs(disk)
        lease.close()
    assert status.f_bavail * status.f_frsize >= 4 * MIB
    ahead.close()
    assert caplog.text.count("less free than is to be kept") == 1
    assert caplog.records[0].levelname == "WARNING"


@needs_root
def test_a_full_disk_is_no_bad_file(bucket, mount):
    """With on_error="skip", too, it ends the pass: skipping would lose every file that is good."""
    storage = open_storage(bucket)
    storage.write_bytes("00", b"h" * (11 * MIB))
    dataset = UCVolumeDataset(bucket, cache_dir=mount("size=10m") / "cache", on_error="skip")
    with pytest.raises(StorageError, match="is full") as caught:
        list(dataset)
    assert caught.value.errno == errno.ENOSPC
    assert dataset.skipped == 0


def test_a_decoder_that_finds_the_disk_full_has_no_bad_file(volume):
    """What it raises is raised."""
    volume.write(4)

    def decode(path):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/decoded")

    dataset = UCVolumeDataset(volume.path, on_error="skip").map(decode)
    with pytest.raises(OSError, match="No space left"):
        list(dataset)


@needs_root
def test_a_restart_finds_its_cache_disk_full(volume, mount):
    """Of files that may be evicted: nothing fails."""
    disk = mount("size=10m")
    for number in range(12):
        volume.put(f"{number:02}", bytes([number]) * MIB)
    options = {"cache_dir": disk / "cache", "min_free_bytes": 0}
    list(UCVolumeDataset(volume.path, **options))
    with open(disk / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(bytes(4096))
    restarted = UCVolumeDataset(volume.path, **options).map(first_byte)
    assert list(restarted) == list(range(12))


@needs_root
def test_a_disk_without_inodes_evicts(volume, mount):
    """Also where the first eviction finds none for a lock file."""
    disk = mount("size=10m,nr_inodes=12")
    for number in range(30):
        volume.put(f"{number:02}", bytes([number]))
    dataset = UCVolumeDataset(volume.path, cache_dir=disk / "cache").map(first_byte)
    assert list(dataset) == list(range(30))
    for path in (disk / "cache").glob(".*"):
        path.unlink()
    with pytest.raises(OSError, match="No space"):
        for number in range(12):
            (disk / f"other{number}").touch()
    assert list(dataset) == list(range(30))


@contextmanager
def descriptors(count):
    """At most so many open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_reading_ahead_takes_a_share_of_the_open_files_that_are_allowed(volume, caplog):
    """However deep it is asked for; the warning says what would help."""
    names = volume.write(400)
    with descriptors(len(os.listdir("/proc/self/fd")) + 160):  # whatever others have left open
        dataset = UCVolumeDataset(volume.path, read_ahead=1000)
        for _ in range(2):
            assert len([Path(path).read_bytes() for path in dataset]) == len(names)
    said = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
    assert len(said) == 1
    assert re.match(r"Reading ahead [34]\d files instead of 1000", said[0])


def test_too_many_open_files_end_reading_ahead_not_the_run(volume, tmp_path):
    """Other descriptors of the process leave room for a few: those that are ahead go first."""
    names = volume.write(60)
    dataset = UCVolumeDataset(volume.path, cache_dir=tmp_path / "cache", on_error="skip")
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    try:
        with descriptors(max(taken) + 25):
            for _ in range(2):
                assert len([Path(path).read_bytes() for path in dataset]) == len(names)
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert dataset.skipped == 0


@needs_root
def test_a_file_that_is_given_back_a_moment_later_makes_room(bucket, mount):
    """One look that finds everything in use is not the end: files are used for moments."""
    disk = mount("size=2500k")
    storage = open_storage(bucket)
    files = take_listing(storage, None)
    cache = FileCache(storage, str(disk), 0)
    held = [cache.fetch(files[number]) for number in range(2)]
    with amid(FileCache._is_worth_another_look, held[0].close):
        lease = cache.fetch(files[2])
    assert first_byte(lease.path) == 2
    lease.close()
    held[1].close()
