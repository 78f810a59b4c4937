"""Counters of the data path: what workers did, as the training process sees it."""

import os
import shutil
import signal
import tempfile
import threading

import pytest
from torch.utils.data import IterableDataset

from air_lightning.data import counters
from air_lightning.data.counters import CACHE_HITS, Counters, count
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from ranks import kill_worker

FILES, SIZE = 20, 100
EVERYTHING = shutil.disk_usage(tempfile.gettempdir()).total - 1  # whatever may go, goes


@pytest.fixture
def files(volume, tmp_path):
    """A volume with files, and the options of a dataset whose cache no test shares."""
    volume.write(FILES, size=SIZE)
    return lambda **options: UCVolumeDataset(volume.path, **options)


def read(path):
    """The contents of a good file."""
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith(b"bad"):
        raise ValueError("bad")
    return data


class Wrapper(IterableDataset):
    """A dataset of a user's own, without a state."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for path in self.files:
            yield read(path)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: d.map(read), Wrapper])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cold_pass_downloads_and_a_warm_one_hits(files, wrap, workers):
    """Each file is downloaded once, in the first pass; every later pass finds all in the cache."""
    loader = DataLoader(wrap(files()), num_workers=workers, batch_size=2)
    assert set(loader.statistics()) == {"batches", "data_wait_s", *counters.NAMES}
    assert not any(loader.statistics().values())
    assert sum(len(batch) for batch in loader) == FILES
    cold = loader.statistics()
    assert cold.pop("download_s") > 0
    assert cold.pop("data_wait_s") > 0
    assert cold.pop("batches") == FILES // 2
    assert cold == {
        **dict.fromkeys(cold, 0),
        "files_downloaded": FILES,
        "bytes_downloaded": FILES * SIZE,
    }
    assert sum(len(batch) for batch in loader) == FILES
    warm = loader.statistics()
    assert (warm["files_downloaded"], warm["cache_hits"]) == (FILES, FILES)


def test_bad_files_of_workers_are_seen_in_the_training_process(files, volume):
    """``files_skipped`` counts what any worker replaced, over all passes."""
    for number in (3, 8, 9):
        volume.put(f"part{number % 3}/{number:04}.txt", b"bad".ljust(SIZE))
    loader = DataLoader(files(on_error="skip").map(read), num_workers=2)
    for skipped in (3, 6):
        assert len(list(loader)) == FILES
        assert loader.statistics()["files_skipped"] == skipped


@pytest.mark.parametrize("workers", [0, 1])
def test_evicted_files_are_counted(files, workers):
    """With less free disk than wanted each download evicts what came before."""
    loader = DataLoader(files(min_free_bytes=EVERYTHING, read_ahead=0), num_workers=workers)
    assert len(list(loader)) == FILES
    assert FILES - 3 <= loader.statistics()["evictions"] <= FILES


def test_a_killed_workers_counts_stay(files):
    """What a worker counted is there after it was killed, and new workers add to it."""
    loader = DataLoader(files(), num_workers=2, prefetch_factor=1)  # see kill_worker
    assert len(list(loader)) == FILES
    for worker in loader._iterator._workers:
        kill_worker(worker)
    assert loader.statistics()["files_downloaded"] == FILES
    assert len(list(loader)) == FILES
    assert loader.statistics()["cache_hits"] == FILES


def test_loaders_in_one_process_count_apart(files):
    """Two loaders without workers, in turn, have each its own counts, read-ahead included."""
    whole, some = files(), files(pattern="part0/*")
    loaders = [DataLoader(dataset, num_workers=0) for dataset in (whole, some)]
    for _ in zip(*loaders, strict=False):
        pass
    list(loaders[1])
    downloaded = [loader.statistics()["files_downloaded"] for loader in loaders]
    assert 8 <= downloaded[0] <= FILES
    assert downloaded[1] == 7


def test_a_dataset_without_a_loader_counts_for_its_process(files):
    """The totals of the process hold what it iterated over itself."""
    before = counters.rank_totals()
    assert len(list(files())) == FILES
    after = counters.rank_totals()
    assert after["files_downloaded"] - before["files_downloaded"] == FILES


def test_totals_of_the_process_keep_what_gone_loaders_counted(files):
    """A loader's counts are in the process's totals while it lives and after it is gone."""
    before = counters.rank_totals()["files_downloaded"]
    loader = DataLoader(files(), num_workers=1)
    assert len(list(loader)) == FILES
    assert counters.rank_totals()["files_downloaded"] - before == FILES
    del loader
    assert counters.rank_totals()["files_downloaded"] - before == FILES


def test_threads_lose_no_count():
    """Counts of many threads of a process add up."""
    rows = Counters(2)

    def work():
        with counters.counting_into(rows.row(1)):
            for _ in range(10_000):
                count(CACHE_HITS)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows.totals()["cache_hits"] == 80_000


def test_a_fork_neither_inherits_counts_nor_a_held_lock():
    """A child that was forked while another thread counted can count, from nothing."""
    count(CACHE_HITS)
    held, done = threading.Event(), threading.Event()

    def hold():
        with counters._lock:
            held.set()
            done.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(120)
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # nobody else would end it
        count(CACHE_HITS)
        os._exit(int(counters.rank_totals()["cache_hits"]))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done.set()
    holder.join()
    assert status == 1
