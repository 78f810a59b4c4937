"""Storage: one behaviour on volumes, file://, local paths and an object store in memory."""

import errno
import os
import subprocess
import sys
import time
import uuid

import pytest

from air_lightning.errors import (
    FileChangedError,
    FileVanishedError,
    InvalidPathError,
    StorageError,
)
from air_lightning.volumes.base import Entry, FileInfo
from air_lightning.volumes.retry import Retry, is_transient
from air_lightning.volumes.storage import open_storage


@pytest.fixture(params=["volume", "file", "local", "memory"])
def storage(request, tmp_path, monkeypatch):
    """An empty storage of each kind."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path))
    root = {
        "volume": "/Volumes/main/default/data/x",
        "file": f"file://{tmp_path}/x",
        "local": f"{tmp_path}/x",
        "memory": f"memory://{uuid.uuid4().hex}/x",
    }[request.param]
    opened = open_storage(root, allow_local=True)
    opened.make_root()
    yield opened
    opened.remove_tree()


def test_what_is_written_is_read(storage):
    """Bytes come back whole, in part, and by a seekable reader."""
    storage.write_bytes("a/b.bin", bytes(range(100)))
    assert storage.read_bytes("a/b.bin") == bytes(range(100))
    assert storage.read_bytes("a/b.bin", 10, 5) == bytes(range(10, 15))
    assert storage.read_bytes("a/b.bin", 90) == bytes(range(90, 100))
    assert storage.read_bytes("a/b.bin", 10, 0) == b""
    with storage.open_read("a/b.bin") as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == bytes([97, 98, 99])
        file.seek(2)
        assert file.read(2) == bytes([2, 3])
        assert file.tell() == 4
    assert storage.stat("a/b.bin")[:2] == ("a/b.bin", 100)
    assert storage.exists("a/b.bin")
    assert storage.exists("a")
    assert not storage.exists("a/c.bin")
    assert not storage.exists("a/b.bin/c")


@pytest.mark.parametrize("root", ["/proc", "/proc/nothing/below"])
def test_a_file_system_that_makes_no_files_is_named(root):
    """Where nothing can be made, the error has the name given, not that of a temporary file."""
    if not os.path.exists("/proc/self"):
        pytest.skip("needs /proc")
    storage = open_storage(root, allow_local=True)

    def stream():
        with storage.open_write("x.bin") as file:
            file.write(b"1")

    for write in (stream, lambda: storage.write_bytes("x.bin", b"1")):
        with pytest.raises(StorageError, match=f"{root}/x.bin: .*a place that can be") as caught:
            write()
        assert ".tmp" not in str(caught.value)
        assert caught.value.errno == errno.ENOENT
    if root != "/proc":
        with pytest.raises(StorageError, match=f"create {root}: .*a place that can be"):
            storage.make_root()


def test_parts_of_a_file_go_straight_into_memory(storage):
    """Views are filled one after the other, many at once, and short only at the file's end."""
    content = os.urandom(5000)
    storage.write_bytes("a.bin", content)
    with storage.open_ranges("a.bin") as file:
        views = [memoryview(bytearray(1)) for _ in range(3000)]
        assert file.read_into(500, views) == 3000
        assert b"".join(views) == content[500:3500]
        last = [memoryview(bytearray(60)), memoryview(bytearray(60))]
        assert file.read_into(4900, last) == 100
        assert bytes(last[0]) + bytes(last[1])[:40] == content[4900:]
        assert file.read_into(0, []) == 0
    with storage.open_ranges("missing") as file, pytest.raises(FileNotFoundError):
        file.read_into(0, [memoryview(bytearray(1))])


def test_a_writer_takes_many_pieces_of_memory_at_once(storage):
    """Pieces given together, before and after ordinary writes, all arrive in order."""
    views = [memoryview(bytes([i % 256])) for i in range(3000)] + [memoryview(b"")]
    with storage.open_write("a.bin") as file:
        file.write(b"before")
        take = getattr(file, "write_views", None) or (lambda all_: [file.write(v) for v in all_])
        take(views)
        file.write(b"after")
    assert storage.read_bytes("a.bin") == b"before" + b"".join(views) + b"after"


def test_a_listing_is_recursive_sorted_by_bytes_and_without_dot_files(storage):
    """Files come in the byte order of their relative paths; directories list one level."""
    for name in ["b/2", "b/1", "b-1", "b.txt", "B", "é", "b/.hidden", ".dir/x", "b/c/3"]:
        storage.write_bytes(name, name.encode())
    names = [info.name for info in storage.list_files()]
    assert names == sorted(["b/2", "b/1", "b-1", "b.txt", "B", "é", "b/c/3"], key=os.fsencode)
    assert list(storage.list_files(sizes=True)) == [storage.stat(name) for name in names]
    assert storage.list_dir("b") == [
        *(Entry(".hidden", False), Entry("1", False), Entry("2", False), Entry("c", True)),
    ]


def test_what_is_missing_is_a_file_not_found_error(storage):
    """Reading, stat and listing of a missing name raise FileNotFoundError; removing it is fine."""
    for ask in (storage.read_bytes, storage.open_read, storage.stat, storage.list_dir):
        with pytest.raises(FileNotFoundError):
            ask("missing/name")
    storage.remove("missing")
    storage.remove_tree("missing")


def test_a_block_that_raises_leaves_no_file(storage):
    """A file appears at the clean end of its block, or never; not even a temporary one stays."""
    with storage.open_write("a/x") as file:
        file.write(b"old")
    with pytest.raises(KeyError), storage.open_write("a/x") as file:
        file.write(b"new" * 100_000)
        raise KeyError("the writer's own")
    with pytest.raises(KeyError), storage.open_write("a/y"):
        raise KeyError("the writer's own")
    assert storage.read_bytes("a/x") == b"old"
    assert storage.list_dir("a") == [Entry("x", False)]


def test_a_large_file_is_written_whole(storage):
    """More than the buffers hold arrives as it was written."""
    data = os.urandom(1 << 20)
    with storage.open_write("large") as file:
        for _ in range(40):
            file.write(data)
    assert storage.stat("large").size == 40 << 20
    assert storage.read_bytes("large", 39 << 20) == data


def test_a_download_is_whole_or_an_error(storage, tmp_path):
    """The size must be the listed one, and a file that is gone is said to be."""
    storage.write_bytes("a", b"12345")
    target = str(tmp_path / "copy")
    info = storage.stat("a")
    assert storage.download(info, target) == 5
    with open(target, "rb") as file:
        assert file.read() == b"12345"
    for size in (0, 4, 6):
        listed = info._replace(size=size, mtime=info.mtime - 1)
        with pytest.raises(FileChangedError, match=f"listed with {size} bytes and 5 came"):
            storage.download(listed, target)
    storage.remove("a")
    with pytest.raises(FileVanishedError, match="/a was listed and is no longer there") as caught:
        storage.download(info, target)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_root_that_is_a_file_is_refused(storage):
    """Making or listing such a root says that it is a file."""
    storage.write_bytes("file", b"x")
    below = open_storage(f"{storage.root}/file", allow_local=True)
    with pytest.raises(StorageError, match="is a file"):
        below.make_root()
    with pytest.raises(StorageError, match="is a file"):
        below.list_files()


def test_links_to_directories_are_followed_but_not_in_circles(tmp_path):
    """A linked folder's files are listed, a link upwards adds none, a dangling one is left out."""
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "o.txt").write_text("o")
    (tmp_path / "root" / "sub" / "s.txt").write_text("s")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "root" / "sub" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "dangling").symlink_to(tmp_path / "nowhere")
    names = [info.name for info in open_storage(f"file://{tmp_path}/root").list_files()]
    assert names == ["linked/o.txt", "sub/s.txt"]


def test_a_link_in_circles_is_left_out_like_a_dangling_one(tmp_path, caplog):
    """A link to itself is no file and no directory, in both kinds of listing; it is logged."""
    caplog.set_level("DEBUG", logger="air_lightning")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.txt").write_text("a")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root" / "loop")
    storage = open_storage(f"file://{tmp_path}/root")
    assert [info.name for info in storage.list_files()] == ["a.txt"]
    assert storage.list_dir() == [Entry("a.txt", False)]
    assert caplog.text.count("leads in circles") == 2


def test_each_real_directory_is_listed_once_however_many_links_lead_to_it(tmp_path):
    """Directories that link to one another add their files once, always under the same names."""
    for name in "abcdefgh":
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / f"{name}.txt").write_text(name)
        for target in "abcdefgh":
            (tmp_path / "other" / name / f"to-{target}").symlink_to(tmp_path / "other" / target)
    (tmp_path / "root" / "own").mkdir(parents=True)
    (tmp_path / "root" / "own" / "o.txt").write_text("o")
    (tmp_path / "root" / "again").symlink_to(tmp_path / "root" / "own")
    (tmp_path / "root" / "z").symlink_to(tmp_path / "other" / "a")
    (tmp_path / "root" / "y").symlink_to(tmp_path / "other" / "a")
    storage = open_storage(f"file://{tmp_path}/root")
    names = [info.name for info in storage.list_files()]
    assert names == ["own/o.txt", "y/a.txt", *(f"y/to-{name}/{name}.txt" for name in "bcdefgh")]
    assert [info.name for info in storage.list_files()] == names


def test_a_link_into_a_hidden_directory_is_followed(tmp_path):
    """What a dot-directory holds is not listed there, so a link to it is no repetition."""
    (tmp_path / ".store" / "v1" / "sub").mkdir(parents=True)
    (tmp_path / ".store" / "v1" / "sub" / "x.txt").write_text("x")
    (tmp_path / "data").symlink_to(tmp_path / ".store" / "v1")
    (tmp_path / "sub").symlink_to(tmp_path / ".store" / "v1" / "sub")
    names = [info.name for info in open_storage(f"file://{tmp_path}").list_files()]
    assert names == ["data/sub/x.txt"]


def test_what_is_no_regular_file_is_left_out(tmp_path):
    """A link to a file is a file; pipes, and links to them or to nowhere, are none."""
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("outside")
    (tmp_path / "root" / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "root" / "pipe")
    for name, target in (
        *(("sub/file", tmp_path / "outside.txt"), ("sub/own", tmp_path / "root" / "a.txt")),
        *(("sub/pipe", tmp_path / "root" / "pipe"), ("sub/nothing", tmp_path / "nowhere")),
    ):
        (tmp_path / "root" / name).symlink_to(target)
    storage = open_storage(f"file://{tmp_path}/root")
    assert [info.name for info in storage.list_files()] == ["a.txt", "sub/file", "sub/own"]
    assert [info.size for info in storage.list_files(sizes=True)] == [1, 7, 1]


def test_the_time_of_a_listing_grows_with_the_number_of_directories_not_its_square(tmp_path):
    """Sixteen times as many directories take far less than 256 times as much of a processor."""

    def seconds(count: int) -> float:
        root = tmp_path / str(count)
        for number in range(count):
            (root / f"{number}").mkdir(parents=True)
        storage = open_storage(f"file://{root}")
        taken = []
        for _ in range(3):  # what disturbs a run makes it longer
            began = time.process_time()
            assert len(storage.list_files()) == 0
            taken.append(time.process_time() - began)
        return min(taken)

    small = seconds(500)
    assert seconds(8000) < 40 * small


def test_folder_markers_of_an_object_store_are_no_files():
    """Zero-byte keys that end in a slash, and entries of type directory, are left out."""
    root = f"memory://{uuid.uuid4().hex}"
    storage = open_storage(root)
    storage.write_bytes("sub/a.txt", b"a")
    base = storage._base
    found = {
        f"{base}/": {"name": f"{base}/", "size": 0, "type": "file"},
        f"{base}/sub": {"name": f"{base}/sub", "size": 0, "type": "directory"},
        f"{base}/sub/": {"name": f"{base}/sub/", "size": 0, "type": "file"},
        f"{base}/sub/a.txt": {"name": f"{base}/sub/a.txt", "size": 1, "type": "file"},
    }
    storage._fs.find = lambda *_, **__: found
    assert [info.name for info in storage.list_files()] == ["sub/a.txt"]
    del storage._fs.find
    storage.remove_tree()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_keeps_its_number_and_leaves_nothing(tmp_path):
    """ENOSPC is an OSError that callers can tell apart, wherever it strikes."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        storage = open_storage(f"file://{small}")
        with pytest.raises(OSError, match="No space") as caught:
            storage.write_bytes("x", b"x" * (2 << 20))
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space") as caught, storage.open_write("y") as file:
            file.write(b"y" * (2 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert storage.list_dir() == []
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_an_unknown_scheme_names_what_to_install():
    """Neither a typing error nor a missing back end ends in a stack of fsspec's."""
    with pytest.raises(InvalidPathError, match="nosuch"):
        open_storage("nosuch://bucket/key")


def test_a_forked_child_opens_a_file_system_of_its_own(storage):
    """Storage that was used before a fork works after it."""
    storage.write_bytes("a", b"1")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if storage.read_bytes("a") == b"1" and storage.list_files() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_errors_that_pass_are_waited_out_and_logged(caplog):
    """A throttled call succeeds in the end; each wait is a line in the log, and is counted."""
    caplog.set_level("DEBUG", logger="air_lightning")
    waits = []
    errors = [OSError(errno.EIO, "io"), TimeoutError("slow"), Throttled("SlowDown")]

    def call():
        if errors:
            raise errors.pop()
        return "done"

    retry = Retry(first_delay_s=0.001, on_retry=lambda: waits.append(len(errors)))
    assert retry.call("read", "/Volumes/a/b/c/x", call) == "done"
    assert caplog.text.count("Could not read /Volumes/a/b/c/x") == 3
    assert waits == [2, 1, 0]


RETRY_OFTEN = """
import errno, logging, os, sys
from air_lightning.volumes import retry as told
from air_lightning.volumes.retry import Retry

told._WARN_EVERY_S = 1e9  # on a busy machine this may take longer than no line is to come in

def flaky(failures=[0]):
    failures[0] += 1
    if failures[0] % 51:
        raise OSError(errno.EIO, "io")

logging.basicConfig(stream=sys.stderr, level=sys.argv[1])
retry = Retry(first_delay_s=0.0001, max_delay_s=0.0001)
retry.call("read", "p", flaky)
if os.fork() == 0:
    retry.call("read", "p", flaky)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("level", "lines"), [("WARNING", 3), ("DEBUG", 50)])
def test_many_retries_do_not_flood_the_log(level, lines):
    """Of 50 retries at once a process warns of three, and so does a forked one; DEBUG has all."""
    command = [sys.executable, "-c", RETRY_OFTEN, level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("Could not read p") == 2 * lines


def test_errors_that_stay_are_final_at_once():
    """What no retry cures is translated without a wait, and says what to do."""
    calls = []

    def call():
        calls.append(1)
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(StorageError, match=r"Could not write p: .*Check the permissions") as caught:
        Retry().call("write", "p", call)
    assert len(calls) == 1
    assert caught.value.errno == errno.EACCES


def test_which_errors_are_transient():
    """Told by type and number, never by text; also through a chain of causes."""
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = OSError(errno.ESTALE, "stale")
    assert is_transient(wrapped)
    assert is_transient(Throttled("Throttling"))
    assert not is_transient(Throttled("NoSuchKey"))
    assert not is_transient(OSError(errno.ENOSPC, "full"))
    assert not is_transient(ValueError("EIO"))
    assert not is_transient(FileVanishedError("gone"))


class Throttled(Exception):
    """What botocore raises."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}


def test_file_info_is_plain_data():
    """A listed file is a tuple of name, size and time."""
    assert FileInfo("a", 1, 2.0) == ("a", 1, 2.0)
