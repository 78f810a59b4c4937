"""A note in shared memory keeps a file as a lock does, until evictions begin; then locks do."""

import itertools
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from air_lightning import DataLoader, UCVolumeDataset
from air_lightning.data.ahead import ReadAhead
from air_lightning.data.cache import FileCache
from air_lightning.data.listing import take_listing
from air_lightning.data.notes import _ROWS
from air_lightning.volumes.storage import open_storage

FILES = 6


@pytest.fixture
def files(volume):
    """The list of a volume of some files."""
    volume.write(FILES)
    return take_listing(open_storage(volume.path), None)


@pytest.fixture
def cache(volume, files, tmp_path):
    """A private cache that has them all."""
    (tmp_path / "cache").mkdir()
    cache = FileCache(open_storage(volume.path), str(tmp_path / "cache"), 0)
    cache.note(files)
    for index in range(FILES):
        cache.fetch(files.complete(index, cache.storage)).close()
    return cache


def seen_by(row):
    for index in range(FILES):
        row.saw(index)
    return row


def in_child(action):
    """What a forked child makes of it, as an exit status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def evict_all(cache):
    """Evict what may go; how many files went."""
    freed = 0
    while cache._evictor.free_up(1):
        freed += 1
    return freed


def test_an_evictor_in_another_process_spares_what_is_noted(cache):
    """All other files go, and the noted one when its stream is done with it."""
    row = seen_by(cache.row())
    lease = row.lease(2)
    assert in_child(lambda: evict_all(cache)) == FILES - 1
    assert os.path.exists(lease.path)
    lease.close()
    assert evict_all(cache) == 1


def test_files_are_locked_once_evictions_have_begun(cache):
    """In every process: no stream trusts its notes any more, nor does a new one take any."""
    row, other = seen_by(cache.row()), cache.row()
    assert row.knows(1)
    spared = other.lease(1)
    in_child(lambda: evict_all(cache))
    assert not row.knows(1)
    assert os.path.exists(spared.path)
    assert row.lease(1) is None, "there, but not to be trusted to a note any more"
    assert cache.row() is None


def test_each_stream_of_all_processes_has_a_row_of_its_own(cache):
    """None is given twice, a freed one again, and when all are taken, files are locked."""
    own = cache.row()
    assert in_child(lambda: cache.row()._number) == own._number + 1
    next_one = cache.row()
    assert next_one._number == own._number + 2, "a killed child keeps its row"
    next_one.free()
    assert cache.row()._number == next_one._number
    for _ in range(own._number + 3, _ROWS):
        assert cache.row() is not None
    assert cache.row() is None


def test_a_child_that_ends_keeps_its_parents_note(cache):
    """It closes a copy."""
    row = seen_by(cache.row())
    lease = row.lease(1)

    def close_copy():
        lease.close()
        row.free()
        return 0

    assert in_child(close_copy) == 0
    assert evict_all(cache) == FILES - 1
    assert os.path.exists(lease.path)


def test_a_file_that_others_removed_is_not_leased(cache):
    """Its note is withdrawn, and it must be looked for."""
    row = seen_by(cache.row())
    os.unlink(row.lease(3).path)
    assert row.lease(3) is None
    assert not row.knows(3)


@given(
    here=st.sets(st.integers(0, FILES - 1)),
    asked=st.lists(st.integers(0, FILES - 1)),
    evicting=st.booleans(),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_what_is_known_from_the_first_on_is_what_is_known_of_each(cache, here, asked, evicting):
    """As many as would be found one by one, before the first that is not; none once one evicts."""
    row = cache.row()
    row._notes.evicting[0] = evicting
    for index in range(FILES):
        row._notes.present[index] = index in here
    one_by_one = list(itertools.takewhile(row.knows, asked))
    assert row.known(np.array(asked, dtype=np.int64)) == len(one_by_one)
    row._notes.evicting[0] = False
    row.free()


def test_a_file_that_is_missing_among_noted_ones_is_read_ahead(cache, files):
    """Before its turn, by as many files as are read ahead elsewhere."""
    row = seen_by(cache.row())
    os.unlink(row.lease(FILES - 1).path)
    assert row.lease(FILES - 1) is None
    row.free()
    ahead = ReadAhead(cache, files, range(FILES), depth=2)
    ahead.start()
    for index in range(FILES - 2):
        assert ahead.take().path == cache.place(files[index])
    ahead._ahead[-1].task.future.result(timeout=150)
    assert os.path.exists(cache.place(files[FILES - 1]))
    ahead.close()


def test_evictions_that_begin_in_the_middle_of_noted_files_lose_none(cache, files):
    """The others are looked for from then on, and come in order, whole and locked."""
    seen_by(cache.row()).free()
    ahead = ReadAhead(cache, files, range(FILES), depth=2)
    ahead.start()
    assert ahead.take().path == cache.place(files[0])
    assert in_child(lambda: evict_all(cache)) == FILES - 1
    for index in range(1, FILES):
        lease = ahead.take()
        assert Path(lease.path).read_text() == Path(files[index].name).stem.ljust(8, ".")
        while cache._evictor.free_up(1):
            assert os.path.exists(lease.path)
        lease.close()
    ahead.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_that_a_cleaner_took_out_of_the_cache_come_again(
    volume, tmp_path, monkeypatch, num_workers
):
    """In the third epoch too, when nothing is looked for any more."""
    volume.write(12)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loader = DataLoader(
        UCVolumeDataset(volume.path).map(lambda path: Path(path).read_text()),
        num_workers=num_workers,
        collate_fn=list,
    )
    epochs = []
    for _ in range(4):
        epochs.append(Counter(int(text[:4]) for batch in loader for text in batch))
        for cached in sorted(tmp_path.glob("air-lightning-cache-*/**/*.txt"))[::2]:
            cached.unlink()
    assert epochs == [Counter(range(12))] * 4
    del loader
