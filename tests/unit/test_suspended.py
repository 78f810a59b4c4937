"""A switch of the process is off while anyone wants it so, and then as it was."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from air_lightning.checkpoint.dcp import UCVolumeWriter
from air_lightning.checkpoint.envelope import _envelope, envelope
from air_lightning.checkpoint.planner import save
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.state import to_entries
from air_lightning.checkpoint.suspended import no_collections, no_zip_checksums
from ranks import run_ranks


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector is on, and on again afterwards."""
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_the_last_user_puts_it_back(before: bool) -> None:
    """With two threads inside, the first to leave changes nothing, the last restores."""
    if not before:
        gc.disable()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collections():
            inside.set()
            leave.wait(150)

    thread = threading.Thread(target=other)
    with no_collections():
        thread.start()
        assert inside.wait(150)
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled() is before


@pytest.mark.parametrize("mine_first", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_checksums_are_off_in_every_thread_that_wants_it(before: bool, mine_first: bool) -> None:
    """Whoever leaves first: off for both while inside, and for each as it was before."""
    get, put = torch.serialization.get_crc32_options, torch.serialization.set_crc32_options
    inside, leave, seen, was = threading.Event(), threading.Event(), [], get()

    def other() -> None:
        seen.append(get())
        with no_zip_checksums():
            seen.append(get())
            inside.set()
            leave.wait(150)
            seen.append(get())
        seen.append(get())

    thread = threading.Thread(target=other)
    put(before)
    try:
        with no_zip_checksums():
            thread.start()
            assert inside.wait(150)
            assert get() is False
            if not mine_first:
                leave.set()
                thread.join()
            assert get() is False
        leave.set()
        thread.join()
        assert get() is before
    finally:
        put(was)
    assert seen[1:3] == [False, False]
    # Some versions of torch have one option for all threads: off as long as anyone is inside.
    is_own = seen[0]
    assert seen[3] is (True if is_own else before and mine_first)


def test_an_envelope_is_the_same_whatever_other_threads_make() -> None:
    """Made in two threads at once, what surrounds a tensor has no checksum in either."""
    started = threading.Barrier(2)
    made: list[set[Any]] = []

    def make() -> None:
        started.wait(150)
        made.append({envelope(torch.int16, (3, 1000 + size)) for size in range(200)})

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _envelope.cache_clear()
    assert made == [{envelope(torch.int16, (3, 1000 + size)) for size in range(200)}] * 2


def test_an_error_inside_puts_it_back() -> None:
    """What is raised inside leaves the switch as it was."""
    with pytest.raises(KeyError), no_collections():
        raise KeyError
    assert gc.isenabled()


def _collects_again() -> None:
    assert gc.isenabled()
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_process_forked_meanwhile_has_it_as_before(tmp_path: Path) -> None:
    """A loader worker that starts during a save collects its garbage."""
    log = tmp_path / "log"
    with no_collections():
        statuses = run_ranks(_collects_again, log=log)
    assert statuses == [0], log.read_text()
    assert gc.isenabled()


def test_planning_a_save_sets_off_no_collection(tmp_path: Path) -> None:
    """Between the first call of the planner and the last shard's start, nothing is collected."""
    state = {f"state_dict.t{i}": torch.ones(1) for i in range(3000)}
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not any(tmp_path.glob("c/.*.tmp")):
            collected.append(info["generation"])

    writer = UCVolumeWriter(tmp_path / "c")
    gc.collect()  # else one may be due before the planner is called, or after the last shard
    gc.callbacks.append(note)
    try:
        save(state, writer, process_group=None, no_dist=True)
    finally:
        gc.callbacks.remove(note)
    assert 2 not in collected
    assert gc.isenabled()
    assert os.path.exists(tmp_path / "c" / ".metadata")


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that this thread collects, with a collection due for each hundred objects."""
    begun: list[int] = []
    here, before = threading.get_ident(), gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == here:
            begun.append(info["generation"])

    gc.callbacks.append(note)
    gc.set_threshold(100, 1, 1)
    yield begun
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_the_call_of_a_save_collects_nothing_while_it_makes_objects(
    tmp_path: Path, collections: list[int]
) -> None:
    """Of the thousands that taking and staging a state make, none is looked at before the end."""
    weights = {f"t{i}": torch.ones(1) for i in range(3000)}
    collections.clear()
    entries = to_entries({"state_dict": weights}, optimizer_names=[], rank=0, rank_blob={})
    assert len(collections) <= 2
    collections.clear()
    saver = AsyncSaver(no_dist=True)
    saver.save(entries, lambda: UCVolumeWriter(tmp_path / "c"))
    assert len(collections) <= 4
    saver.wait()
