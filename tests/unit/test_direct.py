"""Files that are written past the page cache."""

import errno
import fcntl
import mmap
import os
import resource
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.errors import StorageError
from air_lightning.volumes.direct import BUFFER, DirectWriter, writer_to
from air_lightning.volumes.mount import file_system_type
from air_lightning.volumes.storage import open_storage
from air_lightning.volumes.writer import GatheringWriter, NamedFile

SIZES = st.sampled_from([0, 1, 511, 4096, 5000, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 7])


def new_file(path):
    path.unlink(missing_ok=True)
    return NamedFile(str(path), "xb", str(path))


def is_cached(path):
    """Whether the first page of a file is in memory; asks without reading from the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(SIZES, st.booleans(), st.booleans()), max_size=6))
def test_what_is_written_in_any_pieces_arrives_whole_and_in_order(tmp_path_factory, sizes):
    """Any sizes, by write or as views, flushed in between or not, give the file they are."""
    path = tmp_path_factory.mktemp("any") / "a.bin"
    wanted = bytearray()
    with DirectWriter(new_file(path)) as writer:
        for number, (size, as_views, flushes) in enumerate(sizes):
            piece = bytes([number + 1]) * size
            wanted += piece
            if as_views:
                writer.write_views([memoryview(piece[:7]), memoryview(piece[7:])])
            else:
                assert writer.write(piece) == size
            if flushes:
                writer.flush()
                assert path.stat().st_size == len(wanted)
        writer.flush()
    assert path.read_bytes() == wanted


def test_a_shard_on_a_local_disk_stays_out_of_the_page_cache(on_disk):
    """Of a large file that storage wrote, nothing is in memory; of a small one, all."""
    storage = open_storage(f"file://{on_disk}")
    content = os.urandom(5 * BUFFER + 1000)
    with storage.open_write("large.bin") as file:
        file.write(content)
    with storage.open_write("small.bin") as file:
        file.write(content[:1000])
    assert not is_cached(on_disk / "large.bin")
    assert is_cached(on_disk / "small.bin")
    assert storage.read_bytes("large.bin") == content
    assert storage.read_bytes("small.bin") == content[:1000]


def test_a_file_system_that_refuses_gets_the_rest_through_the_cache(on_disk):
    """A write refused for its alignment is repeated without the flag, and so is what follows."""
    path = on_disk / "b.bin"
    content = os.urandom(4 * BUFFER)
    raw = new_file(path)
    with DirectWriter(raw) as writer:
        writer.write(content[:BUFFER])
        assert fcntl.fcntl(raw, fcntl.F_GETFL) & os.O_DIRECT
        # As after a write that the disk took in part: the next begins within a block.
        raw.seek(-100, os.SEEK_CUR)
        writer.write(content[BUFFER : 2 * BUFFER])
        assert not fcntl.fcntl(raw, fcntl.F_GETFL) & os.O_DIRECT
        writer.write(content[2 * BUFFER :])
        writer.flush()
    assert path.read_bytes() == content[: BUFFER - 100] + content[BUFFER:]


def test_an_error_of_the_disk_is_not_taken_for_a_refusal(on_disk, tmp_path):
    """A full disk raises its own error, at the write that met it."""
    raw = NamedFile("/dev/full", "wb", str(on_disk / "c.bin"))
    writer = DirectWriter(raw)
    with pytest.raises(OSError, match="No space left") as raised:
        writer.write(bytes(2 * BUFFER))
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(on_disk / "c.bin")
    writer.close()
    assert raw.closed


@pytest.fixture
def a_disk(tmp_path):
    """A small disk of its own, and a function that takes its power away and gives it back."""
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(point)]
    subprocess.run(mount, check=True)

    def lose_power():
        handle = os.open(point, os.O_RDONLY)
        # What is not on the disk yet never comes there (EXT4_IOC_SHUTDOWN, without the journal).
        fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))
        os.close(handle)
        subprocess.run(["umount", str(point)], check=True)
        subprocess.run(mount, check=True)

    yield point, lose_power
    subprocess.run(["umount", str(point)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_was_written_is_there_after_a_loss_of_power(a_disk):
    """Large and small files, in directories made for them, under their final names."""
    directory, lose_power = a_disk
    content = os.urandom(BUFFER + 10)
    for number in range(3):
        storage = open_storage(f"file://{directory}/{number}")
        with storage.open_write("shard") as file:
            file.write(content)
        storage.write_bytes("last", content[:10])
        lose_power()
        assert storage.read_bytes("shard") == content
        assert storage.read_bytes("last") == content[:10]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_amid_lent_memory_keeps_no_part_of_it(a_disk):
    """The error is ENOSPC and names the file; nothing is left, and what fits is written after."""
    directory, _ = a_disk
    storage = open_storage(f"file://{directory}/full")
    lent = memoryview(mmap.mmap(-1, 100 << 20))
    lent[-1] = 7
    with pytest.raises(OSError, match="full/shard") as raised, storage.open_write("shard") as file:
        file.write_views([lent])
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(directory / "full") == []
    with storage.open_write("shard") as file:
        file.write_views([lent[80 << 20 :]])
    assert storage.read_bytes("shard") == lent[80 << 20 :]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_that_another_one_hides_does_not_count(tmp_path):
    """The type is that of the file system that is written to, not of one that lay there before."""
    top, below = tmp_path / "top", tmp_path / "top" / "below"
    mounted = []
    try:
        for kind, point in [("tmpfs", top), ("ramfs", below), ("tmpfs", top)]:
            point.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", kind, kind, str(point)], check=True)
            mounted.append(point)
        below.mkdir()
        assert file_system_type(str(below)) == "tmpfs"
    finally:
        for point in reversed(mounted):
            subprocess.run(["umount", str(point)], check=True)


def test_an_error_in_the_midst_of_the_buffer_leaves_nothing_written_twice(tmp_path):
    """What is written after a partial write that failed goes on where the disk stopped."""
    path = tmp_path / "e.bin"
    content = os.urandom(2 * BUFFER)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DirectWriter(new_file(path)) as writer:
        writer.write(content[:BUFFER])
        resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER + 5000, limits[1]))
        try:
            with pytest.raises(StorageError, match=str(path)):
                writer.write(content[BUFFER:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.flush()
    assert path.read_bytes() == content


def test_memory_and_mounts_are_written_through_the_cache(tmp_path):
    """What is no local disk, such as procfs, gets the buffered writer, and no flag."""
    file = new_file(tmp_path / "d.bin")
    assert file_system_type("/proc/self") == "proc"
    with writer_to(file, "/proc/self", 4096) as writer:
        assert isinstance(writer, GatheringWriter)
