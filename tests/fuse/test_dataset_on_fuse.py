"""The dataset and the storage on a real FUSE mount: slow, failing, and without renames."""

import errno
import os
from pathlib import Path

import pytest
from slow_mount import Mount, has_fuse, slow_mount

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from air_lightning.errors import FileVanishedError, StorageError
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.storage import open_storage

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not has_fuse() and not os.environ.get("AIR_REQUIRE_ALL"), reason="no FUSE on this machine"
    ),
]

FILES = 48


@pytest.fixture
def mount(tmp_path: Path):
    """A mount of a directory of small files."""
    for number in range(FILES):
        path = tmp_path / "source" / f"part{number % 4}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number:03}")
    with slow_mount(tmp_path / "source") as mounted:
        yield mounted


def numbers(dataset) -> list[str]:
    return [Path(path).read_text() for path in dataset]


def opened(mount: Mount) -> list[str]:
    return [path for operation, path in mount.calls() if operation == "open"]


def test_each_file_is_opened_once_over_two_epochs(mount):
    """The second epoch comes from the cache; the mount is asked for nothing."""
    dataset = UCVolumeDataset(f"file://{mount}", shuffle=True)
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == [f"{n:03}" for n in range(FILES)]
    assert first != second
    assert len(opened(mount)) == FILES


def test_read_ahead_hides_the_latency_of_opens(mount):
    """Files are opened while others are waited for, not one after the other."""
    dataset = UCVolumeDataset(f"file://{mount}")
    with mount.holding("open", until=6):
        assert len(numbers(dataset)) == FILES


def test_a_resumed_pass_opens_none_of_the_files_delivered_before(mount):
    """Skipping a prefix touches no file of it."""
    first = UCVolumeDataset(f"file://{mount}", read_ahead=0)
    passing = iter(first)
    delivered = [Path(next(passing)).read_text() for _ in range(20)]
    state = first.state_dict()
    before = len(opened(mount))
    rest = UCVolumeDataset(f"file://{mount}")
    rest.load_state_dict(state)
    assert sorted(delivered + numbers(rest)) == [f"{n:03}" for n in range(FILES)]
    assert len(opened(mount)) - before == FILES - 20


def test_transient_errors_are_waited_out(mount, caplog):
    """EIO on open and on read costs a log line, not the run."""
    caplog.set_level("DEBUG", logger="air_lightning")  # a process warns of few retries
    mount.fail("open", errno.EIO, name="007", times=2)
    mount.fail("read", errno.ESTALE, name="009", times=1)
    assert len(numbers(UCVolumeDataset(f"file://{mount}"))) == FILES
    assert "007.txt" in caplog.text
    assert "trying again" in caplog.text


def test_a_lasting_error_ends_within_its_budget_and_names_the_file(mount, tmp_path):
    """The error says which file, how often it was tried, and is chained to the mount's own."""
    mount.fail("open", errno.EIO, name="007")
    storage = open_storage(f"file://{mount}", retry=Retry(budget_s=0.5))
    info = next(info for info in storage.list_files() if "007" in info.name)
    with pytest.raises(StorageError, match=r"007\.txt.*attempts") as caught:
        storage.download(info, str(tmp_path / "copy"))
    assert caught.value.errno == errno.EIO
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_that_is_refused_raises_at_its_own_place(mount):
    """The files before an unreadable one are delivered; then its error names it."""
    mount.fail("open", errno.EACCES, name="part1/001")
    dataset = UCVolumeDataset(f"file://{mount}")
    passing = iter(dataset)
    delivered = [Path(next(passing)).read_text() for _ in range(FILES // 4)]
    with pytest.raises(StorageError, match=r"part1/001\.txt.*permissions"):
        next(passing)
    assert delivered == [f"{number:03}" for number in range(0, FILES, 4)]


def test_a_file_that_vanishes_is_named_or_replaced(mount, tmp_path):
    """on_error="raise" says that it vanished; "skip" delivers as many items without it."""
    strict = UCVolumeDataset(f"file://{mount}")
    lenient = UCVolumeDataset(f"file://{mount}", on_error="skip")
    (tmp_path / "source" / "part2" / "002.txt").unlink()
    with pytest.raises(FileVanishedError, match=r"part2/002\.txt"):
        numbers(strict)
    delivered = numbers(lenient)
    assert len(delivered) == FILES
    assert "002" not in delivered
    assert lenient.skipped == 1


def test_writing_works_where_renames_are_refused(tmp_path):
    """A file is then written a second time, under its own name, and nothing else is left."""
    (tmp_path / "source").mkdir()
    with slow_mount(tmp_path / "source", refuse_rename=True) as mount:
        storage = open_storage(f"file://{mount}")
        storage.write_bytes("sub/one", b"1" * 1000)
        with storage.open_write("sub/two") as file:
            file.write(b"2" * 9_000_000)
        assert storage.read_bytes("sub/one") == b"1" * 1000
        assert storage.read_bytes("sub/two") == b"2" * 9_000_000
        assert [entry.name for entry in storage.list_dir("sub")] == ["one", "two"]


def test_a_reader_outlives_a_stale_handle(mount):
    """A read that fails for the moment is made again on a handle opened anew."""
    storage = open_storage(f"file://{mount}", retry=Retry(budget_s=20, first_delay_s=0.01))
    mount.fail("read", errno.ESTALE, name="003", times=2)
    with storage.open_read("part3/003.txt") as file:
        assert file.read() == b"003"


def test_directories_are_listed_in_parallel(tmp_path):
    """One that is not answered for keeps no other from being asked for."""
    source = tmp_path / "source"
    for number in range(16):
        (source / f"{number:02}").mkdir(parents=True)
        (source / f"{number:02}" / "file").touch()
    with slow_mount(source) as mount, mount.holding("readdir", until=8, name="/0"):
        listed = open_storage(f"file://{mount}").list_files()
    assert [info.name for info in listed] == [f"{number:02}/file" for number in range(16)]


@pytest.mark.parametrize("workers", [0, 2])
def test_retries_are_counted(mount, workers):
    """Each further attempt after a transient error is seen in the training process."""
    loader = DataLoader(UCVolumeDataset(f"file://{mount}"), num_workers=workers)
    mount.fail("open", errno.EIO, name="007.txt", times=2)
    assert len(list(loader)) == FILES
    assert loader.statistics()["retries"] == 2
    assert loader.statistics()["files_downloaded"] == FILES
