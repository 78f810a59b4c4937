"""Reading in place: the bytes go straight into the targets, and only where they surely are."""

import io
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import LoadPlan

from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.envelope import _untouched, envelope, is_plain, raw_bytes
from air_lightning.checkpoint.inplace import InPlace, in_place
from air_lightning.checkpoint.manifest import MANIFEST, Checksum
from air_lightning.checkpoint.planner import LoadPlanner, load, save
from air_lightning.checkpoint.suspended import no_zip_checksums
from air_lightning.checkpoint.sweep import Piece, Slot, Sweep, runs_of, slots_of, spans_of
from air_lightning.errors import AirError, CorruptCheckpointError
from air_lightning.volumes.storage import open_storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = st.lists(st.integers(1, 9) | st.sampled_from([255, 256, 70_000]), max_size=3).filter(
    lambda shape: torch.Size(shape).numel() < 1_000_000
)


def patterned(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A tensor whose bytes are all kinds, valid for its type."""
    size = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.arange(size) % 3 == 0).reshape(shape)
    pattern = torch.arange(size * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    return pattern.view(dtype).reshape(shape)


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    """The file that torch.save makes with its checksums off."""
    stream = io.BytesIO()
    with no_zip_checksums():
        torch.save(tensor, stream)
    return stream.getvalue()


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(DTYPES), shape=SHAPES, data=st.data())
def test_an_envelope_and_the_bytes_are_what_torch_saves(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    """Head, bytes and tail equal torch.save's file bit for bit, for any type, shape and order."""
    order = data.draw(st.permutations(range(len(shape))))
    tensor = patterned(dtype, shape).permute(order)
    around = envelope(tensor.dtype, tensor.shape, tensor.stride())
    assert is_plain(tensor)
    assert around is not None
    made = around.head + bytes(raw_bytes(tensor)) + around.tail
    assert made == saved_by_torch(tensor)
    loaded = torch.load(io.BytesIO(made), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert loaded.stride() == tensor.stride()
    assert raw_bytes(loaded) == raw_bytes(tensor)


def test_an_envelope_costs_no_memory() -> None:
    """The envelope of a tensor of 8 GB is made without touching 8 GB, and tells 64-bit sizes."""
    before = _resident()
    around = envelope(torch.float32, (2 << 30,))
    if around is None:
        pytest.skip("this machine promises no 8 GB")
    assert around.nbytes == 8 << 30
    assert _resident() - before < 100 << 20


def test_an_envelope_costs_no_memory_in_a_deterministic_run() -> None:
    """Where torch is told to fill new memory, the one behind an envelope stays as untouched."""
    torch.use_deterministic_algorithms(True)
    try:
        before = _resident()
        around = envelope(torch.float32, (128 << 20,))
        held = _untouched(torch.int8, (512 << 20,), None)
        assert held is not None
        assert _resident() - before < 100 << 20
    finally:
        torch.use_deterministic_algorithms(False)
    assert around is not None
    assert around.nbytes == 512 << 20


def test_an_envelope_that_found_no_memory_is_made_when_there_is_some() -> None:
    """A shortage at one save or load does not slow down all later ones."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limits[1]))  # less than torch takes already
    try:
        refused = envelope(torch.float32, (123 << 20,))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert refused is None
    assert envelope(torch.float32, (123 << 20,)) is not None


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("dtype", "shape", "stride"),
    [
        (torch.float32, (0, 3), None),
        (torch.float32, (4, 4), (8, 1)),
        (torch.float32, (4,), (0,)),
        (torch.float32, (1 << 60,), None),
        (torch.float32, (-1,), None),
    ],
)
def test_there_is_no_envelope_of_what_is_not_one_run_of_bytes(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> None:
    """Empty, gappy, overlapping and impossible tensors take the way through torch.save."""
    assert envelope(dtype, shape, stride) is None


VALUES = {
    "weight": torch.randn(40, 30),
    "transposed": torch.randn(20, 10).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bf16": torch.randn(33).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "one_row": torch.randn(1, 7),
}


def saved(path: Path, **options: Any) -> UCVolumeReader:
    """Save the values, and return a reader of them."""
    save(dict(VALUES), UCVolumeWriter(path, **options), process_group=None, no_dist=True)
    return UCVolumeReader(path)


def loaded(reader: Any, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load into fresh tensors of these shapes and strides."""
    into = {key: torch.zeros_like(value) for key, value in like.items()}
    planner = LoadPlanner(weights_only=True)
    load(dict(into), reader, planner, process_group=None, no_dist=True)
    return into


def assert_equal(got: dict[str, torch.Tensor]) -> None:
    """All values are there."""
    for key, value in VALUES.items():
        assert torch.equal(got[key], value), key


def plan_of(reader: UCVolumeReader, into: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For each tensor whether it would be read in place."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = LoadPlanner(weights_only=True)
    planner.set_up_planner(dict(into), metadata, True)
    found = {}
    for item in planner.create_local_plan().items:
        info = metadata.storage_data[item.storage_index]
        slot = Slot(info.offset, info.length, [item])
        found[item.dest_index.fqn] = in_place(slot, planner.resolve_tensor(item), metadata)
    return found


def test_what_we_saved_is_read_in_place(tmp_path: Path) -> None:
    """Every kind of dense tensor goes into a target of its strides without a buffer, and equal."""
    reader = saved(tmp_path)
    plans = plan_of(reader, {key: torch.zeros_like(value) for key, value in VALUES.items()})
    assert all(isinstance(plan, InPlace) for plan in plans.values()), plans
    assert_equal(loaded(UCVolumeReader(tmp_path), VALUES))
    assert_equal(loaded(UCVolumeReader(tmp_path, verify=True), VALUES))


def test_targets_of_other_strides_and_types_get_the_values(tmp_path: Path) -> None:
    """A contiguous target of a transposed tensor, and one of another type, are filled right."""
    saved(tmp_path)
    contiguous = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in VALUES.items()}
    assert_equal(loaded(UCVolumeReader(tmp_path), contiguous))
    wider = {"weight": torch.zeros(40, 30, dtype=torch.float64)}
    got = loaded(UCVolumeReader(tmp_path), wider)["weight"]
    assert torch.equal(got, VALUES["weight"].double())


def test_a_target_with_gaps_gets_the_values_and_nothing_beside_them(tmp_path: Path) -> None:
    """Every second column of a larger tensor is filled, those between stay."""
    saved(tmp_path)
    large = torch.zeros(40, 60)
    load(
        {"weight": large[:, ::2]},
        UCVolumeReader(tmp_path),
        LoadPlanner(weights_only=True),
        process_group=None,
        no_dist=True,
    )
    assert torch.equal(large[:, ::2], VALUES["weight"])
    assert not large[:, 1::2].any()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("boxes", "straight"),
    [
        ([((3, 0), (10, 0), (5, 30))], True),  # rows
        ([((0, 4), (0, 0), (40, 6))], False),  # columns
        ([((0, 0), (2, 0), (2, 30)), ((38, 0), (0, 0), (2, 30))], True),  # two parts of one item
    ],
)
def test_a_part_of_a_stored_tensor_goes_where_it_is_wanted(
    tmp_path: Path, boxes: list[Any], straight: bool, verify: bool
) -> None:
    """As in resharding: rows go straight in, columns by a buffer; nothing beside them changes."""
    saved(tmp_path)
    reader = UCVolumeReader(tmp_path, verify=verify)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    into, expected = torch.zeros(40, 30), torch.zeros(40, 30)
    planner = LoadPlanner(weights_only=True)
    planner.set_up_planner({"weight": into}, metadata, True)
    (whole,) = planner.create_local_plan().items
    items = []
    for stored, wanted, size in boxes:
        offsets = {"storage_offsets": torch.Size(stored), "dest_offsets": torch.Size(wanted)}
        items.append(replace(whole, lengths=torch.Size(size), **offsets))
        rows, columns = (slice(at, at + n) for at, n in zip(stored, size, strict=True))
        part = VALUES["weight"][rows, columns]
        expected[wanted[0] : wanted[0] + size[0], wanted[1] : wanted[1] + size[1]] = part
    info = metadata.storage_data[whole.storage_index]
    slot = Slot(info.offset, info.length, [items[0]])
    placed = in_place(slot, planner.resolve_tensor(items[0]), metadata)
    assert isinstance(placed, InPlace) == straight
    reader.read_data(LoadPlan(items), planner).wait()
    assert torch.equal(into, expected)


@pytest.mark.parametrize("damage", ["torch", "checksums", "claimed"])
def test_items_in_another_envelope_take_the_slow_way(tmp_path: Path, damage: str) -> None:
    """What another torch, or one with its checksums on, wrote is read equal all the same."""
    if damage == "torch":
        saved(tmp_path)
        _set_version(tmp_path, "2.0.0")
    elif damage == "checksums":
        writer = dcp.FileSystemWriter(tmp_path)
        dcp.save(dict(VALUES), storage_writer=writer)
    else:  # torch's own files below a manifest that says that they are ours
        dcp.save(dict(VALUES), storage_writer=dcp.FileSystemWriter(tmp_path))
        names = [name for name in os.listdir(tmp_path) if name.endswith(".distcp")]
        files = {name: {"size": os.path.getsize(tmp_path / name)} for name in names}
        for name, record in files.items():
            checksum = Checksum()
            checksum.update((tmp_path / name).read_bytes())
            record["checksum"] = str(checksum)
        document = {"format_version": 1, "versions": {"torch": torch.__version__}, "files": files}
        (tmp_path / MANIFEST).write_text(json.dumps(document))
    assert_equal(loaded(UCVolumeReader(tmp_path), VALUES))
    assert_equal(loaded(UCVolumeReader(tmp_path, verify=True), VALUES))


def _set_version(path: Path, version: str) -> None:
    document = json.loads((path / MANIFEST).read_bytes())
    document["versions"]["torch"] = version
    (path / MANIFEST).write_text(json.dumps(document))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_byte_changed_around_a_tensor_is_read_as_torch_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With a byte around the values changed, ours gives what torch.load gives, or our error.

    Of an archive whose own tables are damaged torch makes what chance has it: that is not compared.
    """
    path = tmp_path_factory.mktemp("damaged")
    value = {"w": torch.arange(64, dtype=torch.int64)}
    save(dict(value), UCVolumeWriter(path), process_group=None, no_dist=True)
    around = envelope(torch.int64, (64,))
    assert around is not None
    size = around.length
    at = data.draw(st.integers(0, size - 1).filter(lambda i: not 0 <= i - len(around.head) < 512))
    shard = path / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[at] ^= data.draw(st.integers(1, 255))
    shard.write_bytes(content)
    try:
        got = loaded(UCVolumeReader(path), value)
    except AirError:
        return
    assert (got["w"].shape, got["w"].dtype) == ((64,), torch.int64)
    pickled = range(around.head.index(b"\x80\x02"), around.head.index(b"PK", 2))
    if at in pickled:
        item = io.BytesIO(bytes(content)[:size])
        assert torch.equal(got["w"], torch.load(item, map_location="cpu", weights_only=True))


@pytest.mark.parametrize("verify", [False, True])
def test_one_tensor_larger_than_a_run_is_whole(tmp_path: Path, verify: bool) -> None:
    """A tensor that several threads read in parts, between small ones, comes back equal."""
    like = {"a": torch.ones(3), "b": torch.arange(40_000_000.0), "c": torch.ones(5)}
    save(dict(like), UCVolumeWriter(tmp_path), process_group=None, no_dist=True)
    got = loaded(UCVolumeReader(tmp_path, verify=verify), like)
    assert all(torch.equal(got[key], like[key]) for key in like)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    """A sweep that gets fewer bytes than its pieces says how many were wanted, and where."""
    (tmp_path / "f").write_bytes(b"12345")
    storage = open_storage(str(tmp_path), allow_local=True)
    with storage.open_ranges("f") as file:
        sweep = Sweep(file, lambda want, got: CorruptCheckpointError(f"{want}, {got}"))
        with pytest.raises(CorruptCheckpointError, match="4 bytes at offset 3, 2"):
            sweep.fill([Piece(3, memoryview(bytearray(4)))])


@settings(max_examples=60, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 400)), max_size=12),
    hashed=st.booleans(),
)
def test_a_sweep_fills_any_pieces_and_hashes_each_byte_once(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], hashed: bool
) -> None:
    """Gaps, overlaps and repetitions: every piece holds its bytes, the checksum is the file's."""
    folder = tmp_path_factory.mktemp("sweep")
    content = os.urandom(4000)
    (folder / "f").write_bytes(content)
    whole = Checksum()
    whole.update(content)
    storage = open_storage(str(folder), allow_local=True)
    pieces = [Piece(at, memoryview(bytearray(size))) for at, size in sorted(places)]
    checksum = Checksum() if hashed else None
    with storage.open_ranges("f") as file:
        sweep = Sweep(file, lambda want, got: AssertionError(f"{want}, {got}"), checksum)
        sweep.fill(pieces)
        if checksum is not None:
            sweep.skip_to(len(content))
            assert str(checksum) == str(whole)
    for piece in pieces:
        assert piece.view == content[piece.offset : piece.offset + piece.view.nbytes]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40 << 20), min_size=1, max_size=30),
    threads=st.integers(1, 8),
)
def test_spans_hold_each_slot_once_and_are_of_about_one_size(
    sizes: list[int], threads: int
) -> None:
    """Cutting for threads loses nothing, keeps the order, and leaves no thread with it all."""
    slots, offset = [], 0
    for size in sizes:
        slots.append(Slot(offset, size, []))
        offset += size
    spans = spans_of({"f": slots}, threads)
    found = sorted((slot for span in spans for slot in span.slots), key=lambda s: s.offset)
    assert found == slots
    assert len(spans) <= threads + 1
    for span in spans:
        assert [slot.offset for slot in span.slots] == sorted(s.offset for s in span.slots)
        total = sum(slot.length for slot in span.slots)
        assert total <= 2 * max(8 << 20, offset // threads) + 2 * max(sizes)


def test_items_asked_for_twice_are_read_once() -> None:
    """Two requests for one place make one slot; many small slots make one run."""
    request: Any = object()
    slots = slots_of([(100, 10, request), (0, 10, request), (100, 10, request)])
    assert [(slot.offset, len(slot.requests)) for slot in slots] == [(0, 1), (100, 2)]
    many = [Slot(i * 10, 10, []) for i in range(500)]
    assert len(list(runs_of(many))) == 1
