"""The cache: whole files, once per node, evicted oldest first, never one in use."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from air_lightning.data.ahead import ReadAhead
from air_lightning.data.cache import FileCache
from air_lightning.data.eviction import Evictor, free_bytes
from air_lightning.data.listing import take_listing
from air_lightning.data.scratch import private_directory, shared_directory
from air_lightning.errors import InvalidArgumentError, StorageError
from air_lightning.volumes.storage import open_storage
from ranks import run_ranks

# More free disk than there is: whatever may go, goes.
EVERYTHING = shutil.disk_usage(tempfile.gettempdir()).total - 1


@pytest.fixture
def files(volume):
    """Eight listed files."""
    volume.write(8, size=1000)
    return take_listing(open_storage(volume.path), None, sizes=True)


@pytest.fixture
def directory(tmp_path):
    """An empty cache directory."""
    path = tmp_path / "cache"
    path.mkdir()
    return path


def cache_of(volume, directory, min_free=0):
    return FileCache(open_storage(volume.path), str(directory), min_free)


def cached(directory: Path) -> list[str]:
    return sorted(
        path.name for path in directory.rglob("*") if path.is_file() and path.name[0] != "."
    )


def test_a_file_is_fetched_once_and_keeps_its_relative_path(volume, files, directory):
    """The second fetch needs no volume, and labels can be read off the path."""
    cache = cache_of(volume, directory)
    cache.fetch(files[0]).close()
    (volume.directory / files[0].name).unlink()
    lease = cache.fetch(files[0])
    assert lease.path.endswith(f"/{files[0].name}")
    assert Path(lease.path).read_bytes().startswith(b"0000")
    lease.close()


def test_an_altered_file_is_another_file(volume, files, directory):
    """A new time or size makes a new download; the old bytes do not come back."""
    cache = cache_of(volume, directory)
    cache.fetch(files[0]).close()
    volume.put(files[0].name, b"new")
    lease = cache.fetch(take_listing(open_storage(volume.path), None, sizes=True)[0])
    assert Path(lease.path).read_bytes() == b"new"
    lease.close()


def test_a_torn_file_in_the_cache_is_downloaded_again(volume, files, directory):
    """What a power cut shortened is not taken for whole."""
    cache = cache_of(volume, directory)
    lease = cache.fetch(files[0])
    lease.close()
    os.truncate(lease.path, 10)
    again = cache.fetch(files[0])
    assert os.stat(again.path).st_size == 1000
    again.close()


def test_a_failed_download_leaves_nothing(volume, files, directory):
    """Neither a part nor a file stays of a download whose size is wrong."""
    volume.put(files[0].name, b"short")
    with pytest.raises(StorageError, match="listed with 1000 bytes and 5 came"):
        cache_of(volume, directory).fetch(files[0])
    assert cached(directory) == []


def test_many_processes_download_each_file_once(volume, files, directory):
    """Six processes fetch all files at once; the log of downloads has each file once."""
    volume_log = directory.parent / "downloads"
    statuses = run_ranks(_fetch_all, volume, directory, volume_log, world_size=6)
    assert statuses == [0] * 6
    downloads = Counter(volume_log.read_text().split())
    assert downloads == {files[i].name: 1 for i in range(len(files))}


class LoggingStorage:
    """A storage that notes each download in a file; everything else is the real one's."""

    def __init__(self, storage, log) -> None:
        self._storage = storage
        self._log = log

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        with open(self._log, "a") as log:
            log.write(f"{info.name}\n")
        return self._storage.download(info, destination)


def _fetch_all(volume, directory, log) -> None:
    storage = LoggingStorage(open_storage(volume.path), log)
    cache = FileCache(storage, str(directory), 0)
    files = take_listing(storage, None, sizes=True)
    for index in range(len(files)):
        lease = cache.fetch(files[index])
        assert os.stat(lease.path).st_size == 1000
        lease.close()


def test_a_waiting_fetch_gets_the_file_while_another_still_uses_it(volume, files, directory):
    """A download under way is waited for, its use is not: else a thread could wait for itself."""
    began, go_on = threading.Event(), threading.Event()
    storage = SlowStorage(open_storage(volume.path), began, go_on)
    cache = FileCache(storage, str(directory), 0)
    leases = []
    first = threading.Thread(target=lambda: leases.append(cache.fetch(files[0])))
    second = threading.Thread(target=lambda: leases.append(cache.fetch(files[0])))
    first.start()
    assert began.wait(120)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert [lease.path for lease in leases] == [cache.place(files[0])] * 2
    for lease in leases:
        lease.close()


class SlowStorage:
    """A storage whose downloads begin when they are told to; the rest is the real one's."""

    def __init__(self, storage, began, go_on) -> None:
        self._storage = storage
        self._began = began
        self._go_on = go_on

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        self._began.set()
        self._go_on.wait(120)
        return self._storage.download(info, destination)


def test_eviction_takes_the_least_recently_downloaded_first(volume, files, directory):
    """In the order of downloads, not of names or use; unfinished downloads go before all."""
    cache = cache_of(volume, directory)
    for index in (3, 1, 2, 0):
        cache.fetch(files[index]).close()
    cache.fetch(files[3]).close()
    part = directory / ("0" * 24 + ".part")
    part.write_bytes(b"left by a killed process")
    evictor = Evictor(str(directory), 0)
    order = [set(cached(directory))]
    while evictor.free_up(1):
        order.append(set(cached(directory)))
    gone = [(before - after).pop() for before, after in itertools.pairwise(order)]
    assert gone == [part.name, *(Path(files[i].name).name for i in (3, 1, 2, 0))]
    assert [path for path in directory.iterdir() if path.name[0] != "."] == []


def test_a_file_in_use_is_never_evicted(volume, files, directory):
    """A lease protects its file, also in another process; a closed one does not."""
    cache = cache_of(volume, directory, EVERYTHING)
    held = cache.fetch(files[0])
    for index in range(1, 8):
        cache.fetch(files[index]).close()
    assert run_ranks(_evict_all, directory) == [0]
    assert cached(directory) == [Path(held.path).name]
    held.close()
    assert run_ranks(_evict_all, directory) == [0]
    assert cached(directory) == []


def _evict_all(directory) -> None:
    evictor = Evictor(str(directory), 0)
    while evictor.free_up(1):
        pass


def test_a_forked_child_neither_frees_nor_keeps_its_parents_files(volume, files, directory):
    """A child's close leaves the parent's lock; the parent's close ends it, child or not."""
    cache = cache_of(volume, directory)
    lease = cache.fetch(files[0])
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        lease.close()
        os.write(write_end, b"closed")
        os._exit(0)
    os.read(read_end, 6)
    os.waitpid(pid, 0)
    assert not Evictor(str(directory), 0).free_up(1)
    stop_read, stop_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(stop_read, 1)
        os._exit(0)
    lease.close()
    assert Evictor(str(directory), 0).free_up(1)
    os.write(stop_write, b"x")
    os.waitpid(pid, 0)
    for descriptor in (read_end, write_end, stop_read, stop_write):
        os.close(descriptor)


def test_what_is_not_ours_stays(directory):
    """A shared directory may hold other things; eviction leaves them alone."""
    (directory / "notes.txt").write_text("mine")
    (directory / "models").mkdir()
    (directory / "models" / "a.part").write_text("mine")
    assert not Evictor(str(directory), 0).free_up(1)
    assert cached(directory) == ["a.part", "notes.txt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_evicts_and_at_last_reads_from_the_volume(volume, tmp_path, caplog):
    """Files that fit push out older ones; one that never fits is read where it lies."""
    for number in range(5):
        volume.put(f"{number}", bytes([number]) * 400_000)
    volume.put("huge", b"h" * (2 << 20))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        files = take_listing(open_storage(volume.path), None, sizes=True)
        cache = cache_of(volume, disk)
        held = cache.fetch(files[0])
        for index in range(5):
            lease = cache.fetch(files[index])
            assert lease.path.startswith(str(disk))
            assert Path(lease.path).read_bytes() == bytes([index]) * 400_000
            lease.close()
        before = cached(disk)
        for _ in range(3):
            huge = cache.fetch(files[5])
            assert huge.path == str(volume.directory / "huge")
        assert cached(disk) == before
        assert caplog.text.count(f"has no room for {volume.path}/huge (2097152 bytes)") == 1
        assert Path(held.path).read_bytes() == bytes(400_000)
        huge.close()
        held.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_an_error_where_there_is_no_volume_to_read(tmp_path):
    """A file of an object store that fits nowhere ends in an error that says what to do."""
    storage = open_storage(f"memory://{tmp_path.name}")
    storage.write_bytes("huge", b"h" * (2 << 20))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        cache = FileCache(storage, str(disk), 0)
        with pytest.raises(StorageError, match=r"is full.*huge needs 2097152 bytes") as caught:
            cache.fetch(storage.stat("huge"))
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
        storage.remove_tree()


def test_the_free_share_comes_from_argument_environment_or_disk(directory, monkeypatch):
    """The argument rules, then the variable, then a tenth; what is no number is refused."""
    monkeypatch.delenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", raising=False)
    status = os.statvfs(directory)
    tenth = int(status.f_blocks * status.f_frsize * 0.1)
    assert Evictor(str(directory)).min_free_bytes == tenth
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", "123")
    assert Evictor(str(directory)).min_free_bytes == 123
    assert Evictor(str(directory), 5).min_free_bytes == 5
    assert free_bytes(str(directory)) > 0
    for number in (-1, 1.5, True, "1"):
        with pytest.raises(InvalidArgumentError, match="min_free_bytes="):
            Evictor(str(directory), number)
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", "10GB")
    with pytest.raises(InvalidArgumentError, match="SGC_FSLAYER_MIN_FREE_DISK_BYTES='10GB'"):
        Evictor(str(directory))


def test_more_free_disk_than_the_disk_has_is_refused(directory, monkeypatch):
    """Nothing could ever be cached: the error names what was asked for and what there is."""
    total = shutil.disk_usage(directory).total
    for asked in (total, 1 << 62):
        with pytest.raises(InvalidArgumentError, match=f"min_free_bytes={asked} .* {total} bytes"):
            Evictor(str(directory), asked)
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", str(total))
    with pytest.raises(InvalidArgumentError, match=f"_BYTES='{total}' .* {total} bytes in all"):
        Evictor(str(directory))


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch):
    """Its private cache goes with the next one made; one that is in use stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine, remove = private_directory()
    assert run_ranks(_make_private_and_be_killed) == [-9]
    assert len(list(tmp_path.iterdir())) == 2
    other, remove_other = private_directory()
    assert {str(path) for path in tmp_path.iterdir()} == {mine, other}
    remove()
    remove_other()
    assert list(tmp_path.iterdir()) == []


def _make_private_and_be_killed() -> None:
    private_directory()
    os.kill(os.getpid(), 9)


_BREAKS_OFF = """
import sys
from air_lightning import DataLoader, UCVolumeDataset
dataset = UCVolumeDataset(sys.argv[1])
for number, batch in enumerate(DataLoader(dataset, num_workers=int(sys.argv[2]), batch_size=4)):
    if number == 2:
        break
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_ends_in_the_middle_of_a_pass_leaves_no_cache(volume, tmp_path, num_workers):
    """Workers and threads that still download at exit neither keep nor refill the cache."""
    volume.write(300, size=200_000)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", _BREAKS_OFF, volume.path, str(num_workers)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert list((tmp_path / "tmp").glob("air-lightning-cache-*")) == []


def test_a_late_writer_cannot_bring_a_removed_cache_back(volume, files, tmp_path, monkeypatch):
    """A download that ends after the removal fails, and makes no directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    directory, remove = private_directory()
    began, go_on = threading.Event(), threading.Event()
    cache = FileCache(SlowStorage(open_storage(volume.path), began, go_on), directory, 0)
    caught = []

    def fetch():
        try:
            cache.fetch(files[0])
        except OSError as error:
            caught.append(error)

    late = threading.Thread(target=fetch)
    late.start()
    assert began.wait(120)
    remove()
    go_on.set()
    late.join()
    assert len(caught) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_cache_without_an_owner_is_removed_once_it_is_old(tmp_path, monkeypatch):
    """One that is a minute old is nobody's; a younger one may be about to get its owner."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age in (("old", 120), ("young", 0)):
        left = tmp_path / f"air-lightning-cache-{name}"
        (left / "key").mkdir(parents=True)
        (left / "key" / "x.txt").write_text("x")
        when = left.stat().st_mtime - age
        os.utime(left, (when, when))
    mine, remove = private_directory()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("air-lightning-cache-young", Path(mine).name)
    }
    remove()


def test_a_shared_directory_that_was_removed_is_made_again(volume, files, directory):
    """The next file that is fetched lies in it."""
    cache = FileCache(open_storage(volume.path), str(directory), 0, remake=True)
    cache.fetch(files[0]).close()
    shutil.rmtree(directory)
    lease = cache.fetch(files[1])
    assert Path(lease.path).read_bytes().startswith(b"0003")
    lease.close()


@pytest.mark.parametrize("remake", [False, True])
def test_a_directory_that_is_removed_during_a_download_is_not_taken_for_a_vanished_file(
    volume, files, directory, remake
):
    """A shared one is made again once; a private one stays removed, and the error says so."""

    class RemovingStorage(LoggingStorage):
        def download(self, info, destination):
            shutil.rmtree(directory)
            return self._storage.download(info, destination)

    storage = RemovingStorage(open_storage(volume.path), None)
    with pytest.raises(StorageError, match=r"was removed while it was in use.*cache_dir="):
        FileCache(storage, str(directory), 0, remake=remake).fetch(files[0])
    assert not directory.exists()


@pytest.mark.parametrize("given", ["", "s3://b/k", "x\0y", 7, b"/x"])
def test_a_cache_dir_that_is_no_local_path_is_refused(given):
    """The error gives it and what is wanted."""
    with pytest.raises(InvalidArgumentError, match="cache_dir=.*own disk"):
        shared_directory(given)


def test_a_cache_dir_that_cannot_be_used_is_refused_at_once(volume, tmp_path):
    """On a volume, below a file, or where nothing can be made: before any epoch begins."""
    with pytest.raises(InvalidArgumentError, match="lies on a volume"):
        shared_directory("/Volumes/a/b/c/cache")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot hold a cache"):
        shared_directory(tmp_path / "file" / "cache")
    with pytest.raises(StorageError, match="cannot hold a cache"):
        shared_directory("/proc/cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_cache_dir_is_refused_at_once(tmp_path):
    """A directory that exists and can be read is not enough."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(StorageError, match="cannot hold a cache.*Read-only"):
            shared_directory(disk)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def close(ahead: ReadAhead) -> None:
    """Close it, and wait until all its downloads have ended: it waits for a few seconds itself."""
    ahead.close()
    for thread in threading.enumerate():
        if thread.name == "air-read-ahead":
            thread.join()


def test_read_ahead_is_bounded_in_files_and_in_bytes(volume, files, directory):
    """With one file taken, no more than depth files, or the bytes allowed, are on their way."""
    for depth, max_bytes, expected in [(3, 1 << 30, 4), (8, 2500, 3), (0, 1 << 30, 1)]:
        cache = cache_of(volume, directory)
        ahead = ReadAhead(cache, files, range(8), depth=depth, max_bytes=max_bytes)
        ahead.take().close()
        close(ahead)
        assert len(cached(directory)) <= expected
        _evict_all(directory)


class CrowdedStorage(SlowStorage):
    """A storage whose downloads wait, and that tells when 64 of them do, and when more do."""

    def __init__(self, storage) -> None:
        super().__init__(storage, threading.Event(), threading.Event())
        self._lock = threading.Lock()
        self._count = 0
        self.go_on = self._go_on
        self.crowded, self.overcrowded = threading.Event(), threading.Event()

    def download(self, info, destination):
        with self._lock:
            self._count += 1
            if self._count == 64:
                self.crowded.set()
            elif self._count > 64:
                self.overcrowded.set()
        try:
            return super().download(info, destination)
        finally:
            with self._lock:
                self._count -= 1


def test_a_deep_read_ahead_takes_a_bounded_number_of_threads(volume, directory):
    """A depth of a thousand files starts 64 threads a stream at most, and delivers every file."""
    names = volume.write(200)
    storage = CrowdedStorage(open_storage(volume.path))
    cache = FileCache(storage, str(directory), 0)
    ahead = ReadAhead(cache, take_listing(storage, None), range(200), depth=1024)
    try:
        ahead.start()
        assert storage.crowded.wait(120)
        assert not storage.overcrowded.wait(0.2)
        storage.go_on.set()
        for name in names:
            lease = ahead.take()
            assert lease.path.endswith(name)
            lease.close()
        assert not storage.overcrowded.is_set()
    finally:
        storage.go_on.set()
        ahead.close()


def test_errors_come_at_their_own_file_and_the_next_goes_on(volume, files, directory):
    """The files around a missing one are delivered, in order."""
    (volume.directory / files[2].name).unlink()
    ahead = ReadAhead(cache_of(volume, directory), files, range(8), depth=4)
    for index in range(8):
        if index == 2:
            with pytest.raises(StorageError, match="no longer there"):
                ahead.take()
        else:
            lease = ahead.take()
            assert lease.path.endswith(files[index].name)
            lease.close()
    ahead.close()


def test_closing_early_lets_go_of_what_was_read_ahead(volume, files, directory):
    """After close() every file can be evicted, whether it had been taken or not."""
    cache = cache_of(volume, directory)
    ahead = ReadAhead(cache, files, range(8), depth=7)
    ahead.take().close()
    close(ahead)
    _evict_all(directory)
    assert cached(directory) == []
