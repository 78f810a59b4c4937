"""Nothing on a volume runs code here: hostile and damaged pickles, and sound ones of torch's."""

import contextlib
import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata

from air_lightning.checkpoint.unpickle import load_blob, load_metadata
from air_lightning.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Calls:
    """Pickles to a call of a function; runs when unpickled without care."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def named(module: str, name: str, argument: str = "") -> bytes:
    """A pickle that calls ``module.name(argument)``, whatever these are."""
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name, argument)]
    return b"".join([b"\x80\x04", words[0], words[1], b"\x93", words[2], b"\x85R."])


def plain_metadata(directory: Path) -> bytes:
    """The ``.metadata`` that torch's own writer makes."""
    state = {"w": torch.zeros(3, 4), "bf": torch.zeros(2, dtype=torch.bfloat16), "o": {"lr": [1]}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    return (directory / ".metadata").read_bytes()


GLOBALS = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("subprocess", "Popen"),
    ("importlib", "import_module"),
    ("functools", "partial"),
    ("operator", "attrgetter"),
    ("pickle", "loads"),
    ("torch", "load"),
    ("torch", "serialization"),
    ("torch", "nn"),
    ("torch.serialization", "load"),
    ("torch.serialization", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ("torch.utils.collect_env", "run"),
    ("pathlib", "Path.unlink"),
    ("collections", "namedtuple"),
]


@pytest.mark.parametrize(("module", "name"), GLOBALS)
def test_metadata_with_a_foreign_global_is_refused_by_name(module: str, name: str) -> None:
    """A pickle that calls anything but DCP's own classes is refused, and the global is named."""
    with pytest.raises(UnsafeCheckpointError, match=f"{module}.{name}"):
        load_metadata(named(module, name))


def test_the_old_opcode_for_globals_is_guarded_too() -> None:
    """Protocol 0 spells globals in another way; it is refused all the same."""
    with pytest.raises(UnsafeCheckpointError, match=r"os\.system"):
        load_metadata(b"cos\nsystem\n(S'true'\ntR.")


def test_a_refused_pickle_has_not_run(tmp_path: Path) -> None:
    """The file that the hostile pickle would create is not there after the refusal."""
    trace = tmp_path / "ran"
    hostile = pickle.dumps({"a": Calls(os.mkdir, str(trace))})
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        load_metadata(hostile)
    blob = io.BytesIO()
    torch.save(Calls(os.mkdir, str(trace)), blob)
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        load_blob(blob.getvalue())
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        load_blob(hostile)
    assert not trace.exists()


def test_getattr_reaches_enum_members_only() -> None:
    """Python 3.11 pickles enum members with getattr; on anything else it is refused."""
    hostile = pickle.dumps(Calls(getattr, torch_metadata.Metadata, "__init__"))
    with pytest.raises(CheckpointError):
        load_metadata(hostile)


def test_attributes_set_on_torchs_classes_are_undone() -> None:
    """A pickle that plants an attribute on a class it may name is refused, and the class healed."""
    cls = torch_metadata.Metadata
    # The state (None, {...}) of the BUILD opcode is set with setattr, here on the class itself.
    hostile = (
        b"\x80\x04c" + cls.__module__.encode() + b"\nMetadata\nN}\x8c\x0c__setstate__cbuiltins\nset"
        b"\ns\x86b."
    )
    with pytest.raises(UnsafeCheckpointError, match="Metadata"):
        load_metadata(hostile)
    assert "__setstate__" not in vars(cls)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {"state_dict_metadata": {}},
        torch_metadata.Metadata({}),
        torch_metadata.Metadata({"a": 3}, storage_data={}),  # type: ignore[dict-item]
        torch_metadata.Metadata({}, storage_data={"a": 1}),
        torch_metadata.Metadata({}, storage_data={torch_metadata.MetadataIndex("a"): "x"}),
    ],
)
def test_a_harmless_pickle_of_something_else_is_corrupt(value: Any) -> None:
    """What unpickles safely but is not DCP metadata is reported, not passed on."""
    with pytest.raises(CorruptCheckpointError, match="find_latest_valid"):
        load_metadata(pickle.dumps(value), path="/Volumes/a/b/c/.metadata")


def test_damaged_metadata_is_an_error_of_ours_whatever_the_damage(tmp_path: Path) -> None:
    """Cut or altered at random, metadata loads or raises a CheckpointError, and nothing else."""
    sound = plain_metadata(tmp_path)
    draw = random.Random(0)
    for cut in (0, 1, 2, len(sound) // 2, len(sound) - 1):
        with pytest.raises(CorruptCheckpointError):
            load_metadata(sound[:cut])
    for _ in range(300):
        altered = bytearray(sound)
        for _ in range(draw.randint(1, 4)):
            altered[draw.randrange(len(altered))] = draw.randrange(256)
        try:
            load_metadata(bytes(altered))
        except CheckpointError:
            continue


def test_metadata_of_torchs_own_writer_loads(tmp_path: Path) -> None:
    """Dtypes, sizes, layouts, enum members and paths of plain DCP metadata come back equal."""
    data = plain_metadata(tmp_path)
    ours, theirs = load_metadata(data), pickle.loads(data)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_meta is not None
    assert str(ours.storage_meta.checkpoint_id) == str(tmp_path)


def test_blobs_of_plain_values_load() -> None:
    """Numbers, containers and tensors load with the default, from bytes and from streams."""
    value = {"a": [1, 2.5, "x", None, True], "t": torch.arange(3)}
    stream = io.BytesIO()
    torch.save(value, stream)
    assert load_blob(stream.getvalue())["a"] == value["a"]
    stream.seek(0)
    assert torch.equal(load_blob(stream, weights_only=None)["t"], value["t"])


def test_an_unsafe_blob_names_what_it_needs_and_the_remedy(tmp_path: Path) -> None:
    """A blob with a class is refused with the class and add_safe_globals; False lets it through."""
    stream = io.BytesIO()
    torch.save({"path": Calls(os.path.basename, "/a/b")}, stream)
    with pytest.raises(UnsafeCheckpointError, match=r"basename.*add_safe_globals"):
        load_blob(stream.getvalue(), path="air.trainer")
    assert load_blob(stream.getvalue(), weights_only=False) == {"path": "b"}


def test_torchscript_is_code_and_refused() -> None:
    """A TorchScript archive, which torch.load would execute, is unsafe, not merely corrupt."""
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), stream)
    with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
        load_blob(stream.getvalue())


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_blob_is_corrupt(cut: int) -> None:
    """A blob that was cut anywhere raises an error that gives its size."""
    stream = io.BytesIO()
    torch.save({"t": torch.arange(1000)}, stream)
    data = stream.getvalue()[:cut]
    with pytest.raises(CorruptCheckpointError, match=f"{len(data)} bytes"):
        load_blob(data)


@pytest.mark.parametrize("is_archive", [True, False])
def test_any_byte_changed_or_missing_is_our_error_or_read(is_archive):
    """Of a blob with one wrong byte, or without its end, nothing comes but an error of ours."""
    stream = io.BytesIO()
    value = {"step": 3, "w": torch.arange(3)}
    torch.save(value, stream, _use_new_zipfile_serialization=is_archive)
    sound = stream.getvalue()
    altered = [sound[:length] for length in range(len(sound))]
    for at, byte in enumerate(sound):
        altered += [sound[:at] + bytes([byte ^ flip]) + sound[at + 1 :] for flip in (1, 2, 8, 255)]
    for data in altered:
        with contextlib.suppress(CheckpointError):
            load_blob(data)
