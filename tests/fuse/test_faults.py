"""A training pass over a mount that fails: every file once and right, or one error that helps."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_mount import Mount, has_fuse, slow_mount

from air_lightning import DataLoader, UCVolumeDataset
from air_lightning.errors import FileChangedError, WorkerDiedError
from air_lightning.volumes.mount import MountGuard
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.storage import open_storage

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not has_fuse() and not os.environ.get("AIR_REQUIRE_ALL"), reason="no FUSE on this machine"
    ),
]

FILES = 240
SIZE = 20_000


def content(number: int, version: int = 0, size: int = SIZE) -> bytes:
    """Bytes that no other file and no other version has, in any part."""
    block = hashlib.blake2b(f"{number} {version}".encode(), digest_size=50).digest()
    return (f"{number:05}".encode() + block * (size // 50 + 1))[:size]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What lies beneath the mount."""
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(FILES):
        (directory / f"{number:05}.bin").write_bytes(content(number))
    return directory


@pytest.fixture
def mount(source: Path) -> Iterator[Mount]:
    """A mount of these files, healthy so far."""
    with slow_mount(source) as mounted:
        yield mounted


def read(path: str) -> tuple[int, bytes]:
    data = Path(path).read_bytes()
    return int(Path(path).stem), data


def loader_of(mount: Mount, **options) -> DataLoader:
    options = {"shuffle": True, "read_ahead": 4, **options}
    files = UCVolumeDataset(f"file://{mount}", **options).map(read)
    return DataLoader(files, batch_size=4, num_workers=2, prefetch_factor=2, collate_fn=list)


def assert_each_once(items: list[tuple[int, bytes]]) -> None:
    assert Counter(number for number, _ in items) == Counter(range(FILES))
    for number, data in items:
        assert data == content(number), f"{number} has wrong bytes"


def flat(batches) -> list[tuple[int, bytes]]:
    return [item for batch in batches for item in batch]


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_errors_of_the_moment_cost_no_file(mount, number, rate):
    """With 1 or 5 % of opens and reads failing, each file is delivered once, whole."""
    mount.fail("open", number, rate=rate, seed=1)
    mount.fail("read", number, rate=rate, seed=2)
    assert_each_once(flat(loader_of(mount)))
    assert mount.faults() > 0


@pytest.mark.slow
def test_hanging_reads_are_waited_out(mount):
    """Reads that answer after four seconds hold up their own file and no other's."""
    mount.hang("read", seconds=4, times=4)
    assert_each_once(flat(loader_of(mount)))
    assert mount.faults() == 4


@pytest.mark.slow
def test_short_reads_are_read_again(mount):
    """A mount that gives half of what is there, without an error, delivers no half file."""
    mount.shorten(rate=0.05)
    assert_each_once(flat(loader_of(mount)))
    assert mount.faults() > 0


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "server killed"])
def test_a_mount_that_goes_away_and_returns_costs_no_file(mount, killed):
    """Neither an empty directory in its place nor ENOTCONN is taken for vanished files."""
    mount.delay(open=0.02)
    batches = iter(loader_of(mount))
    items = flat(next(batches) for _ in range(5))
    mount.go_away(killed=killed)
    back = threading.Timer(2.0, mount.come_back)
    back.start()
    items += flat(batches)
    back.join()
    assert_each_once(items)


def test_a_mount_that_is_back_before_it_is_looked_for_costs_no_file(mount):
    """A file that seemed missing while it was away is asked for again; a missing one stays so."""
    absences = []

    def ask() -> int:
        if not absences:
            mount.go_away()
        try:
            return os.stat(f"{mount}/00007.bin").st_size
        finally:
            if not absences:
                absences.append(1)
                mount.come_back()

    assert MountGuard(str(mount)).run(ask) == SIZE
    with pytest.raises(FileNotFoundError):
        MountGuard(str(mount)).run(lambda: os.stat(f"{mount}/no-such-file"))


@pytest.mark.slow
def test_a_killed_worker_ends_the_pass_with_an_error_and_the_rest_can_be_resumed(mount):
    """The error is torch's and names the process; the state goes on with exactly what is left."""
    mount.delay(open=0.01)
    loader, before = loader_of(mount), set(multiprocessing.active_children())
    items, batches = [], iter(loader)
    worker = next(iter(set(multiprocessing.active_children()) - before))
    with pytest.raises(WorkerDiedError, match=r"signal 9\).*start again from the last"):
        for batch in batches:
            items += batch
            if len(items) == 40:
                os.kill(worker.pid, signal.SIGKILL)
    state = loader.state_dict()
    del batches, loader
    resumed = loader_of(mount)
    resumed.load_state_dict(state)
    assert_each_once(items + flat(resumed))


@contextlib.contextmanager
def replaced_when_opened(mount: Mount, source: Path, data: bytes) -> Iterator[None]:
    """Write file 7 anew while its open is under way: its size was asked for before."""
    mount.hang("open", name="00007")
    asked = mount.counts()["open"]

    def replace() -> None:
        while not any("00007" in path for _, path in opened(mount)[asked:]):
            time.sleep(0.01)
        (source / "00007.bin").write_bytes(data)
        mount.heal()

    thread = threading.Thread(target=replace)
    thread.start()
    yield
    thread.join()


def opened(mount: Mount) -> list[list[str]]:
    return [call for call in mount.calls() if call[0] == "open"]


@pytest.mark.parametrize("size", [SIZE + 1, SIZE - 1, 0])
def test_a_file_of_another_size_stops_the_pass_or_is_skipped(mount, source, size):
    """The error says which file, how large it was and is, and what to do; skip replaces it."""
    wanted = f"00007.bin was listed with {SIZE} bytes and {size} came.*on_error"
    changing = replaced_when_opened(mount, source, content(7, 1, size))
    with changing, pytest.raises(FileChangedError, match=wanted):
        flat(loader_of(mount))
    (source / "00007.bin").write_bytes(content(7))
    with replaced_when_opened(mount, source, content(7, 1, size)):
        items = flat(loader_of(mount, on_error="skip"))
    assert len(items) == FILES
    assert all(data == content(number) for number, data in items)
    assert {number for number, _ in items} == set(range(FILES)) - {7}


def test_a_file_of_the_same_size_comes_in_its_new_version(mount, source):
    """What was overwritten before it was read is delivered whole, as it is now."""
    with replaced_when_opened(mount, source, content(7, 1)):
        items = flat(loader_of(mount))
    assert Counter(number for number, _ in items) == Counter(range(FILES))
    assert all(data == content(number, int(number == 7)) for number, data in items)


@pytest.mark.parametrize("size", [300_000, 9_000_000], ids=["one stream", "four streams"])
@pytest.mark.parametrize("replaced", [False, True], ids=["in place", "by a rename"])
@pytest.mark.parametrize("grown", [0, 1, -1])
def test_a_file_that_changes_while_it_is_read_never_comes_out_mixed(
    source, tmp_path, size, replaced, grown
):
    """It comes in its new version, or with another size not at all."""
    (source / "00007.bin").write_bytes(content(7, 0, size))
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}")
        info = storage.stat("00007.bin")
        before = size // 1_500_000 + 1  # requests of old bytes that are answered
        mount.hang("read", name="00007", after=before)
        target = tmp_path / "copy"
        outcome: list[object] = []

        def download() -> None:
            try:
                outcome.append(storage.download(info, str(target)))
            except FileChangedError as error:
                outcome.append(error)

        thread = threading.Thread(target=download)
        thread.start()
        await_reads(mount, before + 1)
        written = source / "new" if replaced else source / "00007.bin"
        written.write_bytes(content(7, 1, size + grown))
        if replaced:
            written.rename(source / "00007.bin")
        mount.heal()
        thread.join()
    if grown:
        assert isinstance(outcome[0], FileChangedError)
        assert f"{size} bytes and {size + grown} came" in str(outcome[0])
    else:
        assert outcome == [size]
        assert target.read_bytes() == content(7, 1, size)


def await_reads(mount: Mount, count: int) -> None:
    deadline = time.monotonic() + 150
    while mount.counts()["read"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("attr_timeout_s", [0.0, 1.0])
@pytest.mark.parametrize("size", [0, 1, 300_000, 9_000_000])
def test_downloads_are_right_whatever_the_size_and_the_short_reads(
    source, tmp_path, size, attr_timeout_s
):
    """Also where the kernel believes a short read, and the size it implies, for a second."""
    (source / "00007.bin").write_bytes(content(7, 0, size))
    with slow_mount(source, attr_timeout_s=attr_timeout_s) as mount:
        storage = open_storage(f"file://{mount}")
        info = storage.stat("00007.bin")
        mount.shorten(name="00007", times=3)
        assert storage.download(info, str(tmp_path / "copy")) == size
        assert (tmp_path / "copy").read_bytes() == content(7, 0, size)
        assert mount.faults() == (3 if size else 0)


def test_zeros_that_the_kernel_puts_in_place_of_a_short_read_are_not_delivered(source, tmp_path):
    """While one stream is cut short, another one's question makes its page look like the file's."""
    wanted = content(7, 0, 9_000_000)
    (source / "00007.bin").write_bytes(wanted)
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}")
        for _ in range(20):
            mount.shorten(name="00007", times=3)
            storage.download(storage.stat("00007.bin"), str(tmp_path / "copy"))
            assert (tmp_path / "copy").read_bytes() == wanted
            mount.heal()


def test_short_reads_that_last_are_an_error_that_names_them(source, tmp_path):
    """A size that handles confirm and reads deny is no change of the file."""
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}", retry=Retry(budget_s=0.5))
        mount.shorten(name="00007")
        info = storage.stat("00007.bin")
        with pytest.raises(OSError, match=r"00007\.bin.*short read.*attempts"):
            storage.download(info, str(tmp_path / "copy"))


def test_a_file_that_never_holds_still_is_an_error_within_the_budget(source, tmp_path):
    """Somebody who goes on writing a file is told how to write it."""
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}", retry=Retry(budget_s=0.5))
        info = storage.stat("00007.bin")
        mount.touch("00007")
        with pytest.raises(FileChangedError, match="00007.bin went on changing.*rename"):
            storage.download(info, str(tmp_path / "copy"))


def test_a_large_file_is_opened_four_times_and_a_small_one_once(source, tmp_path):
    """Streams are shared out by size; no stream leaves a thread behind."""
    (source / "00007.bin").write_bytes(content(7, 0, 9_000_000))
    with slow_mount(source) as mount:
        storage = open_storage(f"file://{mount}")
        infos = {name: storage.stat(name) for name in ("00006.bin", "00007.bin")}
        for name, opens in (("00006.bin", 1), ("00007.bin", 4)):
            before = mount.counts()["open"]
            with mount.holding("read", until=opens, of="open", name=name):
                storage.download(infos[name], str(tmp_path / "copy"))
            assert mount.counts()["open"] - before == opens
        assert not [t for t in threading.enumerate() if t.name.startswith("air-download")]


def test_the_first_error_of_a_stream_stops_the_others(source, tmp_path):
    """A file that cannot be read ends with its error, not with the rest of its bytes."""
    (source / "00007.bin").write_bytes(content(7, 0, 64_000_000))
    with slow_mount(source, stream_bandwidth=2e6) as mount:
        storage = open_storage(f"file://{mount}")
        info = storage.stat("00007.bin")
        mount.fail("open", errno.EACCES, name="00007", times=1)
        with pytest.raises(OSError, match=r"00007\.bin.*permissions"):
            storage.download(info, str(tmp_path / "copy"))
        assert mount.bytes_read() < 48_000_000


def test_an_absent_mount_is_not_an_absent_file(mount):
    """Asking whether a file exists waits for the mount, and at last says that it is gone."""
    storage = open_storage(f"file://{mount}", retry=Retry(budget_s=0.3))
    assert storage.exists("00007.bin")
    assert not storage.exists("missing")
    mount.go_away()
    with pytest.raises(OSError, match="no longer mounted.*is the mount alive"):
        storage.exists("00007.bin")
    with pytest.raises(OSError, match="no longer mounted"):
        storage.write_bytes("sub/new", b"1")
    assert not os.listdir(mount)
    mount.come_back()
    assert storage.exists("00007.bin")
