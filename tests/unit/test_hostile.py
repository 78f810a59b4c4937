"""Directories made to attack their readers: refused at once, by an error of ours, with no harm.

Each case alters one thing in a sound checkpoint, and then everything that reads checkpoints reads
it: time and memory stay those of a sound one, no code runs, and no byte outside is read.
"""

import contextlib
import io
import json
import os
import pickle
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from air_lightning import (
    CheckpointError,
    CorruptCheckpointError,
    UCVolumeReader,
    UnsafeCheckpointError,
    export_checkpoint,
    verify_checkpoint,
)
from air_lightning.checkpoint.inspection import inspect_checkpoint
from air_lightning.checkpoint.manifest import MANIFEST, METADATA, Manifest
from air_lightning.checkpoint.planner import LoadPlanner, load
from air_lightning.checkpoint.unpickle import load_blob, load_metadata

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

SECONDS, MEBIBYTES = 10, 200


class Bounded:
    """What runs inside takes bounded work, and adds a bounded amount to the peak of memory."""

    def __enter__(self) -> None:
        # Not the clock's: other programs may take the processor.
        self.start, self.peak = time.process_time(), self._peak()

    def __exit__(self, *_: Any) -> None:
        assert time.process_time() - self.start < SECONDS
        assert self._peak() - self.peak < MEBIBYTES << 10

    @staticmethod
    def _peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A sound directory of torch's own: no manifest stands in an attacker's way."""
    state = {"state_dict": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3), "o": [1]}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    return tmp_path / "c"


def alter(directory: Path, change: Callable[[Metadata], None]) -> None:
    """Change a sound directory's index."""
    metadata = pickle.loads((directory / METADATA).read_bytes())
    change(metadata)
    (directory / METADATA).write_bytes(pickle.dumps(metadata))


def load_into(directory: Path) -> None:
    """Load into tensors of the shapes that were saved."""
    state = {"state_dict.w": torch.zeros(3, 4), "state_dict.b": torch.zeros(3)}
    planner = LoadPlanner(weights_only=None)
    load(state, UCVolumeReader(directory), planner, process_group=None, no_dist=True)


def export(directory: Path) -> None:
    """Write the file beside the directory."""
    export_checkpoint(directory, directory.parent / "out.ckpt", overwrite=True)


def deep_look(directory: Path) -> None:
    """Read all of it."""
    verify_checkpoint(directory, deep=True)


WAYS = (deep_look, inspect_checkpoint, load_into, export)


def failure(way: Callable[[Path], object], directory: Path) -> str | None:
    """The name of the error of ours that reading a directory in one way ends with."""
    try:
        way(directory)
    except CheckpointError as error:
        return type(error).__name__
    except ValueError as error:
        assert "Size mismatch" in str(error)  # noqa: PT017 - torch's planner, of another shape
        return "CheckpointMismatchError"
    return None


def read_all(directory: Path) -> list[str]:
    """Read a directory in every way that there is; the names of the errors that came."""
    return [error for error in (failure(way, directory) for way in WAYS) if error]


def place(metadata: Metadata, name: str) -> Any:
    """Where the index says that an entry lies."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn.endswith(name))


def set_place(name: str, field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: object.__setattr__(place(metadata, name), field, value)


def set_size(*size: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["state_dict.w"]
        entry.size = torch.Size(size)
        entry.chunks[0].sizes = torch.Size(size)

    return change


def overlap(metadata: Metadata) -> None:
    first, second = place(metadata, ".w"), place(metadata, ".b")
    second.offset, second.length = first.offset + 8, first.length


INDEXES = {
    "a length of petabytes": set_place(".w", "length", 1 << 50),
    "a length of half an exbibyte": set_place(".w", "length", 1 << 62),
    "a length beyond 64 bits": set_place(".w", "length", 1 << 70),
    "an offset of petabytes": set_place(".w", "offset", 1 << 50),
    "an offset beyond 64 bits": set_place(".w", "offset", 1 << 70),
    "a negative offset": set_place(".w", "offset", -8),
    "a negative length": set_place(".w", "length", -1),
    "no length": set_place(".w", "length", 0),
    "a length that is text": set_place(".w", "length", "12"),
    "a parent directory": set_place(".w", "relative_path", "../secret.distcp"),
    "an absolute path": set_place(".w", "relative_path", "/etc/passwd"),
    "a path that only looks like one": set_place(".w", "relative_path", "a/../../secret.distcp"),
    "a NUL byte": set_place(".w", "relative_path", "__0_0.distcp\0"),
    "a URL": set_place(".w", "relative_path", "file:///etc/passwd"),
    "the directory itself": set_place(".w", "relative_path", "."),
    "a shape of terabytes": set_size(1 << 20, 1 << 20),
    "a shape beyond 64 bits": set_size(1 << 40, 1 << 40),
    "a negative shape": set_size(-3, 4),
    "items that overlap": overlap,
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_altered_index_is_refused(plain: Path, case: str) -> None:
    """Whatever the index claims, reading ends soon, in little memory, with an error of ours."""
    (plain.parent / "secret.distcp").write_bytes(b"secret")
    assert read_all(plain) == []
    (plain.parent / "out.ckpt").unlink()
    alter(plain, INDEXES[case])
    with Bounded():
        errors = read_all(plain)
    assert errors
    wanted = {"CorruptCheckpointError", "UnsafeCheckpointError", "CheckpointMismatchError"}
    assert set(errors) <= wanted
    assert not (plain.parent / "out.ckpt").exists()


def test_one_item_for_a_thousand_entries_is_refused(plain: Path) -> None:
    """Entries that all lie in the same bytes would multiply a file in memory; export refuses."""

    def multiply(metadata: Metadata) -> None:
        index, info = next(i for i in metadata.storage_data.items() if i[0].fqn.endswith(".w"))
        for number in range(1000):
            key = f"state_dict.w{number}"
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata["state_dict.w"]
            metadata.storage_data[type(index)(key, index.offset, index.index)] = info
            metadata.planner_data[key] = ("state_dict", f"w{number}")

    alter(plain, multiply)
    with pytest.raises(CorruptCheckpointError, match="in all"), Bounded():
        export_checkpoint(plain, plain.parent / "out.ckpt")


def test_a_shard_that_is_a_link_is_not_followed(plain: Path) -> None:
    """A shard that leads out of the directory is refused and not read; one that stays in is."""
    (shard,) = plain.glob("*.distcp")
    shard.rename(plain / "kept.distcp")
    shard.symlink_to("kept.distcp")
    assert read_all(plain) == []
    (plain / "kept.distcp").rename(plain.parent / "outside.distcp")
    shard.unlink()
    shard.symlink_to(plain.parent / "outside.distcp")
    (plain.parent / "out.ckpt").unlink()
    errors = read_all(plain)
    assert errors.count("UnsafeCheckpointError") == 2  # verify calls what is not sound corrupt
    assert not (plain.parent / "out.ckpt").exists()


def names(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def call(module: str, name: str) -> bytes:
    return names(module) + names(name) + b"\x93"


LONG = b"](" + b"K\x01" * 5000 + b"e\x94"  # a list of 5,000, noted
KEY = call("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81}"
PICKLES = {
    "a memo index of a billion": b"\x80\x04Nr" + number(1 << 30) + b".",
    "a memo index in text": b"Np99999999999\n.",
    "a memo index that is not there": b"\x80\x04j" + number(1 << 31) + b".",
    "bytes of a terabyte": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a string of four gigabytes": b"\x80\x04\x8d" + (1 << 32).to_bytes(8, "little") + b"x.",
    "a byte array of a terabyte": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a frame of a terabyte": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "an integer of a megabyte": b"\x80\x04\x8b" + number(1 << 20) + b"\x7f" * (1 << 20) + b".",
    "tuples nested a million deep": b"\x80\x04}N" + b"\x85" * 1_000_000 + b"K\x01s.",
    "lists nested a million deep": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "marks nested a million deep": b"\x80\x04" + b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
    "a tuple that doubles eighty times": b"\x80\x04}N" + b"2\x86" * 80 + b"K\x01s.",
    "a set made again and again": b"\x80\x04"
    + LONG
    + (call("builtins", "set") + b"h\x00\x85R") * 3000
    + b".",
    "a shape made again and again": b"\x80\x04"
    + LONG
    + (call("torch", "Size") + b"h\x00\x85R") * 3000
    + b".",
    "an extension code": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "no end": b"\x80\x04" + b"N" * 1000,
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_pickle_made_to_exhaust_its_reader_is_refused(case: str) -> None:
    """Bytes that ask for more memory, time or stack than they are worth are corrupt, at once."""
    with pytest.raises(CorruptCheckpointError), Bounded():
        load_metadata(PICKLES[case])


def twice(index: int) -> bytes:
    """A tuple of what was noted under a number, two times."""
    return (b"h" + bytes([index])) * 2 + b"\x86"


def test_a_key_that_is_named_twice_at_each_level_is_refused() -> None:
    """Tuples of a tuple twice, made with the memo, would be hashed for ever."""
    doubling = b"N\x94" + b"".join(twice(index) + b"\x94" for index in range(80))
    with pytest.raises(CorruptCheckpointError, match="nested"), Bounded():
        load_metadata(b"\x80\x04}" + doubling + b"K\x01s.")


def test_an_index_of_indexes_is_refused() -> None:
    """The hash of an index whose offset is one of its kind twice, at each level, has no end."""
    offset = names("offset")
    nested = KEY + offset + b"Nsb\x94"
    for index in range(40):
        nested += KEY + offset + twice(index) + b"sb\x94"
    with pytest.raises(CorruptCheckpointError, match="nested"), Bounded():
        load_metadata(b"\x80\x04" + nested + b".")


def test_what_others_hold_may_not_grow() -> None:
    """A list or an object within a tuple whose weight was counted does not change any more."""
    late = [
        b"]\x94h\x00\x85\x940h\x00(" + b"N" * 100 + b"e",
        b"]\x94h\x00\x85h\x00(" + b"N" * 100 + b"e",
        KEY.removesuffix(b"}") + b"\x94h\x00\x85h\x00}" + names("offset") + b"Nsb",
    ]
    for case in late:
        with pytest.raises(CorruptCheckpointError, match="others hold|does not need"):
            load_metadata(b"\x80\x04" + case + b".")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_bytes_end_soon(data: st.DataObject, plain: Path) -> None:
    """Random opcodes, alone or within a sound index, load or are an error of ours, in bounds."""
    sound = (plain / METADATA).read_bytes()
    cut = data.draw(st.integers(0, len(sound)))
    middle = data.draw(st.binary(max_size=40))
    with Bounded():
        for altered in (b"\x80\x04" + middle, sound[:cut] + middle + sound[cut:]):
            with contextlib.suppress(CheckpointError):
                load_metadata(altered)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("tensors", "chunks"), [(0, 0), (1, 1), (3000, 1), (40, 300), (1, 9000)])
def test_sound_metadata_is_in_proportion(protocol: int, tensors: int, chunks: int) -> None:
    """What DCP writes loads, however many tensors and chunks there are, in every protocol."""
    made = Metadata({}, planner_data={}, storage_data={}, storage_meta=StorageMeta("/c"))
    for number in range(tensors):
        key, parts = f"state_dict.layers.{number}.weight", []
        for row in range(chunks):
            offsets, sizes = torch.Size([row, 0]), torch.Size([1, 4])
            parts.append(ChunkStorageMetadata(offsets, sizes))
            index = MetadataIndex(key, offsets, row)
            made.storage_data[index] = _StorageInfo(f"__{row}_0.distcp", number, 10)
        properties = TensorProperties(torch.bfloat16)
        shape = torch.Size([chunks, 4])
        made.state_dict_metadata[key] = TensorStorageMetadata(properties, shape, parts)
        made.planner_data[key] = ("state_dict", *key.split("."))
    made.state_dict_metadata["o"] = BytesStorageMetadata()
    loaded = load_metadata(pickle.dumps(made, protocol))
    assert loaded.state_dict_metadata == made.state_dict_metadata
    assert loaded.storage_data == made.storage_data
    assert loaded.planner_data == made.planner_data


def packed(value: object, edit: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    """An archive of torch.save's, packed anew by ``edit``."""
    stream, out = io.BytesIO(), io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as given, zipfile.ZipFile(out, "w") as made:
        for name in given.namelist():
            edit(made, name, given.read(name))
    return out.getvalue()


def deflated(made: zipfile.ZipFile, name: str, data: bytes) -> None:
    made.writestr(name, data, zipfile.ZIP_DEFLATED)


def test_an_item_that_grows_is_refused() -> None:
    """An archive that is small because it is compressed is refused before it grows."""
    bomb = packed(torch.zeros(16 << 20), deflated)
    assert len(bomb) < 1 << 20
    with pytest.raises(UnsafeCheckpointError, match="grow"), Bounded():
        load_blob(bomb)
    with pytest.raises(UnsafeCheckpointError, match="grow"):
        load_blob(bomb, weights_only=False)


def strange(archive: bytes) -> bytes:
    """The archive, of a version to come: torch reads it as before, Python does not."""
    altered = bytearray(archive)
    record = archive.rindex(b"PK\1\2")
    altered[record + 6] = 99  # the version that is needed to extract it
    return bytes(altered)


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_looked_at_before_it_is_loaded_can_be_looked_at(weights_only: bool) -> None:
    """An archive that only torch can read is refused, whatever is in it: nobody looked."""
    stream = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, stream)
    for archive in (stream.getvalue(), packed(torch.zeros(16 << 20), deflated)):
        with zipfile.ZipFile(io.BytesIO(archive)) as sound:
            assert sound.namelist()
        assert torch.load(io.BytesIO(strange(archive)), weights_only=weights_only) is not None
        with pytest.raises(CorruptCheckpointError, match=r"version 9\.9"), Bounded():
            load_blob(strange(archive), weights_only=weights_only)


def test_an_item_of_tuples_nested_a_million_deep_is_refused() -> None:
    """A key that torch could not hash without the end of the process is not given to torch."""
    deep = b"\x80\x02}N" + b"\x85" * 1_000_000 + b"K\x01s."

    def deepen(made: zipfile.ZipFile, name: str, data: bytes) -> None:
        made.writestr(name, deep if name.endswith("data.pkl") else data)

    with pytest.raises(UnsafeCheckpointError, match="nests tuples"), Bounded():
        load_blob(packed({}, deepen))
    nested: Any = ()
    for _ in range(300):
        nested = (nested, "a")
    stream = io.BytesIO()
    torch.save({"few": nested, "wide": tuple(range(100_000))}, stream)
    assert load_blob(stream.getvalue())["wide"][-1] == 99_999


def test_an_item_of_one_record_many_times_is_refused() -> None:
    """An archive whose directory names the same bytes again and again is refused."""
    stream = io.BytesIO()
    torch.save(torch.zeros(1000), stream)
    with zipfile.ZipFile(stream, "a") as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
        archive.filelist.extend([record] * 100)
        archive._didModify = True
    with pytest.raises(UnsafeCheckpointError, match="grow"):
        load_blob(stream.getvalue())


def test_a_tensor_larger_than_its_record_is_refused() -> None:
    """A pickle that claims more numbers than its record has does not read what lies behind."""

    def claim(made: zipfile.ZipFile, name: str, data: bytes) -> None:
        made.writestr(name, data.replace(b"K\x07", b"K\xff") if "data.pkl" in name else data)

    with pytest.raises(CorruptCheckpointError, match="claimed"), Bounded():
        load_blob(packed(torch.zeros(7), claim))
    with pytest.raises(CorruptCheckpointError, match="claimed"):  # also where another has as many
        load_blob(packed([torch.zeros(7), torch.zeros(255)], claim))


def test_an_item_with_a_memo_of_billions_is_refused() -> None:
    """A place in the memo far beyond the pickle's size is refused before memory is made for it."""

    def put_far(made: zipfile.ZipFile, name: str, data: bytes) -> None:
        made.writestr(name, b"\x80\x02}r\xff\xff\xff\x7f." if "data.pkl" in name else data)

    with pytest.raises(UnsafeCheckpointError, match="memo index"), Bounded():
        load_blob(packed({}, put_far))


def test_a_bomb_within_a_shard_is_refused(plain: Path) -> None:
    """An item that grows is refused by every reader of the directory that it lies in."""
    bomb = packed(torch.zeros(16 << 20), deflated)
    (shard,) = plain.glob("*.distcp")
    size = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(bomb)
    alter(plain, set_place(".w", "offset", size))
    alter(plain, set_place(".w", "length", len(bomb)))
    with Bounded():
        errors = read_all(plain)
    assert errors == ["CorruptCheckpointError", "UnsafeCheckpointError", "UnsafeCheckpointError"]


def manifest(**changes: Any) -> bytes:
    """A sound manifest but for the changes."""
    files = {"__0_0.distcp": {"size": 1, "checksum": None}}
    return json.dumps({"format_version": 1, "files": files} | changes).encode()


MANIFESTS = {
    "a negative size": manifest(files={"a": {"size": -1, "checksum": None}}),
    "a size that is not whole": manifest(files={"a": {"size": 1.5, "checksum": None}}),
    "a size beyond all floats": manifest().replace(b'"size": 1', b'"size": 1e999'),
    "a size of ten thousand digits": manifest().replace(b'"size": 1', b'"size": ' + b"9" * 10000),
    "a step that is text": manifest(global_step="7"),
    "a step that is true": manifest(global_step=True),
    "a time that is none": manifest(time="yesterday"),
    "a time before all times": manifest(time="0001-01-01T00:00:00+14:00"),
    "files that are a list": manifest(files=["a"]),
    "versions that are a list": manifest(versions=["a"]),
    "a record that is a number": manifest(files={"a": 3}),
    "lists nested a million deep": b"[" * 1_000_000,
    "objects nested a million deep": b'{"a":' * 1_000_000,
    "another encoding": manifest().decode().encode("utf-16"),
    "half a character": manifest() + b"\xc3",
    "nothing": b"",
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_an_altered_manifest_is_corrupt(case: str) -> None:
    """A manifest that is none is reported as such, whatever is in it."""
    with Bounded():
        try:
            found = Manifest.from_bytes(MANIFESTS[case], "air_manifest.json")
        except CorruptCheckpointError:
            return
    # Python's JSON takes UTF-16, and a date of the year 1 may be one: then it is a sound one.
    assert case in ("another encoding", "a time before all times"), found


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "", "."])
def test_a_manifest_that_names_other_files_is_refused(plain: Path, name: str) -> None:
    """Names that lead out of the directory are files that are missing; none is read."""
    (plain.parent / "secret").write_bytes(b"x")
    size = (plain.parent / "secret").stat().st_size
    files = {name: {"size": size, "checksum": "crc32:8cdc1683"}}
    (plain / MANIFEST).write_bytes(manifest(files=files))
    for deep in (False, True):
        with pytest.raises(CorruptCheckpointError, match="missing"):
            verify_checkpoint(plain, deep=deep)


def test_a_linked_shard_fails_the_deep_look(plain: Path) -> None:
    """verify_checkpoint(deep=True) does not read through a link either, manifest or not."""
    (shard,) = plain.glob("*.distcp")
    outside = plain.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    for with_manifest in (False, True):
        if with_manifest:
            record = {"size": outside.stat().st_size, "checksum": "crc32:00000000"}
            (plain / MANIFEST).write_bytes(manifest(files={shard.name: record}))
        with pytest.raises(CorruptCheckpointError, match="leads out"):
            verify_checkpoint(plain, deep=True)
    assert os.listdir(plain.parent) != []
