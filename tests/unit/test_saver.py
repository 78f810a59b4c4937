"""One save in flight: what was staged is what is published, and no failure is lost or hangs."""

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.manifest import MANIFEST, METADATA
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.state import optimizer_names, read_checkpoint, to_entries
from air_lightning.checkpoint.turn import Flag
from air_lightning.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError
from amid import amid, at_line
from ranks import run_ranks


class SlowWriter(UCVolumeWriter):
    """Writes once it is told to."""

    def __init__(self, path, go):
        super().__init__(str(path))
        self.go = go

    def write_data(self, plan, planner):
        assert self.go.wait(150)
        return super().write_data(plan, planner)


def _entries(value=1.0, rank=0):
    checkpoint = {"epoch": 1, "state_dict": {"w": torch.full((1000,), value)}}
    return to_entries(
        checkpoint, optimizer_names=[], rank=rank, rank_blob={"rank": rank, "value": value}
    )


def _read(path, rank=0, **options):
    reader = UCVolumeReader(str(path))
    options = {"process_group": None, "no_dist": True, **options}
    return read_checkpoint(reader, rank=rank, weights_only=True, **options)


@pytest.fixture
def saver():
    """A saver of this process alone, closed at the end."""
    saver = AsyncSaver(no_dist=True, timeout_s=150)
    yield saver
    saver.close()


def test_save_returns_before_it_is_published(tmp_path, saver):
    """The caller goes on while the writer writes; wait ends with a complete checkpoint."""
    go = threading.Event()
    saver.save(_entries(), lambda: SlowWriter(tmp_path / "c", go))
    assert saver.in_flight()
    assert not (tmp_path / "c" / ".metadata").exists()
    go.set()
    saver.wait()
    assert not saver.in_flight()
    assert _read(tmp_path / "c")[1] == {"rank": 0, "value": 1.0}
    assert saver.stats[0].published
    assert saver.stats[0].bytes > 4000


def test_an_index_that_claims_exabytes_of_an_optimizer_is_corrupt(tmp_path, saver):
    """A shape that no memory holds is an error of ours also where no live tensor has its own."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    names = [optimizer_names(net.named_parameters(), optimizer)]
    entries = to_entries(checkpoint, optimizer_names=names, rank=0, rank_blob={})
    saver.save(entries, lambda: UCVolumeWriter(tmp_path / "c"))
    saver.wait()
    assert _read(tmp_path / "c")[0]["optimizer_states"]
    (tmp_path / "c" / MANIFEST).unlink()  # which would find the change first
    index = tmp_path / "c" / METADATA
    metadata = pickle.loads(index.read_bytes())
    key = next(key for key in metadata.state_dict_metadata if key.endswith("weight.exp_avg"))
    entry = metadata.state_dict_metadata[key]
    entry.size = entry.chunks[0].sizes = torch.Size((1 << 20, 1 << 36))
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="exp_avg of shape"):
        _read(tmp_path / "c")


def test_changes_after_save_returned_are_not_saved(tmp_path, saver):
    """A training step that runs while the writer waits does not change what is saved."""
    net = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(net.parameters())

    def step():
        net(torch.randn(3, 50)).sum().backward()
        optimizer.step()

    step()
    names = [optimizer_names(net.named_parameters(), optimizer)]
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    expected = {
        "w": net.weight.detach().clone(),
        "m": optimizer.state[net.weight]["exp_avg"].clone(),
        "step": optimizer.state[net.weight]["step"].clone(),
    }
    go = threading.Event()
    entries = to_entries(checkpoint, optimizer_names=names, rank=0, rank_blob={})
    saver.save(entries, lambda: SlowWriter(tmp_path / "c", go))
    step()
    go.set()
    saver.wait()
    got, _ = _read(tmp_path / "c")
    state = got["optimizer_states"][0]["state"][0]
    assert torch.equal(got["state_dict"]["weight"], expected["w"])
    assert torch.equal(state["exp_avg"], expected["m"])
    assert torch.equal(state["step"], expected["step"])
    assert not torch.equal(net.weight, expected["w"])


def test_second_save_waits_for_the_first(tmp_path, saver):
    """Two saves never overlap, each publishes its own values, and waiting counts as no staging."""
    go, waited = threading.Event(), []

    def open_later():
        begun = time.perf_counter()
        time.sleep(0.2)
        waited.append(time.perf_counter() - begun)
        go.set()

    saver.save(_entries(1.0), lambda: SlowWriter(tmp_path / "a", go))
    with amid(AsyncSaver.wait, open_later):
        begun = time.perf_counter()
        saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b")))
        took = time.perf_counter() - begun
        assert (tmp_path / "a" / ".metadata").exists()
    saver.wait()
    assert waited[0] <= saver.stats[1].stall_s <= took
    assert saver.stats[1].stage_s <= took - waited[0]
    assert _read(tmp_path / "a")[1]["value"] == 1.0
    assert _read(tmp_path / "b")[1]["value"] == 2.0


class Interrupted(dict):
    """Entries during whose staging something else happens."""

    def __init__(self, value, interrupt):
        super().__init__(_entries(value))
        self.interrupt = interrupt

    def items(self):
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        return super().items()


def test_nothing_is_begun_while_a_save_reads_the_buffers(tmp_path, saver, monkeypatch):
    """What another call would copy early does not reach a save in flight; a failed call is left."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1)
    monkeypatch.setattr("air_lightning.checkpoint.moving._cores", lambda: 2)
    weight = torch.zeros(100, 100)
    go = threading.Event()

    def save(writer):
        checkpoint = {"state_dict": {"w": weight.detach()}}
        with saver.begun([checkpoint["state_dict"]["w"]]):
            entries = to_entries(checkpoint, optimizer_names=[], rank=0, rank_blob={})
            saver.save(entries, lambda: writer)

    save(UCVolumeWriter(str(tmp_path / "a")))
    saver.wait()
    weight.fill_(1)
    with pytest.raises(KeyError), saver.begun([weight]):
        raise KeyError
    weight.fill_(2)
    save(SlowWriter(tmp_path / "b", go))
    weight.fill_(3)
    with saver.begun([weight]):
        pass
    go.set()
    save(UCVolumeWriter(str(tmp_path / "c")))
    saver.wait()
    for name, value in (("a", 0), ("b", 2), ("c", 3)):
        assert _read(tmp_path / name)[0]["state_dict"]["w"].eq(value).all()


def test_a_copy_begins_early_after_a_first_save_that_met_its_preparation(
    tmp_path, saver, monkeypatch
):
    """Memory that is still being allocated at the first save does not delay the second's copy."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1)
    monkeypatch.setattr("air_lightning.checkpoint.moving._cores", lambda: 2)
    weight = torch.zeros(16 << 20)
    saver.prepare([weight, *(torch.empty(16 << 20) for _ in range(4))])
    begun = []
    for name in "ab":
        checkpoint = {"state_dict": {"w": weight.detach()}}
        with saver.begun([checkpoint["state_dict"]["w"]]):
            begun.append(saver._stager._begun is not None)
            entries = to_entries(checkpoint, optimizer_names=[], rank=0, rank_blob={})
            saver.save(entries, lambda name=name: UCVolumeWriter(str(tmp_path / name)))
        saver.wait()
    assert begun == [False, True]


def test_a_save_that_is_waited_for_begins_at_once(tmp_path, saver, monkeypatch):
    """The head start of a caller who goes on training is not for one who waits."""
    monkeypatch.setattr("air_lightning.checkpoint.saver._HEAD_START_S", 1e6)
    for _ in range(8):
        saver.save(_entries(), lambda: UCVolumeWriter(str(tmp_path / "c")))
        saver.wait()
    assert all(stats.published for stats in saver.stats)


def test_threads_that_save_at_once_do_so_one_after_the_other(tmp_path, saver):
    """A save that another thread asks for amid staging waits; each publishes its own values."""
    started, done = threading.Event(), threading.Event()

    def other():
        started.wait(150)
        saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b")))
        done.set()

    def interrupt():
        started.set()
        assert not done.wait(0.3)

    thread = threading.Thread(target=other)
    thread.start()
    saver.save(Interrupted(1.0, interrupt), lambda: UCVolumeWriter(str(tmp_path / "a")))
    thread.join()
    saver.wait()
    for name, value in (("a", 1.0), ("b", 2.0)):
        checkpoint, own = _read(tmp_path / name)
        assert own["value"] == value
        assert checkpoint["state_dict"]["w"].eq(value).all()


def test_a_signal_handler_that_saves_amid_a_save_gets_an_error(tmp_path, saver):
    """It would overwrite what is being staged; afterwards the same handler may save."""
    caught = []

    def handle(*_):
        try:
            saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b")))
        except SaveFailedError as error:
            caught.append(str(error))

    def interrupt():
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        saver.save(Interrupted(1.0, interrupt), lambda: UCVolumeWriter(str(tmp_path / "a")))
        saver.wait()
        assert len(caught) == 1
        assert "signal handler" in caught[0]
        assert _read(tmp_path / "a")[0]["state_dict"]["w"].eq(1.0).all()
        interrupt()
    finally:
        signal.signal(signal.SIGUSR1, before)
    saver.wait()
    assert _read(tmp_path / "b")[1]["value"] == 2.0
    assert len(caught) == 1


def test_a_signal_handler_may_save_while_a_save_waits_for_the_one_before(tmp_path, saver):
    """Nothing is staged yet: its save comes first, then the one that it interrupted."""
    go = threading.Event()

    def handle(*_):
        go.set()
        saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b"), global_step=1))

    before = signal.signal(signal.SIGUSR1, handle)
    send = partial(signal.pthread_kill, threading.get_ident(), signal.SIGUSR1)
    try:
        saver.save(_entries(1.0), lambda: SlowWriter(tmp_path / "a", go))
        with amid(AsyncSaver.wait, send):
            saver.save(_entries(3.0), lambda: UCVolumeWriter(str(tmp_path / "c")))
        assert (tmp_path / "b" / METADATA).exists()
        saver.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        checkpoint, own = _read(tmp_path / name)
        assert own["value"] == value
        assert checkpoint["state_dict"]["w"].eq(value).all()


def test_a_signal_handler_may_save_at_any_line_of_a_wait(tmp_path):
    """Also amid what a wait sets and looks at: the handler's own wait does not wait for that."""
    amid_lines = 0
    for number in range(30):
        saver, go, done = AsyncSaver(no_dist=True, timeout_s=150), threading.Event(), []

        def handle(saver=saver, done=done, go=go):
            done.append(True)
            go.set()
            saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b")))

        saver.save(_entries(1.0), lambda go=go: SlowWriter(tmp_path / "a", go))
        opener = threading.Timer(0.02, go.set)  # where the line comes after that, or is none
        opener.start()
        with at_line(number, AsyncSaver.wait, handle):
            saver.save(_entries(3.0), lambda: UCVolumeWriter(str(tmp_path / "c")))
        saver.wait()
        opener.join()
        assert [stats.published for stats in saver.stats] == [True] * (3 if done else 2)
        amid_lines += len(done)
    assert amid_lines >= 6, "as many lines are run also where there is nothing to wait for"


def test_a_signal_handler_may_save_at_any_line_of_what_follows_a_save(tmp_path, saver):
    """What is to follow a publication is done once, whenever the handler's own save begins."""
    amid_lines = 0
    for number in range(12):
        go, done, followed = threading.Event(), [], []

        def handle(done=done, go=go):
            done.append(True)
            go.set()
            saver.save(_entries(2.0), lambda: UCVolumeWriter(str(tmp_path / "b")))

        saver.save(_entries(1.0), lambda go=go: SlowWriter(tmp_path / "a", go))
        with at_line(number, AsyncSaver.after_published, handle):
            saver.after_published(lambda followed=followed: followed.append(True))
        go.set()
        saver.wait()
        assert followed == [True]
        amid_lines += len(done)
    assert amid_lines >= 3


def test_who_waited_goes_on_though_the_next_save_has_begun():
    """A flag that was set and cleared again at once has woken whoever waited for it."""
    flag, woken = Flag(is_set=False), []
    waiter = threading.Thread(target=lambda: woken.append(flag.wait(300)))
    waiter.start()
    while not flag._waiting:
        time.sleep(0.001)
    flag.set()
    flag.clear()
    waiter.join()
    assert woken == [True]


def test_failure_is_raised_once_and_names_the_path(tmp_path, saver):
    """A directory that is a file fails in the background; wait raises it, with its cause, once."""
    (tmp_path / "c").write_text("not a directory")
    saver.save(_entries(), lambda: UCVolumeWriter(str(tmp_path / "c")))
    with pytest.raises(SaveFailedError) as caught:
        saver.wait()
    assert str(tmp_path / "c") in str(caught.value)
    assert caught.value.__cause__ is not None
    saver.wait()
    assert not saver.stats[0].published


def test_next_save_raises_the_failure_of_the_last(tmp_path, saver):
    """An error nobody waited for is raised by the next save, and the one after it works."""
    (tmp_path / "c").write_text("not a directory")
    saver.save(_entries(), lambda: UCVolumeWriter(str(tmp_path / "c")))
    with pytest.raises(SaveFailedError):
        saver.save(_entries(), lambda: UCVolumeWriter(str(tmp_path / "d")))
    saver.save(_entries(3.0), lambda: UCVolumeWriter(str(tmp_path / "d")))
    saver.wait()
    assert _read(tmp_path / "d")[1]["value"] == 3.0


def test_wait_is_bounded_and_says_what_is_running(tmp_path, saver):
    """A save that still runs after the time given is an error; the save itself goes on."""
    go = threading.Event()
    saver.save(_entries(), lambda: SlowWriter(tmp_path / "c", go))
    with pytest.raises(SaveFailedError, match="has been running"):
        saver.wait(0.05)
    assert saver.in_flight()
    go.set()
    saver.wait()
    assert (tmp_path / "c" / ".metadata").exists()


def test_actions_run_in_order_after_publication(tmp_path, saver):
    """on_published comes first, then what was queued, each with the checkpoint complete."""
    go, seen, marker = threading.Event(), [], tmp_path / "c" / ".metadata"

    def note(name):
        return lambda: seen.append((name, marker.exists()))

    saver.save(_entries(), lambda: SlowWriter(tmp_path / "c", go), on_published=note("first"))
    saver.after_published(note("second"))
    saver.after_published(note("third"))
    assert seen == []
    go.set()
    saver.wait()
    assert seen == [("first", True), ("second", True), ("third", True)]
    saver.after_published(note("now"))
    assert seen[-1] == ("now", True)


def test_actions_of_a_failed_save_are_dropped(tmp_path, saver, caplog):
    """The checkpoint that a failed save was to replace is not deleted, also not afterwards."""
    ran = []
    (tmp_path / "c").write_text("not a directory")
    go = threading.Event()

    def make():
        assert go.wait(150)
        return UCVolumeWriter(str(tmp_path / "c"))

    saver.save(_entries(), make, on_published=lambda: ran.append(1))
    saver.after_published(lambda: ran.append(2))
    go.set()
    while saver.in_flight():
        saver._idle.wait(150)
    saver.after_published(lambda: ran.append(3))
    with pytest.raises(SaveFailedError):
        saver.wait()
    assert ran == []
    assert "1 actions that were to follow" in caplog.text
    saver.after_published(lambda: ran.append(4))
    assert ran == [4]


def test_a_failed_save_that_nothing_was_to_follow_says_no_more(tmp_path, saver, caplog):
    """What a save itself does at its end is not told as somebody's action that was dropped."""
    (tmp_path / "c").write_text("not a directory")
    make = partial(UCVolumeWriter, str(tmp_path / "c"))
    saver.save(_entries(), make, on_published=lambda: None)
    with pytest.raises(SaveFailedError):
        saver.wait()
    assert "dropped" not in caplog.text


def test_failing_action_is_logged_and_stops_nothing(tmp_path, saver, caplog):
    """An error of one action reaches the log; the next action runs and the save counts."""
    go, ran = threading.Event(), []
    saver.save(_entries(), lambda: SlowWriter(tmp_path / "c", go), on_published=lambda: 1 / 0)
    saver.after_published(lambda: ran.append(1))
    go.set()
    saver.wait()
    assert ran == [1]
    assert "ZeroDivisionError" in caplog.text


def test_close_logs_instead_of_raising(tmp_path, saver, caplog):
    """Cleaning up after the user's own exception does not replace it by ours."""
    (tmp_path / "c").write_text("not a directory")
    saver.save(_entries(), lambda: UCVolumeWriter(str(tmp_path / "c")))
    saver.close()
    assert "failed on rank 0" in caplog.text


def test_ranks_without_a_group_are_refused():
    """Saving together needs a group of our own; the message says how to make one."""
    with pytest.raises(InvalidArgumentError, match="new_group"):
        AsyncSaver(no_dist=False)


def test_forked_child_does_not_wait(tmp_path, saver):
    """A loader worker forked during a save has no such thread, and is not kept from exiting."""
    go = threading.Event()
    saver.save(_entries(), lambda: SlowWriter(tmp_path / "c", go))
    pid = os.fork()
    if pid == 0:
        saver.wait()
        os._exit(7 if not saver.in_flight() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    go.set()
    saver.wait()


# Two ranks. Each function runs in both; an assertion that fails makes the exit status 1.


def _group():
    limit = timedelta(seconds=150)
    dist.init_process_group("gloo", timeout=limit)
    return dist.new_group(backend="gloo", timeout=limit), dist.get_rank()


def _run_both(function, *args, log):
    statuses = run_ranks(function, *args, world_size=2, log=log)
    assert statuses == [0, 0], log.read_text()


def _save_and_read_together(root):
    group, rank = _group()
    saver = AsyncSaver(process_group=group, no_dist=False, timeout_s=150)
    for number in range(3):
        value = float(number)
        path = f"{root}/{number}"
        saver.save(_entries(value, rank), lambda path=path: UCVolumeWriter(path))
        dist.barrier()  # on the user's group, while the background uses ours
    saver.wait()
    for number in range(3):
        got, mine = _read(f"{root}/{number}", rank, process_group=group, no_dist=False)
        assert mine == {"rank": rank, "value": float(number)}
        assert torch.equal(got["state_dict"]["w"], torch.full((1000,), float(number)))
        assert _read(f"{root}/{number}", 1 - rank)[1]["rank"] == 1 - rank
        assert _read(f"{root}/{number}", 2)[1] is None
    dist.destroy_process_group()


def test_two_ranks_save_together(tmp_path):
    """Both ranks' blobs are in one checkpoint, and replicated tensors are stored once."""
    _run_both(_save_and_read_together, str(tmp_path), log=tmp_path / "log")
    files = list((tmp_path / "2").glob("*.distcp"))
    assert 4000 < sum(file.stat().st_size for file in files) < 16000
    assert {file.name[:4] for file in files} == {"__0_", "__1_"}


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def _fail_on_rank_one(root, how):
    group, rank = _group()
    saver = AsyncSaver(process_group=group, no_dist=False, timeout_s=150)
    ran = []

    def make():
        if rank == 1 and how == "make_writer":
            raise Unpicklable("no", "writer")
        return UCVolumeWriter(f"{root}/{how}")

    entries = _entries(1.0, rank)
    if rank == 1 and how == "stage":
        entries["state_dict.w"] = torch.empty(3, device="meta")
    saver.save(entries, make, on_published=lambda: ran.append(1))
    with pytest.raises(SaveFailedError, match="failed on rank") as caught:
        saver.wait()
    message = str(caught.value)
    assert how != "make_writer" or "rank 1: SaveFailedError: Unpicklable: no writer" in message
    assert ran == []
    assert not os.path.exists(f"{root}/{how}/.metadata")
    saver.save(_entries(2.0, rank), lambda: UCVolumeWriter(f"{root}/{how}-after"))
    saver.wait()
    assert _read(f"{root}/{how}-after", rank)[1]["value"] == 2.0
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["make_writer", "stage"])
def test_failure_of_one_rank_is_raised_on_both(tmp_path, how):
    """Whatever fails on rank 1 alone, both ranks learn of it, and both go on to save again."""
    _run_both(_fail_on_rank_one, str(tmp_path), how, log=tmp_path / "log")


def _write_where_a_file_is(root):
    group, rank = _group()
    saver = AsyncSaver(process_group=group, no_dist=False, timeout_s=150)
    saver.save(_entries(1.0, rank), lambda: UCVolumeWriter(f"{root}/file"))
    with pytest.raises(SaveFailedError, match=f"{root}/file"):
        saver.wait()
    dist.destroy_process_group()


def test_directory_that_is_a_file_fails_on_both_ranks(tmp_path):
    """A checkpoint path that is a file is a SaveFailedError with the path on every rank."""
    (tmp_path / "file").write_text("not a directory")
    _run_both(_write_where_a_file_is, str(tmp_path), log=tmp_path / "log")


def _reshard(root):
    group, rank = _group()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    full, moment = torch.randn(7, 4), torch.randn(7, 4)
    saver = AsyncSaver(process_group=group, no_dist=False, timeout_s=150)

    def checkpoint(w, m):
        states = [{"state": {0: {"exp_avg": m, "step": torch.tensor(2.0)}}, "param_groups": []}]
        return {"state_dict": {"w": w}, "optimizer_states": states}

    def sharded(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    kinds = {"plain": (full, moment), "sharded": (sharded(full), sharded(moment))}
    for name, tensors in kinds.items():
        entries = to_entries(
            checkpoint(*tensors), optimizer_names=[{0: "w"}], rank=rank, rank_blob={}
        )
        path = f"{root}/{name}"
        saver.save(entries, lambda path=path: UCVolumeWriter(path))
        saver.wait()
    for name in kinds:
        for live in (None, {"w": sharded(torch.zeros(7, 4))}):
            got, _ = _read(f"{root}/{name}", rank, state_dict=live)
            for value, want in (
                (got["state_dict"]["w"], full),
                (got["optimizer_states"][0]["state"][0]["exp_avg"], moment),
            ):
                assert isinstance(value, DTensor) == (live is not None)
                plain = value.full_tensor() if live is not None else value
                assert torch.equal(plain, want)
            assert got["optimizer_states"][0]["state"][0]["step"] == 2.0
    dist.destroy_process_group()


def test_sharded_and_replicated_states_load_as_each_other(tmp_path):
    """Model and moments saved as DTensors load whole, and whole ones load as DTensors."""
    _run_both(_reshard, str(tmp_path), log=tmp_path / "log")


# Interpreter exit, in processes of their own.


def _script(body):
    head = """
        import sys, threading, time, torch
        from air_lightning.checkpoint.dcp import UCVolumeWriter
        from air_lightning.checkpoint.saver import AsyncSaver
        from air_lightning.checkpoint.state import to_entries
        state = {"state_dict": {"w": torch.ones(1000)}}
        entries = to_entries(state, optimizer_names=[], rank=0, rank_blob={})
        class SlowWriter(UCVolumeWriter):
            def write_data(self, plan, planner):
                time.sleep(SECONDS)
                return super().write_data(plan, planner)
        """
    source = textwrap.dedent(head) + textwrap.dedent(body)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", source]
    output = {"capture_output": True, "text": True}
    return subprocess.run(command, env=env, timeout=300, check=False, **output)


def test_interpreter_exit_publishes_the_last_save(tmp_path):
    """A script that ends right after save leaves a complete checkpoint."""
    body = f"""
        SECONDS = 1.0
        saver = AsyncSaver(no_dist=True, timeout_s=150)
        saver.save(entries, lambda: SlowWriter({str(tmp_path / "c")!r}))
        """
    done = _script(body)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c" / ".metadata").exists(), done.stderr


def test_exit_with_an_exception_publishes_and_shows_it(tmp_path):
    """The user's own exception ends the process as ever, after the save was published."""
    body = f"""
        SECONDS = 0.5
        saver = AsyncSaver(no_dist=True, timeout_s=150)
        saver.save(entries, lambda: SlowWriter({str(tmp_path / "c")!r}))
        raise RuntimeError("mine")
        """
    done = _script(body)
    assert done.returncode == 1
    assert "RuntimeError: mine" in done.stderr
    assert (tmp_path / "c" / ".metadata").exists()


def test_interpreter_exit_with_a_stuck_upload_is_bounded(tmp_path):
    """An upload that never ends keeps the process for the timeout only, and is reported."""
    body = f"""
        SECONDS = 10_000
        saver = AsyncSaver(no_dist=True, timeout_s=1.0)
        saver.save(entries, lambda: SlowWriter({str(tmp_path / "c")!r}))
        """
    done = _script(body)
    assert done.returncode == 0
    assert "has been running" in done.stderr
    assert not (tmp_path / "c" / ".metadata").exists()


def test_memory_is_flat_over_fifty_saves(tmp_path):
    """The process does not grow over fifty more saves of a 20 MB state."""
    body = f"""
        import resource, shutil
        SECONDS = 0.0
        saver = AsyncSaver(no_dist=True, timeout_s=150)
        def resident():
            pages = int(open("/proc/self/statm").read().split()[1])
            return pages * resource.getpagesize() / 2**20
        net = {{f"p{{i}}": torch.randn(50, 1000) for i in range(100)}}
        seen = []
        for number in range(100):
            entries = to_entries({{"state_dict": net}}, optimizer_names=[], rank=0, rank_blob={{}})
            saver.save(entries, lambda: SlowWriter({str(tmp_path / "c")!r}))
            saver.wait()
            seen.append(resident())
        print(max(seen[50:]) - max(seen[:50]))
        """
    if not pathlib.Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    done = _script(body)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 15, done.stdout  # the state has 20 MB


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_saves_of_changing_states(tmp_path, saver):
    """Twenty saves, every fifth of half the state, need no more memory than the first two."""
    full = {f"state_dict.t{i}": torch.ones(500_000) for i in range(20)}
    half = dict(list(full.items())[:10])
    resident = []
    for number in range(20):
        state = half if number % 5 == 3 else full
        target = str(tmp_path / str(number % 2))
        saver.save(dict(state), lambda target=target: UCVolumeWriter(target))
        saver.wait()
        resident.append(_resident())
    assert max(resident[2:]) - resident[1] < 2 << 20
