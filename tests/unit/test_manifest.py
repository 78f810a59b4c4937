"""Manifests: written, read back, refused when they are not what was written."""

import json
import os
import struct
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.listing import FileList, take_listing
from air_lightning.data.manifest import pack, read_manifest, unpack, write_manifest
from air_lightning.errors import (
    EmptyVolumeError,
    InvalidArgumentError,
    InvalidPathError,
    ManifestError,
    StateError,
)
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.storage import open_storage

SEGMENTS = st.binary(min_size=1, max_size=6).filter(
    lambda text: b"/" not in text and b"\0" not in text and text not in (b".", b"..")
)
NAMES = st.sets(st.lists(SEGMENTS, min_size=1, max_size=3).map(b"/".join), min_size=1, max_size=20)


@pytest.fixture
def manifest(volume, tmp_path) -> str:
    """A manifest of six files."""
    volume.write(6)
    path = str(tmp_path / "files.manifest")
    assert write_manifest(volume.path, path) == 6
    return path


def test_a_dataset_with_a_manifest_lists_nothing(volume, manifest):
    """Its list is the manifest's, whatever came since, and has the same fingerprint."""
    listed = UCVolumeDataset(volume.path)
    volume.put("new.txt", b"came later")
    dataset = UCVolumeDataset(volume.path, manifest=manifest)
    assert dataset.file_list_state() == listed.file_list_state()
    assert sorted(os.path.basename(path) for path in dataset) == [f"{n:04}.txt" for n in range(6)]


def test_a_manifest_has_sizes_and_times(volume, manifest):
    """They are those of the files, so that none is asked for them again."""
    files = read_manifest(manifest, volume.path)
    storage = open_storage(volume.path)
    assert [files[i] for i in range(6)] == list(storage.list_files(sizes=True))


def test_a_pattern_filters_when_writing_and_when_reading(volume, tmp_path, manifest):
    """What no pattern lets through is not in the list; nothing at all is an error."""
    some = tmp_path / "some"
    assert write_manifest(volume.path, some, pattern="part1/*") == 2
    assert len(read_manifest(some, volume.path)) == 2
    files = read_manifest(manifest, volume.path, pattern="0003.*")
    assert [files[i].name for i in range(len(files))] == ["part0/0003.txt"]
    with pytest.raises(EmptyVolumeError, match=r"in the manifest .*pattern='\*\.png'"):
        read_manifest(manifest, volume.path, pattern="*.png")
    with pytest.raises(EmptyVolumeError, match="holds no file|matches"):
        write_manifest(volume.path, some, pattern="*.png")
    assert len(read_manifest(some, volume.path)) == 2


@pytest.mark.parametrize("place", ["volume", "memory"])
def test_a_manifest_may_lie_on_a_volume_or_in_an_object_store(volume, place):
    """It is read from where it is; one inside the directory has a name that is not listed."""
    volume.write(3)
    inside = f"{volume.path}/.lists/files"
    out = {"volume": inside, "memory": f"memory://{uuid.uuid4().hex}/files"}[place]
    assert write_manifest(volume.path, out) == 3
    assert write_manifest(volume.path, out) == 3
    assert len(UCVolumeDataset(volume.path, manifest=out)) == 3


def test_a_manifest_that_would_be_listed_is_refused(volume):
    """Below the directory a name without a dot would become a file to train on."""
    volume.write(3)
    with pytest.raises(InvalidArgumentError, match=r"out='part0/list'.*Call it \.list"):
        write_manifest(volume.path, f"{volume.path}/part0/list")
    assert len(UCVolumeDataset(volume.path)) == 3


def test_a_manifest_of_another_root_is_used_with_a_warning(volume, manifest, caplog):
    """A copy of the files elsewhere is the same list; the log says so."""
    again = UCVolumeDataset(f"file://{volume.directory}", manifest=manifest)
    assert len(list(again)) == 6
    assert f"was written for {volume.path} and is used for file://" in caplog.text


@given(names=NAMES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_packed_is_unpacked(names, data):
    """Names of any bytes, sizes and times come back, also those that are not known."""
    ordered = sorted(names)
    count = len(ordered)
    sizes = data.draw(st.lists(st.integers(-1, 2**62), min_size=count, max_size=count))
    files = FileList(ordered, sizes, [min(float(size), 1e12) for size in sizes])
    header, listing = unpack(b"".join(pack(files, {"root": "r", "pattern": None})), "here")
    again = FileList(listing.names, listing.sizes, listing.mtimes)
    assert (header["root"], header["count"]) == ("r", count)
    assert [again[i] for i in range(count)] == [files[i] for i in range(count)]
    assert again.fingerprint == files.fingerprint


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_an_altered_or_cut_manifest_is_refused(data):
    """Any other byte after the header, and any other length, is found; no other error comes out."""
    files = FileList([b"a/b", b"c"], [1, 2], [0.5, 1.5])
    good = b"".join(pack(files, {"root": "r", "pattern": None}))
    place = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:place]
    else:
        bad = (
            good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
        )
    try:
        _, listing = unpack(bad, "here")
    except ManifestError as error:
        assert "here" in str(error)  # noqa: PT017 - most draws, not all
    else:
        # In the header's text only the root, the pattern, or blanks can differ unseen.
        assert list(listing) == [FileInfo("a/b", 1, 0.5), FileInfo("c", 2, 1.5)]
        assert place < len(good) - 2 * 20 - 4


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "a/../../x", "a//b", "a/", "", "a/..", "..", "./a", "a/./b", "a\0b"],
)
def test_a_name_that_leaves_the_directory_is_refused(name):
    """Absolute, with '..' or an empty segment, or a NUL byte: the error shows what is wanted."""
    files = FileList(sorted([b"good", name.encode()]), [1, 1], [0.0, 0.0])
    with pytest.raises(ManifestError, match="here lists .*(relative paths|NUL)"):
        unpack(b"".join(pack(files, {"root": "r"})), "here")


@pytest.mark.parametrize(
    ("size", "mtime"),
    [(1, float("inf")), (1, -float("inf")), (1, 1e300), (-5, 0.0)],
)
def test_sizes_and_times_that_cannot_be_are_refused(size, mtime):
    """No file has them, and none could be given them; a time that is not known is a NaN."""
    packed = b"".join(pack(FileList([b"a", b"b"], [1, size], [0.0, mtime]), {"root": "r"}))
    with pytest.raises(ManifestError, match=f"'b' with {size} bytes"):
        unpack(packed, "here")
    known = FileList([b"a"], [1], [float("nan")])
    assert unpack(b"".join(pack(known, {"root": "r"})), "here")[1].names == [b"a"]


def test_names_that_are_not_in_order_are_refused():
    """Every rank numbers the files alike, so their order is part of the list."""
    for names in ([b"b", b"a"], [b"a", b"a"]):
        with pytest.raises(ManifestError, match="not sorted, or one comes twice"):
            unpack(b"".join(pack(FileList(names, [1, 1], [0.0, 0.0]), {"root": "r"})), "here")


def altered(good: bytes, **change) -> bytes:
    (length,) = struct.unpack_from("<Q", good, 8)
    header = json.loads(good[16 : 16 + length]) | change
    text = json.dumps(header).encode()
    return good[:8] + struct.pack("<Q", len(text)) + text + good[16 + length :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2; this release reads version 1"),
        ({"version": None}, "version None"),
        ({"count": -1}, "count=-1"),
        ({"count": True}, "count=True"),
        ({"count": 10**12}, "tells of"),
        ({"names_bytes": 0}, "tells of"),
        ({"root": 7}, "root=7"),
        ({"checksum": "0"}, "checksum"),
        ({"fingerprint": "0"}, "fingerprint"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, said):
    """The error names the file, what is wrong, and how to write it anew."""
    good = b"".join(pack(FileList([b"a"], [1], [0.0]), {"root": "r"}))
    assert unpack(altered(good), "here")[0]["count"] == 1
    with pytest.raises(ManifestError, match="here") as caught:
        unpack(altered(good, **change), "here")
    assert said in str(caught.value)


def test_a_file_that_is_no_manifest_is_refused(volume, tmp_path):
    """Another file, an empty one, none at all, and what is no path of a file."""
    volume.write(1)
    for content in (b"", b"\x80\x04 a pickle, say", b"AIRLIST\n" + bytes(8)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ManifestError, match="other"):
            UCVolumeDataset(volume.path, manifest=tmp_path / "other")
    with pytest.raises(ManifestError, match="no such file.*air-lightning manifest"):
        UCVolumeDataset(volume.path, manifest=tmp_path / "gone")
    for wrong in ("", 7, "/"):
        with pytest.raises((InvalidPathError, InvalidArgumentError)):
            UCVolumeDataset(volume.path, manifest=wrong)


def test_a_state_moves_between_a_listing_and_its_manifest(volume, manifest):
    """In the middle of an epoch too; a manifest of other files is refused there."""
    first = UCVolumeDataset(volume.path)
    passing = iter(first)
    delivered = [os.path.basename(next(passing)) for _ in range(2)]
    state = first.state_dict()
    passing.close()
    rest = UCVolumeDataset(volume.path, manifest=manifest)
    rest.load_state_dict(state)
    delivered += [os.path.basename(path) for path in rest]
    assert sorted(delivered) == [f"{n:04}.txt" for n in range(6)]
    write_manifest(volume.path, manifest, pattern="part0/*")
    with pytest.raises(StateError, match="6 files then, 2 now"):
        UCVolumeDataset(volume.path, manifest=manifest).load_state_dict(state)


def test_a_listing_is_the_manifest_of_the_same_files(volume, manifest):
    """The fingerprint of a list without sizes is that of one with them."""
    listed = take_listing(open_storage(volume.path), None)
    assert listed.fingerprint == read_manifest(manifest, volume.path).fingerprint
