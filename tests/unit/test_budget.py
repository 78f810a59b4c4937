"""The bytes of a stream that are ahead, also where sizes are told by the first look only."""

import threading

from air_lightning.data.ahead import ReadAhead
from air_lightning.data.budget import Budget
from air_lightning.data.cache import FileCache
from air_lightning.data.listing import take_listing
from air_lightning.volumes.storage import open_storage


def enters(budget, number, size):
    """Whether a file may enter now; it goes on to wait otherwise, in the thread returned."""
    entered = threading.Event()
    thread = threading.Thread(target=lambda: (budget.enter(number, size), entered.set()))
    thread.start()
    return entered.wait(0.1), thread


def test_a_file_enters_when_there_is_room_or_nothing_else():
    """One that leaves, or turns out to be smaller, makes room."""
    budget = Budget(100)
    assert budget.enter(0, 1000) == 1000
    entered, second = enters(budget, 1, 60)
    assert not entered
    budget.leave(0)
    second.join()
    entered, third = enters(budget, 2, 60)
    assert not entered
    budget.correct(1, 40)
    third.join()
    budget.close()


def test_few_files_enter_until_a_size_is_known():
    """Then the others are taken to be as large as that."""
    budget = Budget(100, patience_s=600)
    assert [budget.enter(number, None) for number in range(2)] == [0, 0]
    entered, third = enters(budget, 2, None)
    assert not entered
    budget.correct(0, 30)
    third.join()
    assert budget.enter(2, None) == 30
    assert budget.enter(3, None) == 30
    entered, fifth = enters(budget, 4, None)
    assert not entered
    budget.close()
    fifth.join()


class CountingStorage:
    """A storage that notes the most bytes downloaded at once; the first one waits for another."""

    def __init__(self, storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._bytes = 0
        self._overlap = threading.Event()
        self.most = 0

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        self._add(info.size)
        self._overlap.wait(60)
        try:
            return self._storage.download(info, destination)
        finally:
            self._add(-info.size)

    def _add(self, size):
        with self._lock:
            self._bytes += size
            if 0 < self.most < self._bytes:
                self._overlap.set()
            self.most = max(self.most, self._bytes)


def test_the_bytes_ahead_are_bounded_where_a_listing_tells_no_sizes(volume, tmp_path):
    """From the first file on: none of them is taken to be empty."""
    volume.write(40, size=100_000)
    storage = CountingStorage(open_storage(volume.path))
    (tmp_path / "cache").mkdir()
    cache = FileCache(storage, str(tmp_path / "cache"), 0)
    files = take_listing(storage, None)
    ahead = ReadAhead(cache, files, range(40), depth=30, max_bytes=250_000)
    for _ in range(40):
        ahead.take().close()
    ahead.close()
    assert 100_000 < storage.most <= 200_000
