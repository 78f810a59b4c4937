"""The file list: packed, fingerprinted, filtered by glob."""

import os
import pickle

import pytest

from air_lightning.data.listing import FileList, compile_pattern, take_listing
from air_lightning.errors import EmptyVolumeError, InvalidArgumentError, StorageError
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.storage import open_storage


def test_files_come_back_as_they_were_listed(volume):
    """Names of any kind, sizes and times are kept, in the order of the names' bytes."""
    odd = os.fsdecode(b"b/not-\xff-utf8")
    for name in ["b/2.txt", "b/1.txt", "ä/ß.txt", odd, "a b/c"]:
        volume.put(name, name.encode("utf-8", "surrogateescape"))
    files = take_listing(open_storage(volume.path), None)
    listed = [files[i] for i in range(len(files))]
    assert [info.name for info in listed] == ["a b/c", "b/1.txt", "b/2.txt", odd, "ä/ß.txt"]
    for info in listed:
        status = os.stat(volume.directory / info.name)
        assert (info.size, info.mtime) == (status.st_size, status.st_mtime)


def test_a_large_list_is_a_few_objects():
    """Names take their bytes and not a str each: a pickle of the list shows what is held."""
    count = 20_000
    files = FileList([FileInfo(f"{i:08}", i, 0.0) for i in range(count)])
    assert len(pickle.dumps(files)) < count * (8 + 3 * 8) + 2_000
    assert files[count - 1] == FileInfo(f"{count - 1:08}", count - 1, 0.0)


def test_the_fingerprint_is_of_names_and_sizes():
    """Another name, size, or border between names is another list; another time is not."""
    base = [FileInfo("a", 1, 1.0), FileInfo("bc", 2, 1.0)]
    fingerprint = FileList(base).fingerprint
    assert FileList([info._replace(mtime=9.0) for info in base]).fingerprint == fingerprint
    for other in (
        [FileInfo("ab", 1, 1.0), FileInfo("c", 2, 1.0)],
        [FileInfo("a", 1, 1.0), FileInfo("bc", 3, 1.0)],
        [FileInfo("a", 1, 1.0)],
    ):
        assert FileList(other).fingerprint != fingerprint


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
