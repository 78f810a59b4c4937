"""Room for a save: asked for before anything is lost, and the detour leaves nothing behind."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.planner import LoadPlanner, SavePlanner, load, save
from air_lightning.checkpoint.room import Detour, planned_bytes, require_room
from air_lightning.checkpoint.shards import ShardStream
from air_lightning.errors import InvalidArgumentError, SaveFailedError, StorageError
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.volumes.storage import open_storage
from ranks import KILLED, run_ranks

VALUES = {"a": torch.randn(1000), "b": torch.randn(3_000_000), "c": torch.randn(10, 10).t()}
HUGE = {"huge": torch.zeros(1).expand(1 << 52)}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB, on which nobody else writes."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def saved(path: Path, value: dict[str, Any], **options: Any) -> None:
    """One process's save through our writer."""
    save(dict(value), UCVolumeWriter(path, **options), process_group=None, no_dist=True)


def assert_saved(path: Path) -> None:
    """The values are there, verified."""
    into = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    reader = UCVolumeReader(path, verify=True)
    load(dict(into), reader, LoadPlanner(weights_only=True), process_group=None, no_dist=True)
    assert all(torch.equal(into[key], VALUES[key]) for key in VALUES)


def test_a_save_that_cannot_fit_is_refused_before_the_earlier_one_goes(tmp_path: Path) -> None:
    """The error names bytes needed and free, is ENOSPC, and the checkpoint in place stays whole."""
    saved(tmp_path, VALUES)
    with pytest.raises(StorageError, match=r"bytes are free, and it needs 18014398509\d+") as info:
        saved(tmp_path, HUGE)
    assert info.value.errno == errno.ENOSPC
    assert_saved(tmp_path)


@needs_root
def test_the_room_of_the_checkpoint_that_is_replaced_counts(disk: Path) -> None:
    """Where only the earlier save's own bytes make the new one fit, it is not refused."""
    saved(disk / "ckpt", VALUES)
    storage = open_storage(str(disk / "ckpt"), allow_local=True)
    free = storage.free_bytes()
    assert free is not None
    require_room(storage, free + (11 << 20))
    with pytest.raises(StorageError):
        require_room(storage, free + (12 << 20))


def test_volumes_and_object_stores_do_not_say(volume: Any) -> None:
    """What a mount tells of its size means nothing, so nothing is refused by it."""
    require_room(open_storage("/Volumes/a/b/c/ckpt"), 1 << 60)
    require_room(open_storage("memory://room/ckpt"), 1 << 60)


@needs_root
def test_a_missing_directory_has_the_room_of_the_one_above(disk: Path) -> None:
    """Free bytes are asked of the nearest directory that exists."""
    missing = open_storage(f"{disk}/x/y", allow_local=True).free_bytes()
    assert missing == open_storage(str(disk), allow_local=True).free_bytes() == 32 << 20


def test_planned_bytes_are_at_least_what_is_written(tmp_path: Path) -> None:
    """The estimate covers the shards, and exceeds them by little."""
    planner = SavePlanner()
    planner.set_up_planner(dict(VALUES), None, is_coordinator=True)
    planned = planned_bytes(planner.create_local_plan())
    saved(tmp_path, VALUES)
    written = sum(f.stat().st_size for f in tmp_path.iterdir() if f.suffix == ".distcp")
    assert written <= planned < written + 10_000
    assert planned_bytes(SavePlan([])) == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_shards_go_by_way_of_the_staging_directory(tmp_path: Path, threads: int) -> None:
    """With staging_dir the checkpoint is the same, and the directory, made if need be, is empty."""
    staging = tmp_path / "disk" / "staging"
    saved(tmp_path / "ckpt", VALUES, staging_dir=staging, thread_count=threads)
    assert_saved(tmp_path / "ckpt")
    verify_checkpoint(tmp_path / "ckpt", deep=True)
    assert os.listdir(staging) == []


def test_a_failed_save_leaves_the_staging_directory_empty(tmp_path: Path) -> None:
    """A shard that cannot be published fails the save and leaves no file in staging_dir."""
    (tmp_path / "ckpt" / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(OSError):
        saved(tmp_path / "ckpt", VALUES, staging_dir=tmp_path / "staging")
    assert os.listdir(tmp_path / "staging") == []
    assert not (tmp_path / "ckpt" / ".metadata").exists()


class DyingPlanner(SavePlanner):
    """Kills its process when the second tensor is to be written."""

    def resolve_data(self, write_item: Any) -> Any:
        """See the base class."""
        if write_item.index.fqn == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def _die(path: str, staging: str) -> None:
    planner = DyingPlanner()
    writer = UCVolumeWriter(path, staging_dir=staging, thread_count=1)
    planner.set_up_planner(dict(VALUES), None, is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([local])
    writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)


def test_a_killed_save_leaves_the_staging_directory_empty(tmp_path: Path) -> None:
    """A process that dies between two tensors of a staged shard leaves nothing on the disk."""
    assert run_ranks(_die, str(tmp_path / "ckpt"), str(tmp_path / "staging")) == [KILLED]
    assert os.listdir(tmp_path / "staging") == []


def test_a_staging_directory_without_room_is_refused(tmp_path: Path) -> None:
    """The error names the directory, the bytes needed and the bytes free."""
    writer = UCVolumeWriter("memory://room-full/ckpt", staging_dir=tmp_path / "staging")
    with pytest.raises(StorageError, match=r"staging_dir=.* bytes are free, and it needs"):
        save(dict(HUGE), writer, process_group=None, no_dist=True)


def test_a_staging_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Below a file no directory can be made: the error says so and names the argument."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="staging_dir="):
        saved(tmp_path / "ckpt", VALUES, staging_dir=tmp_path / "file" / "staging")


@needs_root
def test_a_staging_directory_that_fails_in_mid_save_is_named(tmp_path: Path) -> None:
    """Filled up or made read-only after the look at its room, the error says which place it is."""
    staging = tmp_path / "staging"
    staging.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(staging)]
    subprocess.run(mount, check=True)
    try:
        for change, told in [("size=1m", "No space left"), ("ro", "Read-only")]:
            detour = Detour(staging)
            detour.prepare(8 << 20)
            subprocess.run(["mount", "-o", f"remount,{change}", str(staging)], check=True)
            with (
                pytest.raises(OSError, match=rf"{told}.*staging_dir=|staging_dir=.*{told}"),
                detour.open_write(open_storage("memory://room-staging"), "x") as file,
            ):
                ShardStream(file).write(bytes(9 << 20))
            subprocess.run(["mount", "-o", "remount,rw,size=16m", str(staging)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(staging)], check=True)


@pytest.mark.parametrize("given", ["", "s3://bucket/x", "/Volumes/a/b/c"])
def test_a_staging_directory_elsewhere_is_refused(given: str) -> None:
    """A URL, a volume or nothing is no local disk; writer and plugin say so when they are made."""
    with pytest.raises(InvalidArgumentError, match="staging_dir="):
        UCVolumeWriter("/Volumes/a/b/c/d", staging_dir=given)
    with pytest.raises(InvalidArgumentError, match="staging_dir="):
        AirCheckpointIO(staging_dir=given)


def test_a_place_that_cannot_be_made_fails_the_call_of_the_save(tmp_path: Path) -> None:
    """Below a file the first save raises at its call; nothing was staged."""
    (tmp_path / "file").write_text("mine")
    io = AirCheckpointIO()
    with pytest.raises(SaveFailedError, match="file"):
        io.save_checkpoint({"state_dict": VALUES}, str(tmp_path / "file" / "ckpt"))
    assert io.stats == []


def test_the_plugin_saves_by_way_of_a_staging_directory(tmp_path: Path) -> None:
    """AirCheckpointIO(staging_dir=...) publishes the same checkpoint."""
    io = AirCheckpointIO(staging_dir=tmp_path / "staging")
    io.save_checkpoint({"state_dict": dict(VALUES)}, str(tmp_path / "ckpt"))
    io.wait()
    got = io.load_checkpoint(str(tmp_path / "ckpt"))["state_dict"]
    assert all(torch.equal(got[key], VALUES[key]) for key in VALUES)
    assert os.listdir(tmp_path / "staging") == []
