"""Threads that cannot be started, or fail: the work is done all the same, or there is an error."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from air_lightning import verify_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.moving import Block, Copying, pieces
from air_lightning.checkpoint.planner import LoadPlanner, load
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.listing import take_listing
from air_lightning.volumes.storage import open_storage
from air_lightning.volumes.streams import Team, cut


def test_a_save_and_a_load(tmp_path, no_threads):
    """A checkpoint is saved and loaded, and what was to be prepared is done at the save."""
    path = str(tmp_path / "checkpoint")
    saved = {f"t{number}": torch.randn(100_000) for number in range(8)}
    saver = AsyncSaver(no_dist=True, timeout_s=60)
    saver.prepare(saved.values())
    saver.save(saved, lambda: UCVolumeWriter(path))
    saver.wait()
    verify_checkpoint(path)
    loaded = {key: torch.zeros_like(value) for key, value in saved.items()}
    planner = LoadPlanner(weights_only=True)
    load(loaded, UCVolumeReader(path), planner, process_group=None, no_dist=True)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_a_copy(no_threads):
    """What two threads were to move, the caller moves."""
    source = torch.randint(256, (9 << 20,), dtype=torch.uint8)
    to = torch.zeros_like(source)
    Copying(pieces(to.data_ptr(), source.data_ptr(), source.nbytes)).finish()
    assert torch.equal(to, source)


def test_a_listing(volume, no_threads):
    """A directory of directories is listed."""
    names = volume.write(20)
    files = take_listing(open_storage(volume.path), None)
    assert [files[number].name for number in range(len(files))] == names


def test_a_download_of_several_streams(no_threads):
    """The caller reads all spans, and the places of helpers are free for others."""
    spans = cut(100, 10)
    for _ in range(40):  # more than there may be helpers
        read = []
        Team(spans, lambda team, read=read: read.extend(team.spans())).run()
        assert read == spans
    threading.stack_size(0)
    met = threading.Barrier(2)
    Team(cut(100, 50), lambda _: met.wait(150)).run()


def test_reading_ahead(volume, no_threads):
    """Files are not read without a thread, and the error says what to do."""
    volume.write(3)
    with pytest.raises(RuntimeError, match="can't start new threads.*ulimit -u"):
        list(UCVolumeDataset(volume.path))


class Interrupted(Exception):
    """What a handler of a signal raises."""


@pytest.fixture
def interrupted_wait():
    """Signals come all the time, until the handler of one raises, as Ctrl-C's, amid ``abandon``."""
    done = threading.Event()

    def handler(_, frame):
        # Not at its very first instruction, where Python has no way to hold an exception back.
        is_in = frame.f_code is Copying.abandon.__code__ and "interruption" in frame.f_locals
        if is_in and not done.is_set():
            done.set()
            raise Interrupted

    def send():
        while not done.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR2)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, handler)
    sender = threading.Thread(target=send)
    sender.start()
    yield
    done.set()
    sender.join()
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("end", [Copying.finish, Copying.abandon])
def test_a_copy_that_is_interrupted_while_it_waits_for_its_helper(interrupted_wait, end):
    """The interruption is raised, and by then nothing is written any more, nor read."""
    source = torch.ones(1 << 29, dtype=torch.uint8)
    for _ in range(20):  # a busy machine may let the helper be done before there is a wait
        to = torch.zeros_like(source)
        copying = Copying([Block(to.data_ptr(), source.data_ptr(), source.nbytes)])
        while not to[0]:
            pass  # the helper has not begun
        try:
            end(copying)
        except Interrupted:
            assert to[-1]
            return
    pytest.fail("never interrupted")


def test_a_child_forked_amid_a_copy_leaves_it():
    """A forked process, in which there is no helper, does not wait for one."""
    source = torch.ones(1 << 29, dtype=torch.uint8)
    to = torch.zeros_like(source)
    copying = Copying([Block(to.data_ptr(), source.data_ptr(), source.nbytes)])
    while not to[0]:
        pass  # the helper has not begun
    child = os.fork()
    if child == 0:
        copying.abandon()
        os._exit(0)
    copying.finish()
    deadline = time.monotonic() + 150
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    assert ended[1] == 0
    assert to[-1]


ENDS_AMID_A_COPY = """
import threading, torch
from air_lightning.checkpoint.moving import Block, Copying

source = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(200)]
to = [torch.zeros_like(tensor) for tensor in source]

def begin():
    blocks = [Block(b.data_ptr(), a.data_ptr(), a.nbytes, b, a) for a, b in zip(source, to)]
    begun = Copying(blocks)
    threading.Event().wait()  # a save that will never have its entries

threading.Thread(target=begin, daemon=True).start()
while not to[0][0]:
    pass
"""


def test_a_process_that_ends_amid_a_copy():
    """It ends as it would without one, though a daemon thread had begun it."""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", ENDS_AMID_A_COPY], timeout=120, check=False)
        assert ended.returncode == 0


def test_what_the_helper_of_a_copy_fails_at_is_raised():
    """A copy that the helper cannot make fails, though the caller had nothing to wait for."""
    copying = Copying([Block(0, 0, 0, torch.zeros(3), torch.zeros(4))])
    for thread in threading.enumerate():
        if thread.name == "air-lightning-stage":
            thread.join()
    with pytest.raises(RuntimeError):
        copying.finish()
