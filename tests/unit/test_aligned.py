"""Tensors that go to a disk from where they were staged: same bytes, wherever they lie."""

import errno
import io
import mmap
import os
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.checkpoint.catalog import verify_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.envelope import envelope
from air_lightning.checkpoint.planner import LoadPlanner, SavePlanner, load, save
from air_lightning.checkpoint.room import planned_bytes
from air_lightning.checkpoint.staging import LARGE, Stager
from air_lightning.errors import CorruptCheckpointError, StorageError
from air_lightning.volumes.direct import BLOCK, BUFFER, DirectWriter
from air_lightning.volumes.writer import NamedFile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LIMITS = [LARGE, 2 * LARGE, BUFFER, 8 << 20]
NBYTES = st.sampled_from(
    [1, BLOCK - 1, BLOCK, BLOCK + 1, *(limit + off for limit in LIMITS for off in (-1, 0, 1, 4097))]
)
DTYPES = st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64])
MOST = 24 << 20  # bytes of an example


def emptied(folder: Path) -> Path:
    """The directory, without the files that were in it."""
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    return folder


def tensors(kinds: list[tuple[int, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Tensors of about so many bytes, no two of the same contents."""
    made: dict[str, torch.Tensor] = {}
    left = MOST
    for number, (nbytes, dtype) in enumerate(kinds):
        count = max(1, nbytes // dtype.itemsize)
        left -= count * dtype.itemsize
        if left < 0:
            break
        data = np.random.default_rng(number).integers(0, 256, count * dtype.itemsize, np.uint8)
        flat = torch.from_numpy(data)
        made[f"state_dict.t{number}"] = flat > 127 if dtype is torch.bool else flat.view(dtype)
    return made


def bits(value: torch.Tensor) -> bytes:
    """Its memory."""
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def assert_whole(folder: Path, wanted: dict[str, torch.Tensor], is_aligned: bool) -> None:
    """Our reader, torch's, and torch.load of each item give the bits; aligned data lie so."""
    like = {key: torch.zeros_like(value) for key, value in wanted.items()}
    for verify in (False, True):
        ours = {key: value.clone() for key, value in like.items()}
        reader = UCVolumeReader(folder, verify=verify)
        load(dict(ours), reader, LoadPlanner(weights_only=True), process_group=None, no_dist=True)
        assert all(bits(ours[key]) == bits(value) for key, value in wanted.items())
    theirs = {key: value.clone() for key, value in like.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert all(bits(theirs[key]) == bits(value) for key, value in wanted.items())
    verify_checkpoint(folder, deep=True)
    for index, info in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        value = wanted[index.fqn]
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            item = file.read(info.length)
        assert bits(torch.load(io.BytesIO(item), weights_only=True)) == bits(value)
        around = envelope(value.dtype, value.shape)
        assert around is not None
        assert item == around.head + bits(value) + around.tail
        if is_aligned and value.nbytes >= LARGE:
            assert (info.offset + len(around.head)) % BLOCK == 0


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.tuples(NBYTES, DTYPES), min_size=1, max_size=9),
    is_staged=st.booleans(),
    threads=st.integers(1, 3),
)
def test_staged_or_not_a_disk_gets_the_same_bits(
    on_disk: Path, kinds: list[tuple[int, torch.dtype]], is_staged: bool, threads: int
) -> None:
    """Sizes around all limits, in any order, written from staged and from other memory."""
    wanted = tensors(kinds)
    given = Stager().stage(wanted) if is_staged else wanted
    folder = emptied(on_disk / "any")
    save(given, UCVolumeWriter(folder, thread_count=threads), process_group=None, no_dist=True)
    assert_whole(folder, wanted, is_aligned=is_staged)


def test_gaps_are_planned_for(on_disk: Path) -> None:
    """The estimate of a save's room is not below what it takes, gaps included."""
    given = Stager().stage(tensors([(LARGE, torch.uint8)] * 40))
    folder = emptied(on_disk / "planned")
    planner = SavePlanner()
    planner.set_up_planner(dict(given), None, is_coordinator=True)
    planned = planned_bytes(planner.create_local_plan())
    save(given, UCVolumeWriter(folder), process_group=None, no_dist=True)
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) <= planned


def test_a_byte_that_flipped_in_a_gap_is_seen(on_disk: Path) -> None:
    """With verify=True every byte counts, also one between two items, whatever follows it."""
    wanted = tensors([(LARGE, torch.uint8)] * 4)
    folder = emptied(on_disk / "flipped")
    given = Stager().stage(wanted)
    save(given, UCVolumeWriter(folder, thread_count=1), process_group=None, no_dist=True)
    stored = UCVolumeReader(folder).read_metadata().storage_data.values()
    places = sorted((info.offset, info.length) for info in stored)
    end = sum(places[0])
    assert end < places[1][0]
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.seek(end)
        file.write(b"x")
    like = {key: torch.zeros_like(value) for key, value in wanted.items()}
    reader, planner = UCVolumeReader(folder, verify=True), LoadPlanner(weights_only=True)
    with pytest.raises(CorruptCheckpointError, match="__0_0.distcp"):
        load(like, reader, planner, process_group=None, no_dist=True)


class Recording(NamedFile):
    """A file that remembers the address, size and place in the file of what it was given."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        super().__init__(str(path), "xb", str(path))
        self.given: list[tuple[int, int, int]] = []

    def write_some(self, views: Any) -> int:
        """See the base class."""
        at = os.lseek(self.fileno(), 0, os.SEEK_CUR)
        for view in views:
            address = np.frombuffer(view, np.uint8).ctypes.data
            self.given.append((address, view.nbytes, at))
            at += view.nbytes
        return super().write_some(views)


def memory(size: int) -> Any:
    """Random bytes that begin at a page."""
    made = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    made[:] = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return made


PIECES = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 64, BLOCK]),  # where in its memory it begins
        st.sampled_from([7, BLOCK, 70_000, 1 << 17, BUFFER - BLOCK, BUFFER, 3 * BUFFER + 5]),
        st.sampled_from(["aligned", "aligned", "anywhere"]),  # in the file
        st.booleans(),  # whether it is the last of a call
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(pieces=PIECES, flushes=st.booleans())
def test_lent_memory_is_the_callers_again_when_the_call_returns(
    on_disk: Path, pieces: list[tuple[int, int, str, bool]], flushes: bool
) -> None:
    """Any views arrive in order, though their memory is cleared after each call."""
    path = emptied(on_disk / "lent") / "file"
    wanted, lent = bytearray(), []
    with DirectWriter(Recording(path)) as writer:
        for start, size, where, is_last in pieces:
            if where == "aligned":
                gap = bytes(-len(wanted) % BLOCK)
                lent.append(np.frombuffer(gap, np.uint8).copy())
                wanted += gap
            lent.append(memory(start + size)[start:])
            wanted += lent[-1].tobytes()
            if is_last:
                writer.write_views([memoryview(piece) for piece in lent])
                for piece in lent:
                    piece[:] = 0
                lent = []
                if flushes:
                    writer.flush()
        writer.write_views([memoryview(piece) for piece in lent])
        writer.flush()
    assert path.read_bytes() == wanted


def test_aligned_memory_goes_to_the_disk_from_where_it_lies(on_disk: Path) -> None:
    """Whole blocks are not copied; all that is written past the cache is aligned in every way."""
    path = emptied(on_disk / "lies") / "file"
    lent, head, tail = memory(BUFFER + 100), b"h" * 1000, b"t" * 50
    raw = Recording(path)
    with DirectWriter(raw) as writer:
        length = 0
        for _ in range(3):
            gap = b"g" * (-(length + len(head)) % BLOCK)
            at = length + len(gap) + len(head)
            writer.write_views([memoryview(part) for part in (gap, head, lent, tail)])
            assert (lent.ctypes.data, BUFFER, at) in raw.given
            length = at + len(lent) + len(tail)
        assert writer.block == BLOCK  # or nothing of this was past the cache
        assert all(part % BLOCK == 0 for parts in raw.given for part in parts)
        writer.flush()
    assert path.stat().st_size == length
    assert path.read_bytes().count(lent.tobytes()) == 3


def test_lent_memory_that_is_refused_goes_through_the_cache(on_disk: Path) -> None:
    """After a direct write that the file system refuses, the same bytes are written otherwise."""
    path = emptied(on_disk / "refused") / "file"
    lent = memory(2 * BUFFER)
    raw = Recording(path)
    with DirectWriter(raw) as writer:
        writer.write_views([memoryview(lent)])
        raw.seek(-100, os.SEEK_CUR)  # as after a write that ended amid a block
        writer.write_views([memoryview(lent)])
        assert writer.block == 1
        writer.write_views([memoryview(lent)])
        writer.flush()
    assert path.read_bytes() == lent.tobytes()[:-100] + 2 * lent.tobytes()


def test_a_limit_amid_lent_memory_is_told_and_what_follows_goes_on_there(on_disk: Path) -> None:
    """A write cut short raises by name; taken up again, no byte is there twice."""
    path = emptied(on_disk / "limit") / "file"
    lent = memory(2 * BUFFER)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DirectWriter(Recording(path)) as writer:
        writer.write_views([memoryview(lent)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BUFFER + 5000, limits[1]))
        try:
            with pytest.raises(StorageError, match=str(path)) as raised:
                writer.write_views([memoryview(b"x" * BLOCK), memoryview(lent)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.errno == errno.EFBIG
        writer.write(b"after")
        writer.flush()
    assert path.read_bytes() == lent.tobytes() + b"x" * BLOCK + lent.tobytes() + b"after"


def test_a_disk_that_fills_amid_a_save_leaves_no_checkpoint(on_disk: Path) -> None:
    """The save fails, names the shard, and leaves neither .metadata nor a part of a file."""
    folder = emptied(on_disk / "full")
    given = Stager().stage({f"state_dict.t{i}": torch.randn(LARGE) for i in range(20)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"__0_\d\.distcp"):
            save(given, UCVolumeWriter(folder), process_group=None, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(folder) == []


def test_where_nothing_is_gained_there_are_no_gaps() -> None:
    """On storage that is no local disk the items of staged tensors follow each other, as ever."""
    wanted = tensors([(LARGE + 1, torch.uint8), (LARGE, torch.float32), (100, torch.uint8)])
    path = "memory://aligned/ckpt"
    given = Stager().stage(wanted)
    save(given, UCVolumeWriter(path, thread_count=1), process_group=None, no_dist=True)
    metadata = UCVolumeReader(path).read_metadata()
    places = sorted((i.offset, i.length) for i in metadata.storage_data.values())
    ends = [0, *(offset + length for offset, length in places)]
    assert [offset for offset, _ in places] == ends[:-1]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 63, 64, 65, LARGE - 1, LARGE, LARGE + 1]), max_size=40),
    data=st.data(),
)
def test_large_tensors_are_staged_at_blocks_within_the_memory_bound(
    sizes: list[int], data: st.DataObject
) -> None:
    """Alignment takes less than 5%, and memory reserved in any order is enough."""
    state = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    stager = Stager()
    stager.reserve(data.draw(st.permutations(list(state.values()))))
    reserved = stager.nbytes
    staged = stager.stage(state)
    assert stager.nbytes == reserved
    small = sum(size < LARGE for size in sizes)
    assert reserved <= 1.05 * sum(sizes) + 64 * (small + 1)
    assert all(t.data_ptr() % BLOCK == 0 for t in staged.values() if t.nbytes >= LARGE)
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in staged.values())
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
