"""Paths: what is one, what it normalizes to, and what errors say."""

import os
from pathlib import Path

import pytest

from air_lightning.errors import InvalidPathError, VolumeNotMountedError
from air_lightning.volumes import path as volume_path


@pytest.mark.parametrize(
    ("given", "normalized"),
    [
        ("/Volumes/a/b/c", "/Volumes/a/b/c"),
        ("/Volumes/a/b/c/d/", "/Volumes/a/b/c/d"),
        ("//Volumes/a//b/./c", "/Volumes/a/b/c"),
        ("dbfs:/Volumes/a/b/c/x y", "/Volumes/a/b/c/x y"),
        (Path("/Volumes/a/b/c"), "/Volumes/a/b/c"),
        ("s3://bucket/key/", "s3://bucket/key"),
        ("S3://bucket", "s3://bucket"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("file:///tmp/x/", "file:///tmp/x"),
        ("memory://a/b", "memory://a/b"),
        ("memory://", "memory://"),
    ],
)
def test_a_path_is_normalized_once_and_for_all(given, normalized):
    """Normalizing gives the path that users see, and changes it no further."""
    assert volume_path.normalize(given) == normalized
    assert volume_path.normalize(normalized) == normalized


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "empty path"),
        ("   ", "empty path"),
        ("/tmp/data", "file:///tmp/data"),
        ("data", "file://"),
        ("/Volumes", "names no volume"),
        ("/Volumes/a/b", "names no volume"),
        ("/Volumes//b/c", "names no volume"),
        ("/VolumesX/a/b/c", "wanted is a volume path"),
        ("/Volumes/a/b/c/../d", "'..' segment"),
        ("s3://bucket/../x", "'..' segment"),
        ("/Volumes/a/b/c\0", "NUL byte"),
        ("s3://", "names no bucket"),
        ("file://tmp/x", "absolute path"),
        ("dbfs:/tmp/x", "only /Volumes"),
        (Path("s3://bucket/key"), "Pass URLs as str"),
        (b"/Volumes/a/b/c", "bytes"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_what_is_no_path_is_refused_with_the_remedy(given, said):
    """The error is a ValueError that says what was given and what is wanted."""
    with pytest.raises(InvalidPathError, match="wanted|write the path") as caught:
        volume_path.normalize(given)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_local_paths_are_made_absolute_where_they_are_welcome(tmp_path, monkeypatch):
    """Relative and upward paths are resolved; one that leads into /Volumes is a volume path."""
    monkeypatch.chdir(tmp_path)
    assert volume_path.normalize("runs/x", allow_local=True) == f"{tmp_path}/runs/x"
    assert volume_path.normalize(tmp_path / "x", allow_local=True) == f"{tmp_path}/x"
    assert volume_path.normalize("../y", allow_local=True) == f"{tmp_path.parent}/y"
    with pytest.raises(InvalidPathError, match="names no volume"):
        volume_path.normalize("/tmp/../Volumes/a", allow_local=True)


@pytest.mark.parametrize(
    ("path", "parent", "name"),
    [
        ("/Volumes/a/b/c/d", "/Volumes/a/b/c", "d"),
        ("s3://bucket/key", "s3://bucket", "key"),
        ("s3://bucket", "s3://bucket", ""),
        ("memory://x", "memory://", "x"),
        ("file:///x", "file:///", "x"),
        ("/x", "/", "x"),
    ],
)
def test_parent_and_name_take_apart_what_join_puts_together(path, parent, name):
    """join(parent, name) is the path again."""
    assert (volume_path.parent(path), volume_path.name(path)) == (parent, name)
    assert volume_path.join(parent, name) == path


def test_the_stand_in_replaces_volumes_on_this_machine_only(tmp_path, monkeypatch):
    """AIR_VOLUMES_ROOT is where the bytes are; file:// and local paths are where they say."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", f"{tmp_path}/")
    assert volume_path.local_dir("/Volumes/a/b/c/d") == f"{tmp_path}/a/b/c/d"
    assert volume_path.local_dir("file:///x/y") == "/x/y"
    assert volume_path.local_dir("/x/y") == "/x/y"
    assert volume_path.local_dir("s3://bucket/key") is None


def test_a_stand_in_that_is_not_there_is_named(tmp_path, monkeypatch):
    """The error gives the variable and its value."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path / "gone"))
    with pytest.raises(VolumeNotMountedError, match="AIR_VOLUMES_ROOT=.*gone"):
        volume_path.local_dir("/Volumes/a/b/c")


@pytest.mark.skipif(os.path.isdir("/Volumes"), reason="this machine has volumes")
def test_no_volumes_at_all_names_both_remedies(monkeypatch):
    """Without mount and variable the error says where to run, and what to set."""
    monkeypatch.delenv("AIR_VOLUMES_ROOT", raising=False)
    with pytest.raises(VolumeNotMountedError, match=r"not mounted.*AIR_VOLUMES_ROOT="):
        volume_path.local_dir("/Volumes/a/b/c")
