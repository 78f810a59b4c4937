"""UCVolumeWriter and UCVolumeReader against torch's own, and against damage."""

import inspect
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.manifest import MANIFEST, METADATA, Manifest
from air_lightning.errors import (
    AirError,
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    InvalidArgumentError,
    InvalidPathError,
    StorageError,
    UnsafeCheckpointError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def state(fill: float = 1.0) -> dict[str, Any]:
    """Tensors of many kinds, and objects; each value tells ``fill``."""
    base = torch.full((64, 32), fill)
    return {
        "model": {
            "weight": base + torch.arange(32),
            "view": torch.arange(1000.0)[10:20] * fill,
            "transposed": (base + torch.arange(64)[:, None]).t(),
            "half": torch.full((5,), fill, dtype=torch.bfloat16),
            "scalar": torch.tensor(fill),
            "empty": torch.zeros(0, 3),
        },
        "lr": [fill, {"name": "adam"}],
        "step": int(fill),
    }


def zeros() -> dict[str, Any]:
    """The same tree with nothing in it."""
    model = {key: torch.zeros_like(value) for key, value in state()["model"].items()}
    return {"model": model, "lr": [None, {"name": None}], "step": None}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Every tensor equal bit for bit, every object equal."""
    for key, value in wanted["model"].items():
        assert torch.equal(got["model"][key], value), key
        assert got["model"][key].dtype == value.dtype
    assert got["lr"] == wanted["lr"]
    assert got["step"] == wanted["step"]


def save(path: str | Path, value: dict[str, Any] | None = None, **options: Any) -> None:
    """One process's dcp.save through our writer."""
    dcp.save(value or state(), storage_writer=UCVolumeWriter(path, **options))


def load(reader: Any) -> dict[str, Any]:
    """Load into an empty tree."""
    into = zeros()
    dcp.load(into, storage_reader=reader)
    return into


def failure(action: Callable[[], Any]) -> BaseException:
    """What one rank raised inside a DCP call."""
    with pytest.raises(CheckpointException) as caught:
        action()
    return caught.value.failures[0][0]


def shards(directory: Path) -> list[str]:
    """The shard files, by name."""
    return sorted(name for name in os.listdir(directory) if name.endswith(".distcp"))


@pytest.fixture(params=["local", "volume", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint path of each kind."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    return {
        "local": str(tmp_path / "ckpt"),
        "volume": "/Volumes/a/b/c/ckpt",
        "file": f"file://{tmp_path}/ckpt",
        "memory": f"memory://{tmp_path.name}/ckpt",
    }[request.param]


def test_what_is_saved_comes_back_on_every_kind_of_path(place: str) -> None:
    """A save and a load through ours give every tensor and object back, checksums verified."""
    save(place)
    assert_same(load(UCVolumeReader(place, verify=True)), state())
    assert_same(load(UCVolumeReader(place)), state())


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 1}, {"thread_count": 5}, {"single_file_per_rank": False}]
)
def test_torchs_own_tools_read_what_we_write(tmp_path: Path, options: dict[str, Any]) -> None:
    """FileSystemReader and dcp_to_torch_save read our directory as plain DCP."""
    save(tmp_path / "ckpt", **options)
    assert_same(load(dcp.FileSystemReader(tmp_path / "ckpt")), state())
    assert_same(load(UCVolumeReader(tmp_path / "ckpt", verify=True)), state())
    dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt"), state())


def test_metadata_holds_only_torchs_classes(tmp_path: Path) -> None:
    """A machine without air_lightning unpickles .metadata: it names nothing of ours."""
    save(tmp_path)
    data = (tmp_path / METADATA).read_bytes()
    assert b"air_lightning" not in data
    assert pickle.loads(data).state_dict_metadata


@pytest.mark.parametrize("threads", [1, 2])
def test_plain_dcp_directories_are_read(tmp_path: Path, threads: int) -> None:
    """What torch's FileSystemWriter wrote, without a manifest, loads; verify checks sizes then."""
    writer = dcp.FileSystemWriter(tmp_path, thread_count=threads)
    dcp.save(state(3.0), storage_writer=writer)
    assert_same(load(UCVolumeReader(tmp_path)), state(3.0))
    assert_same(load(UCVolumeReader(tmp_path, verify=True)), state(3.0))


def test_the_manifest_tells_what_was_written(tmp_path: Path) -> None:
    """Step, epoch, world size, versions and each file's true size are in air_manifest.json."""
    save(tmp_path, global_step=7, epoch=2)
    manifest = Manifest.from_bytes((tmp_path / MANIFEST).read_bytes(), "here")
    assert (manifest.global_step, manifest.epoch, manifest.world_size) == (7, 2, 1)
    assert manifest.versions["torch"] == torch.__version__
    sizes = {name: record.size for name, record in manifest.files.items()}
    assert sizes == {n: os.path.getsize(tmp_path / n) for n in [*shards(tmp_path), METADATA]}
    document = json.loads((tmp_path / MANIFEST).read_bytes())
    assert document["format_version"] == 1
    assert document["time"].endswith("+00:00")


def test_a_view_costs_its_own_size_only(tmp_path: Path) -> None:
    """A small view of a large tensor does not write the large one."""
    save(tmp_path, {"view": torch.zeros(1_000_000)[:10]})
    assert sum(os.path.getsize(tmp_path / name) for name in shards(tmp_path)) < 10_000


def test_attributes_of_a_tensor_are_not_saved(tmp_path):
    """A tensor is saved without what the user hung on it, which might be no plain value."""
    noted = torch.randn(3, dtype=torch.complex64).conj()
    noted.note = lambda: None
    dcp.save({"t": noted}, storage_writer=UCVolumeWriter(str(tmp_path)), no_dist=True)
    loaded = {"t": torch.zeros(3, dtype=torch.complex64)}
    dcp.load(loaded, storage_reader=UCVolumeReader(str(tmp_path)), no_dist=True)
    assert torch.equal(loaded["t"], noted.resolve_conj())


def test_torchs_checksum_option_is_as_before_after_a_save(tmp_path: Path) -> None:
    """The process-wide CRC option of torch.save, which we turn off, is back after the save."""
    before = torch.serialization.get_crc32_options()
    save(tmp_path, thread_count=4)
    assert torch.serialization.get_crc32_options() == before


def test_overwriting_leaves_no_file_of_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A save with fewer files removes what the earlier one had, foreign files stay."""
    save(tmp_path, state(1.0), single_file_per_rank=False)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".__0_0.distcp.12-ab.tmp").write_text("left by a killed process")
    save(tmp_path, state(2.0), thread_count=1)
    assert sorted(os.listdir(tmp_path)) == [METADATA, "__0_0.distcp", MANIFEST, "notes.txt"]
    assert_same(load(UCVolumeReader(tmp_path, verify=True)), state(2.0))


def test_overwrite_false_refuses_a_finished_checkpoint(tmp_path: Path) -> None:
    """With overwrite=False the earlier checkpoint stays whole, and the error says so."""
    save(tmp_path, state(1.0))
    error = failure(lambda: save(tmp_path, state(2.0), overwrite=False))
    assert isinstance(error, CheckpointError)
    assert_same(load(UCVolumeReader(tmp_path, verify=True)), state(1.0))


def test_reset_to_another_path_forgets_step_and_epoch(tmp_path: Path) -> None:
    """dcp.save(checkpoint_id=...) writes there, and does not record the old path's step."""
    writer = UCVolumeWriter(tmp_path / "a", global_step=1, epoch=1)
    dcp.save(state(), checkpoint_id=str(tmp_path / "a"), storage_writer=writer)
    dcp.save(state(), checkpoint_id=str(tmp_path / "b"), storage_writer=writer)
    steps = [
        Manifest.from_bytes((tmp_path / name / MANIFEST).read_bytes(), name).global_step
        for name in ("a", "b")
    ]
    assert steps == [1, None]
    assert writer.checkpoint_id == str(tmp_path / "b")


@pytest.fixture
def process_group() -> Any:
    """A gloo group of this process alone; async_save asks for one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("cached", [False, True])
def test_async_save_stages_before_it_returns(tmp_path: Path, cached: bool) -> None:
    """dcp.async_save with our writer saves the values of the call, not later ones, CPU or not."""
    writer = UCVolumeWriter(tmp_path, cache_staged_state_dict=cached)
    for fill in (1.0, 2.0):
        value = state(fill)
        future = dcp.async_save(value, storage_writer=writer)
        value["model"]["weight"].zero_()
        future.result()
        assert_same(load(UCVolumeReader(tmp_path, verify=True)), state(fill))


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_failure_of_any_writer_thread_fails_the_save(tmp_path: Path, lost: str) -> None:
    """Whichever of two threads fails, the save fails and leaves no .metadata."""

    class Losing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == lost:
                raise OSError(5, f"reading {lost} failed")
            return super().resolve_data(write_item)

    tensors = {"a": torch.zeros(10), "b": torch.zeros(10)}
    writer = UCVolumeWriter(tmp_path, thread_count=2)
    error = failure(lambda: dcp.save(tensors, storage_writer=writer, planner=Losing()))
    assert lost in str(error)
    assert METADATA not in os.listdir(tmp_path)


@pytest.mark.parametrize("taken", ["__0_0.distcp", "__0_1.distcp"])
def test_a_shard_that_cannot_be_published_fails_the_save(tmp_path: Path, taken: str) -> None:
    """A directory in a shard's place fails the save, in either thread; nothing half remains."""
    os.mkdir(tmp_path / taken)
    error = failure(lambda: save(tmp_path))
    assert isinstance(error, OSError)
    assert not [n for n in os.listdir(tmp_path) if n == METADATA or n.endswith(".tmp")]


def test_a_checkpoint_path_that_is_a_file_is_refused_before_writing(tmp_path: Path) -> None:
    """Saving onto a file says that it is a file, and leaves it alone."""
    (tmp_path / "ckpt").write_text("mine")
    error = failure(lambda: save(tmp_path / "ckpt"))
    assert isinstance(error, StorageError)
    assert "file" in str(error)
    assert (tmp_path / "ckpt").read_text() == "mine"
    assert "no checkpoint" in str(failure(lambda: load(UCVolumeReader(tmp_path / "ckpt"))))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_step": -1}, "global_step=-1"),
        ({"global_step": 1.5}, "global_step=1.5"),
        ({"epoch": True}, "epoch=True"),
        ({"thread_count": 0}, "thread_count=0"),
        ({"serialization_format": "safetensors"}, "serialization_format"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], named: str) -> None:
    """A bad argument of the writer is named with its value, before anything is written."""
    with pytest.raises(InvalidArgumentError, match=named):
        UCVolumeWriter("/Volumes/a/b/c/d", **options)


@pytest.mark.parametrize("cls", [UCVolumeWriter, UCVolumeReader])
@pytest.mark.parametrize("path", ["", "/Volumes/a/b", "/Volumes/a/b/c/../d", "a\0b", 3])
def test_paths_that_are_none_are_refused(cls: Any, path: Any) -> None:
    """Both classes refuse what is no path; validate_checkpoint_id says so without raising."""
    with pytest.raises(InvalidPathError):
        cls(path)
    assert not cls.validate_checkpoint_id(path)
    assert cls.validate_checkpoint_id("s3://bucket/key")
    assert cls.validate_checkpoint_id("/Volumes/a/b/c/d")


def test_unknown_arguments_are_a_type_error() -> None:
    """A misspelt argument is refused as for torch's own class."""
    with pytest.raises(TypeError, match="tread_count"):
        UCVolumeWriter("/Volumes/a/b/c/d", tread_count=2)


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="torch has no such way"
)
def test_saving_without_coordination_is_refused(tmp_path: Path) -> None:
    """use_collectives=False has no moment of commit: a clear error."""
    with pytest.raises(InvalidArgumentError, match="use_collectives"):
        dcp.save(state(), storage_writer=UCVolumeWriter(tmp_path), use_collectives=False)


def test_writer_and_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """Both pickle, used or not: torch's process-based async save sends the writer."""
    writer = pickle.loads(pickle.dumps(UCVolumeWriter(tmp_path, global_step=4)))
    dcp.save(state(), storage_writer=writer)
    reader = UCVolumeReader(tmp_path)
    load(reader)
    assert_same(load(pickle.loads(pickle.dumps(reader))), state())


def test_a_directory_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    """Without .metadata the error says that the save never completed, and what to do."""
    save(tmp_path)
    os.remove(tmp_path / METADATA)
    with pytest.raises(CheckpointError, match=r"never completed.*find_latest_valid"):
        UCVolumeReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        UCVolumeReader(tmp_path / "missing").read_metadata()


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_files_of_another_size_are_named(tmp_path: Path, with_manifest: bool, damage: str) -> None:
    """A missing, short or grown shard raises CorruptCheckpointError with file, want and got."""
    save(tmp_path, thread_count=1)
    shard = tmp_path / "__0_0.distcp"
    size = shard.stat().st_size
    if not with_manifest:
        os.remove(tmp_path / MANIFEST)
    if damage == "missing":
        os.remove(shard)
    else:
        less = size - 1 if with_manifest else size // 2
        os.truncate(shard, size + 1 if damage == "long" else less)
    if damage == "long" and not with_manifest:
        assert_same(load(UCVolumeReader(tmp_path)), state())  # plain DCP does not tell sizes
        return
    error = failure(lambda: load(UCVolumeReader(tmp_path)))
    assert isinstance(error, CorruptCheckpointError)
    assert "__0_0.distcp" in str(error)
    if damage != "missing" and with_manifest:
        assert str(size) in str(error)


def test_a_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    """One altered byte anywhere in a shard fails a load with verify=True, as damage."""
    save(tmp_path, thread_count=1)
    shard = tmp_path / "__0_0.distcp"
    whole = shard.read_bytes()
    for at in (*range(0, len(whole), 1009), *range(len(whole) - 90, len(whole), 2)):
        data = bytearray(whole)
        data[at] ^= 1
        shard.write_bytes(data)
        error = failure(lambda: load(UCVolumeReader(tmp_path, verify=True)))
        assert isinstance(error, CorruptCheckpointError), at
        assert "__0_0.distcp" in str(error)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "s3://b/k", "a//b", "", "."])
def test_metadata_that_points_outside_is_refused(tmp_path: Path, path: str) -> None:
    """A path in .metadata that leaves the directory is refused before any file is opened."""
    save(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match="inside the directory"):
        UCVolumeReader(tmp_path).read_metadata()


class Runs:
    """Unpickling this makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_objects_do_not_run_code_under_torchs_own_planner(tmp_path: Path) -> None:
    """An object that would run code is refused before DefaultLoadPlanner unpickles it."""
    save(tmp_path / "ckpt", {"lr": Runs(str(tmp_path / "ran"))})
    into = {"lr": None}
    reader = UCVolumeReader(tmp_path / "ckpt")
    error = failure(lambda: dcp.load(into, storage_reader=reader))
    assert isinstance(error, UnsafeCheckpointError)
    assert "mkdir" in str(error)
    assert not (tmp_path / "ran").exists()
    dcp.load(into, storage_reader=UCVolumeReader(tmp_path / "ckpt", weights_only=False))
    assert (tmp_path / "ran").exists()


def test_numpy_numbers_and_paths_pass_torchs_own_planner(tmp_path: Path) -> None:
    """Objects that run nothing, though torch's own list lacks them, load by default."""
    value = {"score": np.float64(0.5), "array": np.arange(3), "at": Path("/a/b")}
    save(tmp_path, value)
    into: dict[str, Any] = dict.fromkeys(value)
    dcp.load(into, storage_reader=UCVolumeReader(tmp_path))
    assert (into["score"], into["array"].tolist(), into["at"]) == (0.5, [0, 1, 2], Path("/a/b"))


@pytest.mark.parametrize("damaged", range(4))
def test_the_failure_of_any_reader_thread_fails_the_load(tmp_path: Path, damaged: int) -> None:
    """Whichever of the files read at the same time is damaged, the load fails and names it."""
    value = {f"t{i}": torch.ones(100) for i in range(4)}
    save(tmp_path, value, single_file_per_rank=False)
    os.truncate(tmp_path / f"__0_{damaged}.distcp", 5)
    error = failure(lambda: dcp.load(value, storage_reader=UCVolumeReader(tmp_path)))
    assert f"__0_{damaged}.distcp" in str(error)


def test_a_tensor_entry_that_holds_an_object_is_corrupt(tmp_path: Path) -> None:
    """Where .metadata promises a tensor and the file holds something else, the entry is named."""
    save(tmp_path, {"w": torch.zeros(3)}, thread_count=1)
    other = io.BytesIO()
    torch.save([1, 2, 3], other)
    size = (tmp_path / "__0_0.distcp").stat().st_size
    assert len(other.getvalue()) <= size
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    next(iter(metadata.storage_data.values())).length = len(other.getvalue())
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    (tmp_path / "__0_0.distcp").write_bytes(other.getvalue())
    os.remove(tmp_path / MANIFEST)
    reader = UCVolumeReader(tmp_path)
    error = failure(lambda: dcp.load({"w": torch.zeros(3)}, storage_reader=reader))
    assert isinstance(error, CorruptCheckpointError)
    assert "list" in str(error)


def test_metadata_that_lies_about_shapes_is_an_error_of_ours(tmp_path: Path) -> None:
    """A stored tensor smaller than .metadata says raises an AirError, not an internal one."""
    save(tmp_path, {"w": torch.zeros(3)})
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([5])
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    reader = UCVolumeReader(tmp_path)
    error = failure(lambda: dcp.load({"w": torch.zeros(5)}, storage_reader=reader))
    assert isinstance(error, (CorruptCheckpointError, CheckpointMismatchError))


def test_items_larger_than_a_piece_are_whole(tmp_path: Path) -> None:
    """A tensor of several write pieces, between small ones, comes back equal."""
    value = {"a": torch.ones(3), "big": torch.randn(6_000_000), "z": torch.ones(3)}
    save(tmp_path, value, thread_count=1)
    into = {key: torch.zeros_like(tensor) for key, tensor in value.items()}
    dcp.load(into, storage_reader=UCVolumeReader(tmp_path, verify=True))
    assert all(torch.equal(into[key], value[key]) for key in value)


def test_a_later_manifest_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    """A manifest of an unknown format version is refused with the remedy."""
    save(tmp_path)
    document = json.loads((tmp_path / MANIFEST).read_bytes())
    (tmp_path / MANIFEST).write_text(json.dumps({**document, "format_version": 99}))
    error = failure(lambda: load(UCVolumeReader(tmp_path)))
    assert isinstance(error, AirError)
    assert "Upgrade" in str(error)
