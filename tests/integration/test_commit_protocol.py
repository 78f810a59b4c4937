"""`.metadata` last: whatever is killed and whenever, nothing half-written counts.

Real processes: one is killed before each file operation of a save in turn, others at random
moments; ranks fail, disks fill up.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from air_lightning import find_latest_valid, list_checkpoints, verify_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.manifest import METADATA
from ranks import KILLED, run_ranks

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*"),
]

_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.scandir", "os.listdir"}
KEYS = [f"t{i}" for i in range(4)]
ENDED, FAILED_EVERYWHERE = 0, 7


def tensors(fill: float, size: int = 2_000) -> dict[str, torch.Tensor]:
    """Tensors of which every element is ``fill``: a mixture of two saves shows."""
    return {key: torch.full((size,), fill) for key in KEYS}


def save(path: str, fill: int, size: int = 2_000) -> None:
    """Save, recording ``fill`` as the step as well."""
    dcp.save(tensors(fill, size), storage_writer=UCVolumeWriter(path, global_step=fill))


def content(path: str, size: int = 2_000) -> int:
    """The fill of a checkpoint, proven the same in every tensor and in the manifest."""
    into = tensors(-1.0, size)
    dcp.load(into, storage_reader=UCVolumeReader(path, verify=True))
    (fill,) = {value for tensor in into.values() for value in tensor.unique().tolist()}
    assert verify_checkpoint(path, deep=True).step == fill
    return int(fill)


def save_and_die(path: str, fill: int, at: int) -> None:
    """Save; SIGKILL ourselves just before the ``at``-th file operation below the directory."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _FILE_EVENTS and str(arguments[0]).startswith(path):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(path, fill)


@pytest.mark.parametrize("earlier", [None, 1])
def test_killed_before_any_file_operation(tmp_path: Path, earlier: int | None) -> None:
    """A save killed before each of its file operations leaves the old one, none, or the new."""
    outcomes = []
    for at in range(1, 100):
        path = str(tmp_path / f"{at}")
        if earlier is not None:
            save(path, earlier)
        (status,) = run_ranks(save_and_die, path, 2, at)
        found = find_latest_valid(tmp_path)
        outcomes.append(None if found is None else content(found))
        if status == ENDED:
            break
        assert status == KILLED
        # What a killed process left behind is no hindrance, and is gone after the next save.
        save(path, 3)
        assert content(path) == 3
        assert not [name for name in os.listdir(path) if name.endswith(".tmp")]
        subprocess.run(["rm", "-r", path], check=True)
    assert outcomes[-1] == 2
    assert len(outcomes) > 8
    # In this order, never back: once the old one is gone it stays gone until the new one is whole.
    order = [earlier, None, 2]
    places = [order.index(outcome) for outcome in outcomes]
    assert places == sorted(places)
    assert outcomes.count(None) > 5


def save_for_ever(path: str, first: int, size: int, tell: int) -> None:
    """Overwrite one checkpoint again and again; tells of each time."""
    torch.set_num_threads(1)  # a fork has none of the threads that torch would wait for
    for fill in range(first, first + 100_000):
        os.write(tell, b".")
        save(path, fill, size)


def kill_in_a_save(path: str, first: int, size: int, draw: random.Random) -> None:
    """Run ``save_for_ever`` in a child, and SIGKILL it somewhere in its first, or a later, save."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        save_for_ever(path, first, size, tell)
        os._exit(1)
    os.close(tell)
    now = time.monotonic()
    for _ in range(draw.randint(1, 3)):
        before = now
        assert os.read(told, 1) == b"."
        now = time.monotonic()
    # An arbitrary moment, of as long a time as the step before took: more on a busy machine.
    time.sleep(draw.uniform(0, 1) * (now - before))
    os.kill(child, signal.SIGKILL)
    os.close(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def test_killed_at_random_moments_while_overwriting(tmp_path: Path) -> None:
    """Killed anywhere in a save of megabytes, the directory is one whole save or invalid."""
    path, size, draw = str(tmp_path / "ckpt"), 500_000, random.Random(2)
    torn = whole = 0
    for kill in range(200):
        kill_in_a_save(path, 1 + kill * 1000, size, draw)
        if find_latest_valid(tmp_path) is None:
            torn += 1
        else:
            whole = max(whole, content(path, size))
        if kill >= 24 and torn > 0 and whole > 1000:
            break
    assert torn > 0  # otherwise the test has killed nothing in the middle
    assert whole > 1000  # or its later children have saved nothing


def join_group() -> int:
    """Join the gloo group that the environment names; returns the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def expect_failure(path: str, fill: int, writer: UCVolumeWriter) -> None:
    """Save; exits with FAILED_EVERYWHERE when this rank learned of the failure."""
    try:
        dcp.save({**tensors(fill), f"own{dist.get_rank()}": torch.ones(9)}, storage_writer=writer)
    except CheckpointException as error:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # the log is a file as well
        print(error, file=sys.stderr, flush=True)
        os._exit(FAILED_EVERYWHERE)


def save_and_load_on_ranks(path: str) -> None:
    """Each rank adds a tensor of its own; all are read back by all."""
    rank = join_group()
    own = {f"own{rank}": torch.full((5,), float(rank))}
    dcp.save({**tensors(4), **own}, storage_writer=UCVolumeWriter(path, global_step=4))
    into = {**tensors(0), "own0": torch.zeros(5), "own1": torch.zeros(5)}
    dcp.load(into, storage_reader=UCVolumeReader(path, verify=True))
    assert all(torch.equal(into[f"own{i}"], torch.full((5,), float(i))) for i in (0, 1))
    assert all(bool((into[key] == 4).all()) for key in KEYS)


def test_two_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    """Both ranks' shards are in one checkpoint, which one process reads as well."""
    log = tmp_path / "log"
    path = str(tmp_path / "root" / "ckpt")
    assert run_ranks(save_and_load_on_ranks, path, world_size=2, log=log) == [0, 0], log.read_text()
    (record,) = list_checkpoints(tmp_path / "root")
    assert record.valid
    assert (record.step, record.world_size) == (4, 2)
    assert {name[:3] for name in os.listdir(path) if "distcp" in name} == {"__0", "__1"}
    into = {"own0": torch.zeros(5), "own1": torch.zeros(5)}
    dcp.load(into, storage_reader=dcp.FileSystemReader(path))
    assert into["own1"].tolist() == [1.0] * 5


def save_where_rank_1_cannot(path: str) -> None:
    """Save into a directory in which rank 1's shard cannot be published."""
    join_group()
    expect_failure(path, 2, UCVolumeWriter(path, thread_count=1))


def test_one_ranks_failure_fails_all_and_leaves_no_metadata(tmp_path: Path) -> None:
    """One rank's failed write fails the save everywhere; the earlier checkpoint does not revive."""
    path, log = tmp_path / "ckpt", tmp_path / "log"
    save(str(path), 1)
    (path / "__1_0.distcp").mkdir()
    statuses = run_ranks(save_where_rank_1_cannot, str(path), world_size=2, log=log)
    assert statuses == [FAILED_EVERYWHERE] * 2, log.read_text()
    assert METADATA not in os.listdir(path)
    assert find_latest_valid(tmp_path) is None
    assert "__1_0.distcp" in log.read_text()


def save_beyond_a_limit(path: str) -> None:
    """Rank 1 may not write files of more than a few kilobytes."""
    if join_group() == 1:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    expect_failure(path, 2, UCVolumeWriter(path, thread_count=2))


def save_to_full_disk(path: str, objects: bool) -> None:
    """Save more than the disk takes; how large objects get no plan tells."""
    rank = join_group()
    state = {f"large{rank}": list(range(20_000))} if objects else tensors(2)
    try:
        dcp.save(state, storage_writer=UCVolumeWriter(path, thread_count=2))
    except CheckpointException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(FAILED_EVERYWHERE)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_file_that_cannot_grow_fails_all_ranks(tmp_path: Path) -> None:
    """EFBIG in a writer thread of one rank fails both and leaves neither .metadata nor scraps."""
    path, log = tmp_path / "ckpt", tmp_path / "log"
    statuses = run_ranks(save_beyond_a_limit, str(path), world_size=2, log=log)
    assert statuses == [FAILED_EVERYWHERE] * 2, log.read_text()
    assert not [n for n in os.listdir(path) if n == METADATA or n.endswith(".tmp")]


@pytest.mark.parametrize("objects", [False, True])
def test_a_full_disk_fails_all_ranks(tiny_disk: Path, tmp_path: Path, objects: bool) -> None:
    """ENOSPC, foreseen or not, fails the save on both ranks, says so, and leaves no .metadata."""
    path, log = tiny_disk / "ckpt", tmp_path / "log"
    statuses = run_ranks(save_to_full_disk, str(path), objects, world_size=2, log=log)
    assert statuses == [FAILED_EVERYWHERE] * 2, log.read_text()
    assert not [n for n in os.listdir(path) if n == METADATA or n.endswith(".tmp")]
    assert "No space left" in log.read_text()
    assert ("Nothing was written" in log.read_text()) != objects
