"""The file list: packed, fingerprinted, filtered by glob."""

import gc
import os

import pytest

from air_lightning.data.listing import FileList, compile_pattern, take_listing
from air_lightning.errors import (
    EmptyVolumeError,
    FileVanishedError,
    InvalidArgumentError,
    StorageError,
)
from air_lightning.volumes.base import UNKNOWN_SIZE, FileInfo
from air_lightning.volumes.storage import open_storage


def test_files_come_back_as_they_were_listed(volume):
    """Names of any kind come in the order of their bytes; sizes and times when asked for."""
    odd = os.fsdecode(b"b/not-\xff-utf8")
    for name in ["b/2.txt", "b/1.txt", "ä/ß.txt", odd, "a b/c"]:
        volume.put(name, name.encode("utf-8", "surrogateescape"))
    storage = open_storage(volume.path)
    files = take_listing(storage, None)
    listed = [files[i] for i in range(len(files))]
    assert [info.name for info in listed] == ["a b/c", "b/1.txt", "b/2.txt", odd, "ä/ß.txt"]
    for index, info in enumerate(listed):
        status = os.stat(volume.directory / info.name)
        assert info == FileInfo(info.name, UNKNOWN_SIZE, 0.0)
        assert files.complete(index, storage) == (info.name, status.st_size, status.st_mtime)
        assert files[index] == files.complete(index, storage)


def test_a_large_list_is_a_few_objects():
    """Names and sizes are no object each: a long list has as many as a short one."""
    count = 20_000
    files = FileList([b"%08d" % i for i in range(count)], range(count), [0.0] * count)
    assert objects_of(files) == objects_of(FileList([b"a"], [1], [0.0]))
    assert files[count - 1] == FileInfo(f"{count - 1:08}", count - 1, 0.0)


def test_a_worker_that_reads_a_long_list_grows_by_next_to_nothing():
    """Reading 100,000 names and noting their sizes costs a forked process less than 0.2 MB."""
    count = 100_000
    files = FileList([b"class%03d/%08d.jpg" % (i % 1000, i) for i in range(count)])
    pid = os.fork()
    if pid == 0:
        known = Known()
        before = after = 0
        for last in (1000, count):  # the first few also copy the interpreter's own pages
            before = private_bytes()
            for index in range(last):
                files.complete(index, known)
            after = private_bytes()
        os._exit(0 if after - before < 200_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert files[count - 1].size == 5


class Known:
    """A storage that answers at once."""

    def stat(self, name: str) -> FileInfo:
        return FileInfo(name, 5, 1.0)


def private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


def objects_of(thing) -> int:
    """How many objects are reached from one, types and modules left out."""
    seen, left = {}, [thing]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | type(os)):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return len(seen)


def test_the_fingerprint_is_of_names():
    """Another name, or border between names, is another list; another size or time is not."""
    fingerprint = FileList([b"a", b"bc"]).fingerprint
    assert FileList([b"a", b"bc"], [1, 2], [1.0, 2.0]).fingerprint == fingerprint
    for other in ([b"ab", b"c"], [b"a"], [b"a", b"bd"]):
        assert FileList(other).fingerprint != fingerprint


def test_what_a_forked_child_learns_its_parent_knows(volume):
    """A size that one process asked for is asked for by no other."""
    volume.write(3)
    storage = open_storage(volume.path)
    files = take_listing(storage, None)
    pid = os.fork()
    if pid == 0:
        files.complete(1, storage)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [files[i].size for i in range(3)] == [UNKNOWN_SIZE, 8, UNKNOWN_SIZE]
    assert files[1] == storage.stat(files.name(1))


def test_a_file_that_is_gone_when_its_size_is_asked_for_has_vanished(volume):
    """The error is the same that its download would raise."""
    volume.write(3)
    storage = open_storage(volume.path)
    files = take_listing(storage, None)
    os.unlink(volume.directory / files.name(0))
    with pytest.raises(FileVanishedError, match=r"part0/0000\.txt was listed and is no longer"):
        files.complete(0, storage)


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("*.png", ["a.png", "x/b.png", "x/y/c.png"]),
        ("b.???", ["x/b.png"]),
        ("x/*.png", ["x/b.png"]),
        ("x/**/*.png", ["x/b.png", "x/y/c.png"]),
        ("**/y/*", ["x/y/c.png", "x/y/d.jpg"]),
        ("x/**", ["x/b.png", "x/y/c.png", "x/y/d.jpg"]),
        ("[ab].png", ["a.png", "x/b.png"]),
        ("[!a].png", ["x/b.png", "x/y/c.png"]),
        ("*.(png)", []),
        ("[", []),
    ],
)
def test_globs_are_on_segments_of_the_relative_path(pattern, matching):
    """A star stays in its segment, ** spans them, a pattern without a slash is about the name."""
    names = ["a.png", "x/b.png", "x/y/c.png", "x/y/d.jpg"]
    compiled = compile_pattern(pattern)
    assert [name for name in names if compiled.fullmatch(name)] == matching


@pytest.mark.parametrize("pattern", ["", "/x", 7, b"*.png", "[z-a]", "x/[9-0]/*"])
def test_a_pattern_that_is_none_is_refused(pattern):
    """The error gives it, and an example of one."""
    with pytest.raises(InvalidArgumentError, match=r"pattern=.*\*\.png"):
        compile_pattern(pattern)


def test_no_files_is_an_error_that_names_path_and_pattern(volume):
    """Missing, empty, or nothing that matches: each says so."""
    with pytest.raises(EmptyVolumeError, match=r"/data holds no file \(pattern=None"):
        take_listing(open_storage(volume.path), None)
    volume.write(3)
    with pytest.raises(EmptyVolumeError, match=r"/data matches pattern='\*\.png'.* 3 files"):
        take_listing(open_storage(volume.path), "*.png")
    with pytest.raises(EmptyVolumeError, match=r"/data/gone does not exist"):
        take_listing(open_storage(f"{volume.path}/gone"), None)
    volume.put("file", b"")
    with pytest.raises(StorageError, match=r"/data/file is a file"):
        take_listing(open_storage(f"{volume.path}/file"), None)
