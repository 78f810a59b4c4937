"""Turns: of the downloads that wait, the one whose batch is needed first starts first."""

import contextlib
import functools
import os
import sys
import threading
import time

import pytest

from air_lightning.data.ahead import STALL_S, ReadAhead
from air_lightning.data.budget import Budget
from air_lightning.data.cache import FileCache
from air_lightning.data.leases import Lease
from air_lightning.data.listing import take_listing
from air_lightning.data.pool import Pool, Task
from air_lightning.data.turns import (
    ALWAYS,
    FIRST_BYTES,
    FIRST_SLOTS,
    MAX_BYTES,
    Turns,
    current_turn,
    take_part,
)
from air_lightning.errors import StorageError
from air_lightning.volumes.storage import open_storage
from ranks import run_ranks

LIMIT_S = 150  # ends a hang


def never() -> bool:
    return False


def starts_within(turn, batch, size=1, seconds=0.0) -> bool:
    """Whether a download gets its turn, or else gives up after so many seconds."""
    until = time.monotonic() + seconds
    gave_up = []

    def cancelled():
        if time.monotonic() >= until:
            gave_up.append(True)
        return bool(gave_up)

    turn.wait(batch, size, cancelled)
    return not gave_up


def until_it_waits(turns) -> None:
    """Wait until the first worker says that it waits for the first batch."""
    deadline = time.monotonic() + LIMIT_S
    while turns._rows[0, 0] != 0:
        assert time.monotonic() < deadline, "the first worker does not say that it waits"
        time.sleep(0.001)


def readers(before) -> list[threading.Thread]:
    """The threads of pools that were not there before."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if thread.name == "air-read-ahead"]


def test_batches_are_numbered_in_the_order_of_delivery():
    """Round robin, from the worker whose turn it is after a resume."""
    turns = Turns(3, 2)
    order = [turns.turn(worker, 1).batch(number) for worker in (1, 2, 0) for number in range(4)]
    assert order == [0, 0, 3, 3, 1, 1, 4, 4, 2, 2, 5, 5]


def test_a_free_slot_goes_to_the_batch_that_is_needed_first():
    """With all slots taken everyone waits; then the later batch lets the earlier one go first."""
    turns = Turns(2, 8)
    first, second = turns.turn(0, 0), turns.turn(1, 0)
    taken = [second.under_way(1) for _ in range(FIRST_SLOTS)]
    for download in taken:
        download.__enter__()
    assert not starts_within(first, 0)
    began = []
    wait = functools.partial(first.wait, 0, 1, never, patience_s=LIMIT_S)
    waiting = threading.Thread(target=lambda: (wait(), began.append(0)))
    waiting.start()
    until_it_waits(turns)
    assert not starts_within(second, 1)
    assert began == []
    taken.pop().__exit__(None, None, None)
    waiting.join()
    assert began == [0]
    for download in taken:
        download.__exit__(None, None, None)


def test_a_worker_that_learns_its_first_sizes_keeps_its_turn():
    """While a file of the first batch waits for a size, the last slot is not a later batch's."""
    turns = Turns(2, 8)
    first, second = turns.turn(0, 0), turns.turn(1, 0)
    budget = Budget(1 << 30)
    for number in (0, 1):  # as many as may start before any size is known
        budget.enter(number, None)
    taken = [second.under_way(1) for _ in range(FIRST_SLOTS - 1)]
    for download in taken:
        download.__enter__()
    assert starts_within(second, 1)
    pool, task, go_on = Pool(1, budget, first), Task(2, 0, None), threading.Event()
    # It has the slot until then, also where the machine was busy for longer than it is patient.
    task.action = lambda: Lease("none" if go_on.wait(LIMIT_S) else "late")
    pool.submit(task)
    until_it_waits(turns)
    assert not starts_within(second, 1)
    budget.correct(0, 1)
    go_on.set()
    assert task.future.result(LIMIT_S).path == "none"
    pool.close()
    for download in taken:
        download.__exit__(None, None, None)


def test_a_worker_whose_turn_has_not_come_has_one_thread():
    """However many files it is to read ahead; with a free slot all of them come."""
    turns = Turns(2, 8)
    first, second = turns.turn(0, 0), turns.turn(1, 0)
    with on_their_way(first, *[1] * FIRST_SLOTS):
        before = set(threading.enumerate())
        pool, tasks = Pool(16, Budget(1 << 30), second), [Task(n, 1, 1) for n in range(16)]
        for task in tasks:
            task.action = lambda: Lease("here")
            pool.submit(task)
        assert len(readers(before)) == 1
    assert {task.future.result(LIMIT_S).path for task in tasks} == {"here"}
    pool.close()


def test_threads_are_as_many_as_wait_at_the_same_time():
    """Each download that waits has one; those that come after them have the same threads."""
    here, go_on = threading.Barrier(9), threading.Event()

    def download():
        here.wait(LIMIT_S)
        go_on.wait(LIMIT_S)
        return Lease("here")

    before = set(threading.enumerate())
    pool, tasks = Pool(8), [Task(n, 0, 1) for n in range(12)]
    for task in tasks:
        task.action = download if task.number < 8 else lambda: Lease("here")
        pool.submit(task)
    here.wait(LIMIT_S)
    started = readers(before)
    assert len(started) == 8
    go_on.set()
    assert {task.future.result(LIMIT_S).path for task in tasks} == {"here"}
    assert readers(before | set(started)) == []
    pool.close()
    for thread in started:
        thread.join()


def held(turns, **options):
    """A thread that holds still as a worker does."""
    thread = threading.Thread(target=turns.hold, kwargs=options)
    thread.start()
    return thread


def test_other_workers_hold_still_until_the_first_batch_is_here_or_all_are_forked():
    """Or, where neither comes, until their patience ends."""
    waits = [Turns(2, 8), Turns(2, 8)]
    threads = [held(turns, patience_s=LIMIT_S) for turns in waits]
    download = waits[0].turn(0, 0).under_way
    for _ in range(7):
        with download(1):
            pass
    threads[0].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    with download(1):
        pass
    waits[1].begin()
    for thread in [*threads, held(Turns(2, 8), patience_s=0.01)]:
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()


def test_slots_grow_with_what_arrives():
    """A store that answers slowly, but many at a time, is asked for many."""
    turn = Turns(1, 8).turn(0, 0)
    for _ in range(10):
        with turn.under_way(1):
            pass
    taken = [turn.under_way(1) for _ in range(FIRST_SLOTS + 9)]
    for download in taken:
        download.__enter__()
    assert starts_within(turn, 0)
    with turn.under_way(1):
        assert not starts_within(turn, 0)
    for download in taken:
        download.__exit__(None, None, None)


@contextlib.contextmanager
def on_their_way(turn, *sizes):
    """Downloads of these sizes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(turn.under_way(size)) for size in sizes]


def test_large_files_take_turns_by_their_bytes():
    """What is not needed yet leaves room for what is."""
    turns = Turns(2, 8)
    first, second = turns.turn(0, 0), turns.turn(1, 0)
    with on_their_way(first, FIRST_BYTES - 10, *[0] * (ALWAYS - 1)):
        turns._rows[0, 0] = 0  # the first worker waits
        assert not starts_within(second, 1, 6)
        assert starts_within(second, 1, 5)
        with on_their_way(first, 10):
            assert not starts_within(first, 0, 1)
            turns._rows[0, 0] = 0
            assert not starts_within(second, 1, 1)


@pytest.mark.parametrize("workers", [2, 12])
def test_a_few_downloads_may_always_be_on_their_way(workers):
    """Eight, or one for each worker, however large: a store may limit the speed of each."""
    turns = Turns(workers, 8)
    turn = turns.turn(0, 0)
    with on_their_way(turn, *[MAX_BYTES] * (max(8, workers) - 1)):
        assert starts_within(turn, 0, MAX_BYTES)
        with turn.under_way(1):
            assert not starts_within(turn, 0, 1)


def test_the_bytes_on_their_way_grow_with_what_arrives():
    """Slower than what arrives, and up to a limit."""
    turn = Turns(1, 8).turn(0, 0)
    for arrived, limit in [(1600, FIRST_BYTES + 100), (100 * MAX_BYTES, MAX_BYTES)]:
        with turn.under_way(arrived):
            pass
        with on_their_way(turn, limit - 1, *[0] * ALWAYS):
            assert starts_within(turn, 0, 1)
            with turn.under_way(1):
                assert not starts_within(turn, 0, 1)


def test_a_size_that_is_learned_on_the_way_counts_from_then_on():
    """A listing that tells no sizes leaves no more on their way than one that does."""
    turn = Turns(1, 8).turn(0, 0)
    with on_their_way(turn, *[0] * ALWAYS) as corrections:
        assert starts_within(turn, 0, 1)
        corrections[0](FIRST_BYTES)
        assert not starts_within(turn, 0, 1)
        corrections[0](FIRST_BYTES - 1)
        assert starts_within(turn, 0, 1)
    assert turn._rows.sum(axis=0).tolist()[1:3] == [0, 0]


def test_a_dead_workers_row_holds_nobody_up_for_good():
    """A worker that was killed while it waited leaves others waiting for their patience only."""
    turns = Turns(2, 1)
    assert run_ranks(_wait_and_die, turns) == [-9]
    second = turns.turn(1, 0)
    assert not starts_within(second, 1)
    second.wait(1, 1, never, patience_s=0.05)  # ends: the test's timeout is the bound


def _wait_and_die(turns) -> None:
    first = turns.turn(0, 0)
    taken = [first.under_way(1) for _ in range(FIRST_SLOTS)]
    for download in taken:
        download.__enter__()
    first.wait(0, 1, lambda: os.kill(os.getpid(), 9))


def test_a_turn_is_a_fact_about_one_process():
    """A child of a worker is no worker."""
    turn = Turns(1, 1).turn(0, 0)
    take_part(turn)
    assert current_turn() is turn
    assert run_ranks(_has_no_turn) == [0]


def _has_no_turn() -> None:
    assert current_turn() is None


class StuckStorage:
    """A storage whose downloads of one file end when they are told to."""

    def __init__(self, storage, stuck, go_on) -> None:
        self._storage = storage
        self._stuck = stuck
        self._go_on = go_on

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        if info.name == self._stuck:
            self._go_on.wait(LIMIT_S)
        return self._storage.download(info, destination)


@pytest.mark.parametrize("depth", [0, 4])
def test_a_download_that_stands_still_is_an_error_at_its_own_file(volume, tmp_path, depth):
    """It names the file, the time and the remedy; the files after it come."""
    names = volume.write(4)
    go_on = threading.Event()
    storage = StuckStorage(open_storage(volume.path), names[1], go_on)
    files = take_listing(storage, None)
    (tmp_path / "cache").mkdir()
    cache = FileCache(storage, str(tmp_path / "cache"), 0)
    ahead = ReadAhead(cache, files, range(4), depth=depth)
    ahead.take().close()
    ahead._stall_s = 0.2  # for the one that hangs: any other may wait longer on a busy machine
    with pytest.raises(StorageError, match=rf"{names[1]}: no byte of it came for \d+ s. Check"):
        ahead.take()
    ahead._stall_s = STALL_S
    if depth:
        for _ in range(2):
            ahead.take().close()
    go_on.set()
    ahead.close()


class RereadingStorage:
    """A storage that has all of a file's bytes written, and writes one once more when asked to."""

    def __init__(self, storage) -> None:
        self._storage = storage
        self.asked, self.written = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def download(self, info, destination):
        size = self._storage.download(info, destination)
        with open(destination, "r+b", buffering=0) as file:
            for _ in range(8):
                assert self.asked.acquire(timeout=LIMIT_S)
                file.write(file.read(1))
                file.seek(0)
                self.written.release()
        return size


class WatchedCache(FileCache):
    """A cache where a byte comes before each look at a download's progress, eight times."""

    looks = 0

    def progress(self, info):
        self.looks += 1
        if self.looks <= 8:
            self.storage.asked.release()
            assert self.storage.written.acquire(timeout=LIMIT_S)
        else:  # on a busy machine it may take longer to end than a look is patient here
            self.ahead._stall_s = STALL_S
        return super().progress(info)


def test_bytes_that_are_read_once_more_are_no_standstill(volume, tmp_path):
    """They lie where bytes lay already, and still they came."""
    volume.write(1)
    storage = RereadingStorage(open_storage(volume.path))
    (tmp_path / "cache").mkdir()
    cache = WatchedCache(storage, str(tmp_path / "cache"), 0)
    ahead = ReadAhead(cache, take_listing(storage, None), range(1), depth=1, stall_s=0.3)
    cache.ahead = ahead
    ahead.take().close()
    assert cache.looks >= 8, "each of them 0.15 s after the last"
    ahead.close()


@contextlib.contextmanager
def calls():
    """The code of all functions that this thread calls."""
    called = set()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code))
    try:
        yield called
    finally:
        sys.setprofile(None)


def test_a_pass_whose_downloads_hang_is_closed_once(volume, tmp_path):
    """The threads are waited for by the first close() only, not again by the iterator's end."""
    names = volume.write(2)
    go_on = threading.Event()
    storage = StuckStorage(open_storage(volume.path), names[1], go_on)
    (tmp_path / "cache").mkdir()
    cache = FileCache(storage, str(tmp_path / "cache"), 0)
    ahead = ReadAhead(cache, take_listing(storage, None), range(2), depth=1)
    ahead.take().close()
    waits = threading.Thread.join.__code__
    with calls() as first:
        ahead.close()
    with calls() as second:
        ahead.close()
        del ahead
    go_on.set()
    assert waits in first
    assert waits not in second


def test_a_pass_that_was_begun_and_dropped_leaves_no_thread(volume, tmp_path):
    """iter() starts to download; the leak police sees that this ends with the iterator."""
    from air_lightning import UCVolumeDataset

    volume.write(40)
    before = set(threading.enumerate())
    iterator = iter(UCVolumeDataset(volume.path))
    started = readers(before)
    assert started
    del iterator
    for thread in started:
        thread.join()
