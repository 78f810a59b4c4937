"""Which checkpoint is newest, which is whole, and which may go."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning import AirCheckpointIO, export_checkpoint
from air_lightning.checkpoint import attempt
from air_lightning.checkpoint.catalog import (
    CheckpointRecord,
    find_latest_valid,
    list_checkpoints,
    prune_checkpoints,
    remove_checkpoint,
    verify_checkpoint,
)
from air_lightning.checkpoint.clone import clone
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    FileRecord,
    Manifest,
    step_in_name,
)
from air_lightning.checkpoint.order import as_published
from air_lightning.errors import (
    AirError,
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    InvalidPathError,
    StorageError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make(root: Path | str, name: str, *, step: int | None = None, time: float | None = None) -> str:
    """A checkpoint of a few tensors; ``time`` is when it was published."""
    path = f"{root}/{name}"
    value = {"w": torch.ones(50), "b": torch.ones(7), "lr": 0.1}
    dcp.save(value, storage_writer=UCVolumeWriter(path, global_step=step))
    if time is not None:
        manifest = Path(path, MANIFEST)
        document = json.loads(manifest.read_bytes())
        document["time"] = f"2026-01-01T00:00:{time:09.6f}+00:00"
        manifest.write_text(json.dumps(document))
    return path


def make_plain(root: Path, name: str) -> str:
    """A checkpoint by torch's own writer: no manifest."""
    dcp.save({"w": torch.ones(50)}, storage_writer=dcp.FileSystemWriter(root / name))
    return f"{root}/{name}"


def named(records: list[CheckpointRecord]) -> list[str]:
    """Directory names, in order."""
    return [record.path.rpartition("/")[2] for record in records]


def test_recorded_step_beats_the_number_in_the_name_and_the_time(tmp_path: Path) -> None:
    """The highest recorded global step is newest, whatever names and times say."""
    make(tmp_path, "step_900", step=3)
    newest = make(tmp_path, "a", step=20)
    make(tmp_path, "step_10", step=10)
    assert find_latest_valid(tmp_path) == newest
    assert named(list_checkpoints(tmp_path)) == ["a", "step_10", "step_900"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_1000", 1000),
        ("step-7", 7),
        ("epoch=1-step=200.ckpt", 200),
        ("epoch=1-step=200-v2.ckpt", 200),
        ("epoch=09-loss=0.25-step=12", 12),
        ("global_step5", 5),
        ("ckpt_3_17", 17),
        ("42", 42),
        ("last", None),
        ("last-v1.ckpt", None),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    """The number after 'step', else the last number, is a directory's step."""
    assert step_in_name(f"/Volumes/a/b/c1/{name}") == step


def test_without_a_recorded_step_the_name_tells(tmp_path: Path) -> None:
    """Plain DCP users get the highest number in the name, numerically."""
    make(tmp_path, "step_9")
    newest = make(tmp_path, "step_10")
    make_plain(tmp_path, "step_8")
    make(tmp_path, "best")
    assert find_latest_valid(tmp_path) == newest
    assert [r.step for r in list_checkpoints(tmp_path)] == [10, 9, 8, None]


def test_a_directory_of_lightnings_tells_its_step_from_within(tmp_path: Path) -> None:
    """A sharded ``last.ckpt`` that Lightning wrote is newest where it is of the latest step."""
    for name, extra in (("step=6.ckpt", 6), ("last.ckpt", 8), ("other", 9)):
        dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / name))
        torch.save({"global_step": extra}, tmp_path / name / "meta.pt")
    (tmp_path / "other" / "meta.pt").write_bytes(b"garbage")
    assert find_latest_valid(tmp_path) == str(tmp_path / "last.ckpt")
    steps = {os.path.basename(each.path): each.step for each in list_checkpoints(tmp_path)}
    assert steps == {"step=6.ckpt": 6, "last.ckpt": 8, "other": None}


def test_ties_go_to_the_later_one(tmp_path: Path) -> None:
    """Of two checkpoints of one step, the one published later is newest."""
    make(tmp_path, "z-first", step=5, time=1.0)
    later = make(tmp_path, "a-second", step=5, time=2.0)
    assert find_latest_valid(tmp_path) == later


@pytest.mark.parametrize(("first", "second"), [("x", "x.alt"), ("x.alt", "x")])
@pytest.mark.parametrize("step", [3, 1])
def test_of_two_saves_of_one_path_the_later_is_newest(
    tmp_path: Path, first: str, second: str, step: int
) -> None:
    """Between <path> and <path>.alt the time decides, whatever their steps; among others, steps."""
    make(tmp_path, first, step=3, time=1.0)
    later = make(tmp_path, second, step=step, time=2.0)
    assert attempt.newest(f"{tmp_path}/x", None) == later
    assert attempt.choose(f"{tmp_path}/x", None) == f"{tmp_path}/{first}"
    assert find_latest_valid(tmp_path) == later
    make(tmp_path, "other", step=2, time=3.0)
    wanted = [second, first, "other"] if step == 3 else ["other", second, first]
    assert named(list_checkpoints(tmp_path)) == wanted
    assert find_latest_valid(tmp_path) == f"{tmp_path}/{wanted[0]}"
    assert first in named(prune_checkpoints(tmp_path, keep_last=1))


def test_a_torn_later_save_of_a_path_replaces_nothing(tmp_path: Path) -> None:
    """While what was saved last is damaged, the save before it counts, with its own step."""
    sound = make(tmp_path, "x", step=3, time=1.0)
    make(tmp_path, "other", step=2, time=1.0)
    short_shard(make(tmp_path, "x.alt", step=1, time=2.0))
    assert find_latest_valid(tmp_path) == attempt.newest(sound, None) == sound
    assert named(list_checkpoints(tmp_path)) == ["x", "other", "x.alt"]


def test_without_times_the_step_decides_between_two_saves_of_a_path() -> None:
    """Where one of the two has no time, the higher step is the later, and of two alike the alt."""
    records = [CheckpointRecord("x", step=2, time=9.0), CheckpointRecord("x.alt", step=3)]
    assert as_published(records)[-1].path == "x.alt"
    assert as_published(reversed(records))[-1].path == "x.alt"
    alike = [CheckpointRecord("x", step=2), CheckpointRecord("x.alt", step=2)]
    assert as_published(alike)[-1].path == "x.alt"


def test_weights_replace_nothing_that_can_be_resumed_from(tmp_path: Path) -> None:
    """Weights saved later to a path, at whatever step, leave the state that lies beside them."""
    state = make(tmp_path, "last.ckpt", step=10, time=1.0)
    make(tmp_path, "other", step=5, time=1.0)
    later = make(tmp_path, "last.ckpt.alt", step=3, time=2.0)
    document = json.loads(Path(later, MANIFEST).read_bytes())
    document["weights_only"] = True
    Path(later, MANIFEST).write_text(json.dumps(document))
    assert find_latest_valid(tmp_path, resumable=True) == state
    assert find_latest_valid(tmp_path) == f"{tmp_path}/other"


def no_marker(path: str) -> None:
    """Killed before the commit."""
    os.remove(f"{path}/{METADATA}")


def missing_shard(path: str) -> None:
    """A file was deleted."""
    os.remove(f"{path}/__0_1.distcp")


def short_shard(path: str) -> None:
    """A file was cut."""
    os.truncate(f"{path}/__0_0.distcp", 10)


def short_marker(path: str) -> None:
    """The marker was cut."""
    os.truncate(f"{path}/{METADATA}", 10)


def empty_marker(path: str) -> None:
    """The marker has no byte."""
    os.truncate(f"{path}/{METADATA}", 0)


def garbage_manifest(path: str) -> None:
    """The manifest is no JSON."""
    Path(path, MANIFEST).write_bytes(b"\xff{")


def later_manifest(path: str) -> None:
    """The manifest is of a later format."""
    Path(path, MANIFEST).write_text('{"format_version": 2}')


def manifest_is_a_directory(path: str) -> None:
    """Reading the manifest fails."""
    os.remove(f"{path}/{MANIFEST}")
    os.mkdir(f"{path}/{MANIFEST}")


DAMAGES = [
    (no_marker, "never completed"),
    (missing_shard, "__0_1.distcp is missing"),
    (short_shard, "__0_0.distcp has 10 bytes"),
    (short_marker, ".metadata has 10 bytes"),
    (empty_marker, ".metadata has 0 bytes"),
    (garbage_manifest, "no checkpoint manifest"),
    (later_manifest, "Upgrade"),
    (manifest_is_a_directory, "cannot be read"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_torn_newest_is_passed_over_with_its_reason(
    tmp_path: Path, damage: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with the newest, the one before is found, and one warning says why."""
    sound, torn = make(tmp_path, "step_1"), make(tmp_path, "step_2")
    damage(torn)
    with caplog.at_level(logging.WARNING, "air_lightning"):
        assert find_latest_valid(tmp_path) == sound
    warnings = [r.getMessage() for r in caplog.records if r.name == "air_lightning"]
    assert len(warnings) == 1
    assert torn in warnings[0]
    assert reason in warnings[0]
    records = {record.path: record for record in list_checkpoints(tmp_path)}
    assert not records[torn].valid
    assert reason in str(records[torn].reason)
    assert records[torn].step == 2
    assert records[sound].valid
    assert records[sound].reason is None
    with pytest.raises(CorruptCheckpointError) as caught:
        verify_checkpoint(torn)
    assert torn in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_marker_of_garbage_is_passed_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the right size, too: the search reads the marker of the one that it chooses."""
    build = make if kind == "ours" else make_plain
    sound, torn = build(tmp_path, "step_1"), build(tmp_path, "step_2")
    marker = Path(torn, METADATA)
    marker.write_bytes(random.Random(7).randbytes(marker.stat().st_size - 1) + b"!")
    assert find_latest_valid(tmp_path) == sound
    assert f"{torn}: its {METADATA} is not what was written." in caplog.text


def test_a_warning_is_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says why a checkpoint is passed over, and gives no advice that was taken already."""
    make(tmp_path, "step_1")
    garbage_manifest(make(tmp_path, "step_2"))
    later_manifest(make(tmp_path, "step_3"))
    find_latest_valid(tmp_path)
    warnings = [r.getMessage() for r in caplog.records if r.name == "air_lightning"]
    assert len(warnings) == 2
    assert all(text.endswith(".") and not text.endswith("..") for text in warnings)
    assert not any("find_latest_valid" in text for text in warnings)


@pytest.mark.parametrize("empty", ["marker", "shards"])
def test_plain_dcp_needs_a_marker_and_a_shard(tmp_path: Path, empty: str) -> None:
    """Without a manifest, an empty .metadata or no shard at all is not valid."""
    path = make_plain(tmp_path, "step_1")
    assert verify_checkpoint(path).valid
    if empty == "marker":
        os.truncate(f"{path}/{METADATA}", 0)
    else:
        os.remove(f"{path}/__0_0.distcp")
    assert find_latest_valid(tmp_path) is None


def test_deep_verification_finds_a_flipped_bit(tmp_path: Path) -> None:
    """Sizes alone do not tell of altered contents; deep verification names file and checksums."""
    path = make(tmp_path, "step_1")
    shard = Path(path, "__0_0.distcp")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert verify_checkpoint(path).valid
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp has checksum crc32:"):
        verify_checkpoint(path, deep=True)


def test_deep_verification_of_plain_dcp_loads_every_item(tmp_path: Path) -> None:
    """Without a manifest, deep verification finds a shard that lacks its end."""
    path = make_plain(tmp_path, "step_1")
    assert verify_checkpoint(path, deep=True).valid
    os.truncate(f"{path}/__0_0.distcp", 100)
    assert verify_checkpoint(path).valid
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp ends before w"):
        verify_checkpoint(path, deep=True)


def test_records_tell_what_is_on_disk(tmp_path: Path) -> None:
    """Size is the bytes on disk, time the moment of the commit, world size that of the save."""
    began = time.time()
    path = make(tmp_path, "x", step=4)
    ended = time.time()
    (record,) = list_checkpoints(tmp_path)
    assert record == verify_checkpoint(path) == verify_checkpoint(path, deep=True)
    assert record.size == sum(entry.stat().st_size for entry in os.scandir(path))
    assert began - 1e-3 < float(record.time or 0) < ended + 1e-3  # which is stored rounded
    assert (record.path, record.step, record.world_size) == (path, 4, 1)


def test_what_is_no_checkpoint_is_not_listed(tmp_path: Path) -> None:
    """Files, empty, hidden and foreign directories are no checkpoints, nor is the root itself."""
    make(tmp_path, "nested/step_1")
    (tmp_path / "logs").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(b"x")
    (tmp_path / "one.ckpt").write_bytes(b"x")
    make(tmp_path, ".hidden")
    assert list_checkpoints(tmp_path) == []
    assert find_latest_valid(tmp_path) is None
    assert find_latest_valid(tmp_path / "nested" / "step_1") is None


def test_a_missing_root_has_no_checkpoints(tmp_path: Path) -> None:
    """A run that starts fresh asks before its directory exists."""
    assert find_latest_valid(tmp_path / "missing") is None
    assert list_checkpoints(tmp_path / "missing") == []
    assert prune_checkpoints(tmp_path / "missing", keep_last=1) == []


def test_bad_roots_and_paths_are_errors_of_ours(tmp_path: Path) -> None:
    """A root that is a file, no path at all, or no checkpoint each raise a clear error."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError):
        list_checkpoints(tmp_path / "file")
    with pytest.raises(InvalidPathError):
        find_latest_valid("/Volumes/a/b")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="holds no checkpoint; wanted"):
            verify_checkpoint(path)


@pytest.mark.parametrize("parent", ["/Volumes/a/b/c", "memory://missing", "{}", "{}/file"])
def test_a_path_that_does_not_exist_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    """Reading, verifying and exporting name a mistyped path as missing, not as a torn save."""
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    path = f"{parent.format(tmp_path)}/step_1"
    for read in (
        verify_checkpoint,
        lambda path: UCVolumeReader(path).read_metadata(),
        lambda path: export_checkpoint(path, tmp_path / "o.ckpt"),
        lambda path: AirCheckpointIO().load_checkpoint(path),
    ):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path} does not exist, so it holds no checkpoint.")


@pytest.mark.parametrize("kind", ["volume", "memory"])
def test_every_kind_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Volume paths and URLs list, verify and prune alike, under the names that users see."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    root = "/Volumes/a/b/c" if kind == "volume" else f"memory://{tmp_path.name}/root"
    for step in (1, 2, 3):
        make(root, f"step_{step}", step=step)
    assert find_latest_valid(root) == f"{root}/step_3"
    assert verify_checkpoint(f"{root}/step_2", deep=True).step == 2
    assert named(prune_checkpoints(root, keep_last=2)) == ["step_1"]
    assert named(list_checkpoints(root)) == ["step_3", "step_2"]


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    """keep_last newest and multiples of keep_every stay; a dry run only says what would go."""
    for step in range(1, 8):
        make(tmp_path, f"step_{step}", step=step)
    wanted = ["step_5", "step_4", "step_2", "step_1"]
    options: dict[str, Any] = {"keep_last": 2, "keep_every": 3}
    assert named(prune_checkpoints(tmp_path, dry_run=True, **options)) == wanted
    assert len(list_checkpoints(tmp_path)) == 7
    assert named(prune_checkpoints(tmp_path, **options)) == wanted
    assert sorted(os.listdir(tmp_path)) == ["step_3", "step_6", "step_7"]


def test_pruning_counts_sound_ones_only(tmp_path: Path) -> None:
    """Torn checkpoints do not use up keep_last; older ones go, newer ones may be in the writing."""
    torn = [make(tmp_path, f"step_{step}", step=step) for step in (1, 9)]
    for path in torn:
        no_marker(path)
        for entry in os.scandir(path):
            os.utime(entry.path, (1, 1))
    for step in (2, 3):
        make(tmp_path, f"step_{step}", step=step)
    assert named(prune_checkpoints(tmp_path, keep_last=1)) == ["step_2", "step_1"]
    assert sorted(os.listdir(tmp_path)) == ["step_3", "step_9"]


def test_a_save_in_progress_is_never_pruned(tmp_path: Path) -> None:
    """An unfinished directory with later files than the newest sound one's stays."""
    make(tmp_path, "step_5", step=5)
    writing = make(tmp_path, "step_2", step=2)
    no_marker(writing)
    later = os.stat(tmp_path / "step_5" / METADATA).st_mtime + 10
    os.utime(f"{writing}/__0_0.distcp", (later, later))
    assert prune_checkpoints(tmp_path, keep_last=1) == []


def test_with_nothing_sound_nothing_is_pruned(tmp_path: Path) -> None:
    """Where no checkpoint is complete, even damaged ones stay: they are all there is."""
    for step in (1, 2):
        short_shard(make(tmp_path, f"step_{step}", step=step))
    assert prune_checkpoints(tmp_path, keep_last=1) == []


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}])
def test_pruning_refuses_to_keep_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """keep_last=0 would delete the newest checkpoint; it is refused with the value."""
    with pytest.raises(InvalidArgumentError, match="=0 was given"):
        prune_checkpoints(tmp_path, **options)


def make_small(root: Path, name: str, step: int, links: int = 0, twins: int = 0) -> list[str]:
    """A checkpoint of almost no bytes, with symbolic links and hard-linked copies; all names."""
    path = root / name
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x")
    (path / MANIFEST).write_bytes(
        Manifest({"__0_0.distcp": FileRecord(1, None)}, global_step=step).to_bytes()
    )
    (path / METADATA).write_bytes(b"m")
    for number in range(twins):
        clone(str(path), f"{path}.twin{number}")
    for number in range(links):
        os.symlink(name, f"{path}.link{number}")
    return [
        name,
        *(f"{name}.twin{number}" for number in range(twins)),
        *(f"{name}.link{number}" for number in range(links)),
    ]


@pytest.mark.parametrize("second", ["link", "twin"])
def test_two_names_of_one_checkpoint_count_once(tmp_path: Path, second: str) -> None:
    """What save_last adds, a link or a copy that shares the files, neither counts nor goes."""
    for step in (1, 2):
        make(tmp_path, f"step_{step}", step=step)
    newest = make(tmp_path, "step_3", step=3)
    if second == "link":
        os.symlink("step_3", tmp_path / "last.ckpt")
    else:
        clone(newest, str(tmp_path / "last.ckpt"))
    assert named(prune_checkpoints(tmp_path, keep_last=2)) == ["step_1"]
    assert named(prune_checkpoints(tmp_path, keep_last=1)) == ["step_2"]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step_3"]
    assert verify_checkpoint(tmp_path / "last.ckpt", deep=True).step == 3


def test_a_link_to_plain_dcp_counts_with_what_it_leads_to(tmp_path: Path) -> None:
    """Where only names tell steps, a link without one has the step of its checkpoint."""
    for step in (1, 2):
        make_plain(tmp_path, f"step_{step}")
    os.symlink("step_2", tmp_path / "last")
    assert named(prune_checkpoints(tmp_path, keep_last=1)) == ["step_1"]
    assert sorted(os.listdir(tmp_path)) == ["last", "step_2"]


@settings(max_examples=60, deadline=None)
@given(
    checkpoints=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5),
    elsewhere=st.booleans(),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 3),
)
def test_pruning_keeps_or_deletes_all_names_of_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: list[tuple[int, int]],
    elsewhere: bool,
    keep_last: int,
    keep_every: int | None,
) -> None:
    """Each checkpoint counts once, whatever its names; a link to elsewhere counts for none."""
    base = tmp_path_factory.mktemp("prune")
    root = base / "root"
    names = {
        step: make_small(root, f"c{step}", step, links, twins)
        for step, (links, twins) in enumerate(checkpoints)
    }
    if elsewhere:
        make_small(base, "outside", 99)
        os.symlink(base / "outside", root / "outside.link")
    steps = sorted(names, reverse=True)
    kept = {s for s in steps if s in steps[:keep_last] or (keep_every and s % keep_every == 0)}
    wanted = sorted(name for step in names if step not in kept for name in names[step])
    before = sorted(os.listdir(root))
    options: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every}
    assert sorted(named(prune_checkpoints(root, dry_run=True, **options))) == wanted
    assert sorted(os.listdir(root)) == before
    assert sorted(named(prune_checkpoints(root, **options))) == wanted
    assert sorted(os.listdir(root)) == sorted(set(before) - set(wanted))
    for left in os.listdir(root):
        assert verify_checkpoint(root / left).valid


@settings(max_examples=80, deadline=None)
@given(
    families=st.lists(
        st.tuples(
            st.sampled_from(["step={}.ckpt", "{}", "epoch=0-step={}", "model-{}-of-9"]),
            st.sampled_from(["true", "false", "none"]),
            st.dictionaries(
                st.integers(0, 60),
                st.tuples(st.sampled_from(["whole", "torn", "foreign"]), st.booleans()),
                max_size=14,
            ),
        ),
        max_size=3,
        unique_by=lambda family: family[0],
    ),
    resumable=st.booleans(),
)
def test_the_search_finds_what_a_look_at_all_would(
    tmp_path_factory: pytest.TempPathFactory, families: list[Any], resumable: bool
) -> None:
    """Whether a family's names tell the steps or not, what is newest is what is found."""
    root = tmp_path_factory.mktemp("search")
    for shape, told, members in families:
        for number, (state, weights_only) in members.items():
            name = shape.format(number)
            recorded = {"true": step_in_name(name), "false": 1000 - number, "none": None}[told]
            make_state(root / name, state, recorded, weights_only)
    looked = [record for record in list_checkpoints(root) if record.valid]
    wanted = [record.path for record in looked if not (resumable and record.weights_only)]
    assert find_latest_valid(root, resumable=resumable) == next(iter(wanted), None)


def test_a_name_is_not_believed_where_the_sample_told_nothing(tmp_path: Path) -> None:
    """Foreign folders named like a checkpoint that lies do not hide it."""
    for number in range(5):
        make_state(tmp_path / f"step={number}.ckpt", "foreign", None, weights_only=False)
    shutil.rmtree(tmp_path / "step=1.ckpt")
    make_state(tmp_path / "step=1.ckpt", "whole", 999, weights_only=False)
    make_state(tmp_path / "2", "whole", 2, weights_only=False)
    assert find_latest_valid(tmp_path) == str(tmp_path / "step=1.ckpt")


def make_state(path: Path, state: str, step: int | None, weights_only: bool) -> None:
    """A directory: a whole checkpoint, one that lacks a shard's bytes, or none at all."""
    path.mkdir()
    if state == "foreign":
        (path / "notes.txt").touch()
        return
    size = 1 if state == "whole" else 2
    manifest = Manifest(
        {"__0_0.distcp": FileRecord(size, None)}, global_step=step, weights_only=weights_only
    )
    (path / MANIFEST).write_bytes(manifest.to_bytes())
    (path / "__0_0.distcp").write_bytes(b"x")
    (path / METADATA).write_bytes(b"m")


def test_a_large_foreign_directory_is_not_listed_to_its_end(tmp_path: Path) -> None:
    """Beside checkpoints, folders of data with higher numbers are passed over without a word."""
    sound = make(tmp_path, "step_1", step=1)
    (tmp_path / "images2024").mkdir()
    for number in range(1100):
        (tmp_path / "images2024" / f"{number}.png").touch()
    assert find_latest_valid(tmp_path) == sound
    assert named(list_checkpoints(tmp_path)) == ["step_1"]


def test_links_that_lead_nowhere_or_in_circles_are_passed_over(tmp_path: Path) -> None:
    """A root with odd links beside its checkpoints is searched like any other."""
    sound = make(tmp_path, "step_1", step=1)
    os.symlink("loop=9", tmp_path / "loop=9")
    os.symlink("nowhere", tmp_path / "step_9")
    os.symlink("x" * 300, tmp_path / "step_8")  # a name that no directory can have
    os.symlink("step_1", tmp_path / "last")
    assert find_latest_valid(tmp_path) in (sound, f"{tmp_path}/last")
    assert sorted(named(list_checkpoints(tmp_path))) == ["last", "step_1"]


def test_removing_takes_directories_and_files(tmp_path: Path) -> None:
    """A directory with all in it, a single file, and what is not there: each is gone after."""
    path = make(tmp_path, "step_1")
    (tmp_path / "one.ckpt").write_bytes(b"x")
    for gone in (path, tmp_path / "one.ckpt", tmp_path / "missing"):
        remove_checkpoint(gone)
    assert os.listdir(tmp_path) == []


def test_a_removal_cut_short_leaves_no_valid_checkpoint(tmp_path: Path) -> None:
    """.metadata goes first: where the rest cannot be deleted, nothing valid is left."""
    path = make(tmp_path, "step_1")
    hook = (
        "import os, sys\n"
        "def stop(event, arguments):\n"
        "    if event == 'os.remove' and not str(arguments[0]).endswith('.metadata'):\n"
        "        os._exit(9)\n"
        "from air_lightning.checkpoint.catalog import remove_checkpoint\n"
        "sys.addaudithook(stop)\n"
        f"remove_checkpoint({path!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", hook], check=False)
    assert done.returncode == 9
    assert sorted(os.listdir(path))[0] == "__0_0.distcp"
    assert find_latest_valid(tmp_path) is None


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"format_version": 1},
        {"format_version": 1, "files": {"a": {"size": -1, "checksum": None}}},
        {"format_version": 1, "files": {"a": {"size": 1, "checksum": 3}}},
        {"format_version": 1, "files": {}, "global_step": "x"},
        {"format_version": 1, "files": {}, "time": "yesterday"},
        {"format_version": 1, "files": {}, "versions": 3},
    ],
)
def test_manifests_of_another_shape_are_refused(document: Any) -> None:
    """JSON that is no manifest raises CorruptCheckpointError naming the file."""
    with pytest.raises(CorruptCheckpointError, match="/Volumes/x"):
        Manifest.from_bytes(json.dumps(document).encode(), "/Volumes/x")


def test_a_manifest_survives_its_own_format() -> None:
    """What to_bytes writes, from_bytes reads back equal."""
    manifest = Manifest({}, 1, 2, 3, 4.5, {"torch": "2"})
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest


def test_a_directory_that_vanishes_while_looked_at_is_no_error(tmp_path: Path) -> None:
    """Another process may prune at the same time: what went is not listed, nothing raises."""
    kept = make(tmp_path, "step_1")
    gone = make(tmp_path, "step_2")
    shutil.rmtree(gone)
    os.symlink(f"{tmp_path}/nowhere", gone)
    assert find_latest_valid(tmp_path) == kept
    with pytest.raises(AirError):
        verify_checkpoint(gone)
