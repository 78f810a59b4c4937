"""Checkpoints through a real FUSE mount: few requests, and trouble that passes is outlived."""

import errno
import os
from collections import Counter

import pytest
import torch
from slow_mount import has_fuse, slow_mount

from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.planner import LoadPlanner, load, save
from air_lightning.volumes.storage import open_storage

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not has_fuse() and not os.environ.get("AIR_REQUIRE_ALL"), reason="no FUSE on this machine"
    ),
]

VALUES = {f"state_dict.t{i}": torch.randn(20_000) for i in range(60)}


@pytest.fixture(params=[False, True], ids=["rename", "no rename"])
def mount(tmp_path, request):
    """A mount of an empty directory, with and without renames."""
    source = tmp_path / "source"
    source.mkdir()
    with slow_mount(source, refuse_rename=request.param) as mounted:
        yield mounted


def saved(path, **options):
    """Save the values through our writer."""
    save(dict(VALUES), UCVolumeWriter(path, **options), process_group=None, no_dist=True)


def assert_loads(path, **options):
    """All values come back."""
    into = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    reader = UCVolumeReader(path, **options)
    load(dict(into), reader, LoadPlanner(weights_only=True), process_group=None, no_dist=True)
    assert all(torch.equal(into[key], VALUES[key]) for key in VALUES)


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_opens_each_file_once_and_reads_each_byte_once(mount, verify):
    """Sixty tensors of two shards take two opens of shards, and reads of no more than they hold."""
    saved(f"{mount}/ckpt")
    before = len(mount.calls())
    assert_loads(f"{mount}/ckpt", verify=verify)
    calls = mount.calls()[before:]
    opened = Counter(path for operation, path in calls if operation == "open")
    assert {path: n for path, n in opened.items() if "distcp" in path} == {
        "/ckpt/__0_0.distcp": 1,
        "/ckpt/__0_1.distcp": 1,
    }
    reads = [path for operation, path in calls if operation == "read" and "distcp" in path]
    shard = os.path.getsize(f"{mount}/ckpt/__0_0.distcp")
    assert len(reads) <= 2 * (shard // (64 << 10) + 2)


@pytest.mark.parametrize("operation", ["read", "open"])
def test_errors_that_pass_are_outlived(mount, operation):
    """A read or an open that fails twice with EIO is tried again, on a new handle."""
    saved(f"{mount}/ckpt")
    mount.fail(operation, errno.EIO, name="__0_0", times=2)
    assert_loads(f"{mount}/ckpt")


def test_a_directory_whose_state_cannot_be_asked_for_a_moment_is_not_a_file(tmp_path):
    """That it is there the kernel knows by itself; what it is comes with the second try."""
    with slow_mount(tmp_path) as mount:
        storage = open_storage(f"file://{mount}")
        storage.make_root()
        mount.fail("getattr", errno.EIO, times=1)
        storage.make_root()
        assert mount.calls()[-1] == ["getattr", "/"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "flush"])
def test_an_error_names_the_file_wherever_it_strikes(mount, operation, number):
    """Also one that comes with fsync or close; nothing has the final name, or a hidden one."""
    mount.fail(operation, number, name=".__0_1")
    with pytest.raises(OSError, match=f"{mount}/ckpt/__0_1.distcp") as raised:
        saved(f"{mount}/ckpt")
    assert raised.value.errno == number
    assert [n for n in os.listdir(f"{mount}/ckpt") if n != "__0_0.distcp"] == []


def test_a_staged_save_is_the_same_on_a_mount(mount, tmp_path):
    """By way of a local directory the checkpoint on the mount is whole, and the directory empty."""
    saved(f"{mount}/ckpt", staging_dir=tmp_path / "staging")
    verify_checkpoint(f"{mount}/ckpt", deep=True)
    assert_loads(f"{mount}/ckpt", verify=True)
    assert os.listdir(tmp_path / "staging") == []
