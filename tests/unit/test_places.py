"""Where cached files lie: beside what is in use, never instead of it, and found again."""

import errno
import math
import os
from pathlib import Path

import pytest

from air_lightning.data.cache import FileCache
from air_lightning.data.eviction import Evictor
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.storage import open_storage


@pytest.fixture
def directory(tmp_path):
    """An empty cache directory."""
    path = tmp_path / "cache"
    path.mkdir()
    return path


@pytest.fixture
def cache(volume, directory):
    """A cache of the volume."""
    return FileCache(open_storage(volume.path), str(directory), 0)


def put(volume, name, data, mtime):
    path = volume.put(name, data)
    os.utime(path, (mtime, mtime))
    return FileInfo(name, len(data), float(mtime))


def text(lease):
    return Path(lease.path).read_text()


def evict(directory, count=1000, **options):
    evictor = Evictor(str(directory), 0)
    return sum(evictor.free_up(1, **options) for _ in range(count))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_path_in_use_keeps_its_version(volume, cache, ahead):
    """A newer one that another job fetches gets a place of its own, and is found there."""
    held = cache.fetch(put(volume, "x", b"one", 1_600_000_000), ahead=ahead)
    newer = put(volume, "x", b"newer", 1_700_000_000)
    other = cache.fetch(newer)
    assert (text(held), text(other)) == ("one", "newer")
    assert other.path.endswith("/x")
    (volume.directory / "x").unlink()
    again = cache.find(newer)
    assert again.path == other.path
    for lease in (held, other, again):
        lease.close()


def test_a_version_that_nobody_holds_is_replaced(volume, cache):
    """The newer one takes its place: no directory of its own."""
    cache.fetch(put(volume, "x", b"one", 1_600_000_000)).close()
    newer = put(volume, "x", b"newer", 1_700_000_000)
    lease = cache.fetch(newer)
    assert lease.path == cache.place(newer)
    lease.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_file_and_a_directory_of_one_name_are_both_cached(volume, cache, held):
    """As a volume that changed has them, one after the other, and back."""
    first = put(volume, "x", b"file", 1_600_000_000)
    old = cache.fetch(first)
    if not held:
        old.close()
    (volume.directory / "x").unlink()
    inner = put(volume, "x/inner", b"inner", 1_600_000_000)
    below = cache.fetch(inner)
    assert text(below) == "inner"
    if held:
        assert text(old) == "file"
        old.close()
    (volume.directory / "x/inner").unlink()
    (volume.directory / "x").rmdir()
    changed = put(volume, "x", b"again", 1_700_000_000)
    again = cache.fetch(changed)
    assert (text(again), text(below)) == ("again", "inner")
    for lease in (below, again):
        lease.close()


class KeyStorage:
    """A storage whose keys are not paths: each stands for a file of the real one."""

    def __init__(self, storage, keys) -> None:
        self._storage = storage
        self._keys = keys

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        return self._storage.download(info._replace(name=self._keys[info.name]), destination)


def test_an_object_store_may_have_a_key_below_a_key(volume, directory):
    """Both are cached, of one size and time as they are, and found again."""
    keys = {"a": "0", "a/b": "1", "c/d": "2", "c": "3"}
    for name in keys.values():
        put(volume, name, name.encode(), 1_600_000_000)
    cache = FileCache(KeyStorage(open_storage(volume.path), keys), str(directory), 0)
    for take in (cache.fetch, cache.find):
        leases = [take(FileInfo(key, 1, 1.6e9)) for key in keys]
        assert [text(lease) for lease in leases] == list(keys.values())
        for lease in leases:
            lease.close()


def test_an_empty_directory_that_eviction_left_is_no_hindrance(volume, cache):
    """A file takes its place."""
    info = put(volume, "x", b"file", 1_600_000_000)
    os.makedirs(cache.place(info))
    lease = cache.fetch(info)
    assert lease.path == cache.place(info)
    lease.close()


def test_an_evictor_deletes_what_it_locked_and_nothing_else(volume, cache, directory, monkeypatch):
    """A newer version that takes the place between the look and the lock stays."""
    from air_lightning.data import eviction

    cache.fetch(put(volume, "x", b"one", 1_600_000_000)).close()
    newer = put(volume, "x", b"newer", 1_700_000_000)
    held, flock = [], eviction.fcntl.flock

    def publish_first(descriptor, operation):
        if operation == eviction.fcntl.LOCK_EX | eviction.fcntl.LOCK_NB:
            monkeypatch.undo()
            held.append(cache.fetch(newer))
        return flock(descriptor, operation)

    evictor = Evictor(str(directory), 0)
    monkeypatch.setattr(eviction.fcntl, "flock", publish_first)
    evictor.free_up(1)
    assert text(held[0]) == "newer"
    held[0].close()


def test_what_is_read_ahead_goes_only_for_what_is_needed_at_once(volume, cache, directory):
    """Then the youngest first; what is in use stays, and use() tells what is gone."""
    infos = [put(volume, f"{number}", b"%d" % number, 1_600_000_000) for number in range(4)]
    leases = [cache.fetch(info, ahead=True) for info in infos]
    assert leases[1].use()
    assert evict(directory, ahead=True) == 0
    assert evict(directory, 1) == 1
    assert not os.path.exists(leases[3].path)
    assert not leases[3].use()
    assert evict(directory) == 2
    assert [lease.use() for lease in leases] == [False, True, False, False]
    for lease in leases:
        lease.close()
    assert evict(directory) == 1


def test_a_kernel_without_the_weaker_lock_holds_what_is_ahead(
    volume, cache, directory, monkeypatch
):
    """Nothing is lost there but the room that a file needed at once would take."""
    from air_lightning.data import leases

    def refuse(*arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(leases.fcntl, "fcntl", refuse)
    lease = cache.fetch(put(volume, "x", b"x", 1_600_000_000), ahead=True)
    assert evict(directory) == 0
    assert lease.use()
    lease.close()
    assert evict(directory) == 1


def test_a_child_does_not_end_what_its_parent_read_ahead(volume, cache, directory):
    """Nor does it keep it once the parent is done."""
    lease = cache.fetch(put(volume, "x", b"x", 1_600_000_000), ahead=True)
    pid = os.fork()
    if pid == 0:
        lease.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert evict(directory, ahead=True) == 0
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read_end, 1)
        os._exit(0)
    lease.close()
    assert evict(directory, ahead=True) == 1
    os.write(write_end, b"x")
    os.waitpid(pid, 0)
    os.close(read_end)
    os.close(write_end)


def test_reading_a_file_does_not_make_it_younger(volume, cache, directory):
    """Files go in the order of their downloads, however close together these were."""
    infos = [put(volume, f"{number}", b"x", 1_600_000_000) for number in range(6)]
    for info in infos:
        cache.fetch(info).close()
    for info in infos[:3]:
        Path(cache.place(info)).read_bytes()
    for info in infos:
        assert os.path.exists(cache.place(info))
        assert evict(directory, 1) == 1
        assert not os.path.exists(cache.place(info))


@pytest.mark.parametrize("mtime", [math.inf, -math.inf, math.nan, 1e30, -1e12, 1e11])
def test_a_time_that_cannot_be_stored_is_an_unknown_one(volume, directory, mtime):
    """The file is fetched, and found again."""

    class OddStorage:
        def __getattr__(self, name):
            return getattr(storage, name)

        def stat(self, name):
            return storage.stat(name)._replace(mtime=mtime)

    volume.put("x", b"data")
    storage = open_storage(volume.path)
    cache = FileCache(OddStorage(), str(directory), 0)
    info = cache.storage.stat("x")
    cache.fetch(info).close()
    lease = cache.find(info)
    assert text(lease) == "data"
    lease.close()


def test_a_newer_version_is_not_found_as_the_listed_one(volume, cache):
    """Where it has the listed size, a download takes it; its own time is kept with it."""
    listed = put(volume, "x", b"old!", 1_600_000_000)
    newer = put(volume, "x", b"new!", 1_700_000_000)
    lease = cache.fetch(listed)
    assert text(lease) == "new!"
    lease.close()
    assert cache.find(listed) is None
    found = cache.find(newer)
    assert text(found) == "new!"
    found.close()
