"""One file out of a checkpoint directory: what is in it, and when there is none."""

import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from air_lightning import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    InvalidArgumentError,
    StorageError,
    UCVolumeWriter,
    UnsafeCheckpointError,
    export_checkpoint,
)
from air_lightning.checkpoint.blobs import SerializedBlob
from air_lightning.checkpoint.planner import save
from air_lightning.checkpoint.state import to_entries
from conftest import Volume
from integration.training import assert_same
from ranks import KILLED, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    """A checkpoint as the Trainer hands it over: every kind of value that there may be."""
    shared = torch.arange(6.0)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3), "exp_avg_sq": torch.rand(2)}
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {
            "layers.0.weight": torch.rand(2, 3),
            "half": torch.rand(4).bfloat16(),
            "turned": torch.rand(3, 4).t(),
            "tied": shared,
            "also_tied": shared,
            "count": torch.tensor(5),
        },
        "optimizer_states": [
            {
                "state": {0: moments},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
            }
        ],
        "lr_schedulers": [{"last_epoch": 2}],
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best": "x"}},
        "hyper_parameters": {"width": 3},
    }


def saved(
    where: str | Path, checkpoint: dict[str, Any], names: Any = ({0: "layers.0.weight"},)
) -> str:
    """The directory of a checkpoint that AirCheckpointIO would make."""
    entries = to_entries(checkpoint, optimizer_names=names, rank=0, rank_blob={"rng": 1})
    save(entries, UCVolumeWriter(where, global_step=7), process_group=None, no_dist=True)
    return str(where)


def test_a_ckpt_holds_what_the_trainer_saved(tmp_path: Path) -> None:
    """Every key, number, name and tensor of the Trainer's dict is in the file, and nothing else."""
    wanted = state()
    out = export_checkpoint(saved(tmp_path / "c", wanted), tmp_path / "one.ckpt")
    assert out == str(tmp_path / "one.ckpt")
    assert_same(torch.load(out, weights_only=True), wanted)


def test_safetensors_holds_the_weights(tmp_path: Path) -> None:
    """Dtypes and shapes are kept; tied and transposed tensors are taken as they must be."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    wanted = state()
    out = export_checkpoint(saved(tmp_path / "c", wanted), tmp_path / "one.safetensors")
    assert_same(load_file(out), wanted["state_dict"])


@pytest.mark.parametrize("others", [{}, {"w": torch.ones(2)}])
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, others: dict[str, Any]) -> None:
    """A sparse weight is refused with its name for .safetensors, and kept in a .ckpt."""
    pytest.importorskip("safetensors")
    sparse = {"sparse": torch.eye(3).to_sparse()}
    directory = saved(tmp_path / "c", {"state_dict": others | sparse}, names=())
    with pytest.raises(CheckpointMismatchError, match=r"sparse.*\.ckpt"):
        export_checkpoint(directory, tmp_path / "one.safetensors")
    assert not (tmp_path / "one.safetensors").exists()
    out = export_checkpoint(directory, tmp_path / "one.ckpt")
    loaded = torch.load(out, weights_only=True)["state_dict"]["sparse"]
    assert torch.equal(loaded.to_dense(), torch.eye(3))


def test_without_safetensors_the_remedy_is_named(tmp_path: Path) -> None:
    """Where safetensors is not installed, the error says how to install it, before any reading."""
    directory = saved(tmp_path / "c", state())
    program = (
        "import sys; sys.modules['safetensors'] = None;"
        "from air_lightning.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", program, "export", directory, f"{tmp_path}/w.safetensors"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "pip install safetensors" in done.stderr


def test_names_of_sharded_optimizers_become_numbers(tmp_path: Path) -> None:
    """An optimizer state that sharding keyed by names gets the numbers that torch's own has."""
    named = {
        "state": {"b": {"exp_avg": torch.ones(2)}, "a": {"exp_avg": torch.zeros(2)}},
        "param_groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}],
    }
    checkpoint = {"state_dict": {"a": torch.ones(2)}, "optimizer_states": [named]}
    directory = saved(tmp_path / "c", checkpoint, names=({},))
    out = torch.load(export_checkpoint(directory, tmp_path / "one.ckpt"), weights_only=True)
    (got,) = out["optimizer_states"]
    assert [group["params"] for group in got["param_groups"]] == [[0], [1]]
    assert torch.equal(got["state"][1]["exp_avg"], torch.ones(2))
    assert got["state"].keys() == {0, 1}


PLAIN = [
    ({"model": {"a": {"w": torch.ones(2, 3)}}, "optim": {"lr": [0.1]}}, {"a.w"}),
    ({"app": {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}}, {"w"}),
    ({"state_dict": {"w": torch.ones(2)}, "step": 3}, {"w"}),
    ({"w": torch.ones(2), "b.c": torch.ones(1)}, {"w", "b.c"}),
]


@pytest.mark.parametrize(("value", "names"), PLAIN)
def test_weights_of_plain_dcp(tmp_path: Path, value: dict[str, Any], names: set[str]) -> None:
    """Directories of torch's own writer give their weights, told by the names."""
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    loaded = torch.load(export_checkpoint(tmp_path / "c", tmp_path / "w.ckpt"), weights_only=True)
    assert loaded["state_dict"].keys() == names
    assert "pytorch-lightning_version" in loaded


def test_plain_dcp_without_a_sign_of_weights_is_refused(tmp_path: Path) -> None:
    """Where the names do not tell what the weights are, the error shows the names."""
    value = {"net": {"w": torch.ones(2)}, "opt": {"lr": [0.1]}}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.raises(CheckpointMismatchError, match=r"net, opt.*dcp|net, opt.*checkpoint\.load"):
        export_checkpoint(tmp_path / "c", tmp_path / "w.ckpt")
    assert not (tmp_path / "w.ckpt").exists()


def test_an_existing_file_stays_unless_overwritten(tmp_path: Path) -> None:
    """Without overwrite the file there is an error and untouched; with it, it is replaced."""
    directory = saved(tmp_path / "c", state())
    (tmp_path / "one.ckpt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="--force"):
        export_checkpoint(directory, tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").read_text() == "mine"
    export_checkpoint(directory, tmp_path / "one.ckpt", overwrite=True)
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["epoch"] == 1
    (tmp_path / "two.ckpt").mkdir()
    with pytest.raises(InvalidArgumentError, match="directory"):
        export_checkpoint(directory, tmp_path / "two.ckpt", overwrite=True)


@pytest.mark.parametrize("name", ["one", "one.pt", "one.ckpt.gz", "ckpt"])
def test_another_extension_is_refused(tmp_path: Path, name: str) -> None:
    """Only the two extensions say what to write."""
    with pytest.raises(InvalidArgumentError, match=r"\.safetensors"):
        export_checkpoint(tmp_path / "c", tmp_path / name)


def test_to_and_from_volumes_and_urls(volume: Volume) -> None:
    """Source and target may be a volume path or a URL, each for itself."""
    directory = saved(f"{volume.path}/c", state())
    assert export_checkpoint(directory, f"{volume.path}/new/w.ckpt") == f"{volume.path}/new/w.ckpt"
    assert os.listdir(volume.directory / "new") == ["w.ckpt"]
    export_checkpoint(directory, "memory://exported/w.ckpt", overwrite=True)
    saved("memory://exported/c", state())
    export_checkpoint("memory://exported/c", volume.directory / "back.ckpt")
    loaded = torch.load(volume.directory / "back.ckpt", weights_only=True)
    assert loaded["state_dict"].keys() == state()["state_dict"].keys()


def test_the_second_name_of_an_overwritten_checkpoint_is_known(tmp_path: Path) -> None:
    """A path whose newest save lies under <path>.alt exports that one."""
    older = state() | {"global_step": 1}
    saved(tmp_path / "last.ckpt.alt", older)
    out = export_checkpoint(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    assert torch.load(out, weights_only=True)["global_step"] == 1


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A write that fails half-way is an OSError with its cause, and no file is left."""
    checkpoint = {"state_dict": {"w": torch.zeros(1 << 20)}}
    directory = saved(tmp_path / "c", checkpoint, names=())
    program = (
        "import resource, signal, sys; from air_lightning import export_checkpoint;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "export_checkpoint(sys.argv[1], sys.argv[2])"
    )
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, "-c", program, directory, f"{tmp_path}/out/one.ckpt"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert os.strerror(errno.EFBIG) in done.stderr.splitlines()[-1]
    assert os.listdir(tmp_path / "out") == []


def unreadable(where: Path) -> str:
    """A checkpoint whose index is sound, and whose tensors are not: reading them is an error."""
    directory = saved(where, {"state_dict": {"w": torch.ones(1 << 20)}}, names=())
    for shard in Path(directory).glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    return directory


@pytest.mark.parametrize("place", ["/sys", "/proc/self"])
@pytest.mark.parametrize("name", ["one.ckpt", "one.safetensors"])
def test_a_place_that_cannot_be_written_is_refused_before_reading(
    tmp_path: Path, place: str, name: str
) -> None:
    """A directory in which no file can be made is named before the first tensor is read."""
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    directory = unreadable(tmp_path / "c")
    out = f"{place}/{name}"
    with pytest.raises(StorageError, match=f"{out} cannot be written .*, and nothing was read"):
        export_checkpoint(directory, out)
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptCheckpointError):
        export_checkpoint(directory, tmp_path / "out" / name)
    assert os.listdir(tmp_path / "out") == []


def test_an_export_that_cannot_fit_is_refused_before_reading(tmp_path: Path) -> None:
    """The error names the bytes needed and free, is ENOSPC, and leaves nothing."""
    size = 1 << 43
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))
    entry = TensorStorageMetadata(TensorProperties(torch.uint8), torch.Size([size]), [chunk])
    index = MetadataIndex("state_dict.w", torch.Size([0]))
    place = _StorageInfo("__0_0.distcp", 0, size)
    metadata = Metadata(
        {"state_dict.w": entry}, {"state_dict.w": ("state_dict", "w")}, {index: place}
    )
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__0_0.distcp").touch()
    os.truncate(tmp_path / "c" / "__0_0.distcp", size)  # all of it a hole
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("w.ckpt", "w.safetensors"):
        if name == "w.safetensors":
            pytest.importorskip("safetensors")
        wanted = rf"export to {tmp_path}/new/{name}.*: \d+ bytes are free, and it needs {size}"
        with pytest.raises(StorageError, match=wanted) as info:
            export_checkpoint(tmp_path / "c", tmp_path / "new" / name)
        assert info.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == ["c"]


def export_until_published(directory: str, out: str) -> None:
    """Dies at the moment before the file gets its name."""

    def kill(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and args[1] == out:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    export_checkpoint(directory, out, overwrite=True)


def test_a_kill_leaves_what_was_there(tmp_path: Path) -> None:
    """Killed when all is written but the name, an export leaves the older file as it was."""
    directory = saved(tmp_path / "c", state())
    (tmp_path / "one.ckpt").write_text("older")
    log = tmp_path / "log"
    status = run_ranks(export_until_published, directory, f"{tmp_path}/one.ckpt", log=log)
    assert status == [KILLED], log.read_text()[-2000:]
    assert (tmp_path / "one.ckpt").read_text() == "older"


def test_a_damaged_or_missing_checkpoint_gives_no_file(tmp_path: Path) -> None:
    """What is not sound is refused before the target is touched."""
    directory = saved(tmp_path / "c", state())
    shard = next(Path(directory).glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="distcp"):
        export_checkpoint(directory, tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


BLOBS: list[Any] = [
    ["a list"],
    {"version": 1},
    {"version": 1, "checkpoint": {}, "places": "no JSON", "scalars": []},
    {
        "version": 1,
        "checkpoint": {},
        "places": '[["state_dict.w",["a","b"],false,false,null,null]]',
    },
    {"version": 1, "checkpoint": [], "places": "[]", "scalars": [[3, "[]"]]},
]


@pytest.mark.parametrize("blob", BLOBS)
@pytest.mark.parametrize("name", ["one.ckpt", "one.safetensors"])
def test_a_blob_that_is_none_gives_no_file(tmp_path: Path, blob: Any, name: str) -> None:
    """What was altered in the part that says where all belongs is an error of ours."""
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    entries = {"state_dict.w": torch.ones(2), "air.trainer": SerializedBlob.of(blob)}
    save(entries, UCVolumeWriter(tmp_path / "c"), process_group=None, no_dist=True)
    try:
        export_checkpoint(tmp_path / "c", tmp_path / name)
    except CheckpointError:
        assert not (tmp_path / name).exists()
    else:  # the weights of an altered blob may be all there
        assert name == "one.safetensors"


class Custom:
    """A class that weights_only does not know."""

    def __init__(self) -> None:
        self.value = 3


def test_objects_that_run_code_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """A class in the hyper-parameters is refused by name; weights_only=False lets it through."""
    directory = saved(tmp_path / "c", state() | {"hyper_parameters": {"it": Custom()}})
    with pytest.raises(UnsafeCheckpointError, match="Custom"):
        export_checkpoint(directory, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
    out = export_checkpoint(directory, tmp_path / "one.ckpt", weights_only=False)
    assert torch.load(out, weights_only=False)["hyper_parameters"]["it"].value == 3


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_any_weights_come_back_by_both_ways(tensors: Any, tmp_path: Path) -> None:
    """Whatever the names, dtypes and shapes, both files hold the same bits as the directory."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    weights = {name: (torch.rand(shape) * 3).to(dtype) for name, (dtype, shape) in tensors.items()}
    directory = saved(tmp_path / "c", {"state_dict": weights}, names=())
    ckpt = export_checkpoint(directory, tmp_path / "w.ckpt", overwrite=True)
    assert_same(torch.load(ckpt, weights_only=True)["state_dict"], weights)
    out = export_checkpoint(directory, tmp_path / "w.safetensors", overwrite=True)
    assert_same(load_file(out), weights)
