"""One listing per node: real ranks that construct the same dataset."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.listing import FileList
from air_lightning.data.sharing import Place, find_seat, share_listing
from ranks import KILLED, run_ranks

pytestmark = pytest.mark.timeout(400)

RANKS = 4
NAMES = [b"a", b"b/c"]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """A temporary directory of the machine that no other test uses."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def shared(temporary: Path) -> list[str]:
    (directory,) = temporary.glob("air-lightning-lists-*")
    return sorted(path.suffix for path in directory.iterdir())


def until_waited_for(waiting: int) -> None:
    """Return once so many other ranks wait for a listing, as they do for a slow one."""
    deadline = time.monotonic() + 250  # only there to end a hang
    while waiting and shared(Path(tempfile.gettempdir())).count(".wait") < waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def meet() -> None:
    """All ranks run, as they do when a Trainer or a training script constructs its dataset."""
    dist.init_process_group("gloo")
    dist.barrier()


def note(log: Path, what: object) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{json.dumps(what)}\n".encode())
    os.close(descriptor)


def noted(log: Path) -> list:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def take(log: Path, *, waiting: int = 0) -> FileList:
    note(log, "listed")
    until_waited_for(waiting)
    return FileList(NAMES)


@pytest.mark.slow
def test_the_ranks_of_a_node_share_one_listing(volume, tmp_path, temporary):
    """They have the same list, each learns the sizes of its own files, and nothing is left."""
    volume.write(20)
    log = tmp_path / "log"
    assert run_ranks(_construct, volume.path, log, world_size=RANKS) == [0] * RANKS
    states = noted(log)
    assert len(states) == RANKS
    assert states == [states[0]] * RANKS
    assert shared(temporary) == []


@pytest.mark.slow
def test_ranks_that_come_while_it_is_listed_take_that_list(tmp_path, temporary):
    """One listing for all, and nothing is left; constructing anew lists anew, shared as before."""
    log = tmp_path / "log"
    assert run_ranks(_twice, log, world_size=RANKS) == [0] * RANKS
    assert noted(log) == ["listed", "listed"]
    assert shared(temporary) == []


def _twice(log: Path) -> None:
    meet()
    for _ in range(2):
        share_listing({"root": "x"}, lambda: take(log, waiting=RANKS - 1))
        dist.barrier()


@pytest.mark.slow
def test_what_a_rank_wrote_before_a_barrier_is_listed_after_it(volume, tmp_path, temporary):
    """Rank 0 looks alone, writes and meets the others: all ranks see all files, round by round."""
    log = tmp_path / "log"
    assert run_ranks(_writes_in_between, volume, log, world_size=2) == [0, 0]
    assert Counter(map(tuple, noted(log))) == {(number, 2 * number + 2): 2 for number in range(3)}
    assert shared(temporary) == []


def _writes_in_between(volume, log: Path) -> None:
    meet()
    for number in range(3):
        if dist.get_rank() == 0:
            volume.put(f"{number}", b"x")
            UCVolumeDataset(volume.path)
            volume.put(f"{number}-more", b"x")
        dist.barrier()
        note(log, (number, UCVolumeDataset(volume.path).file_list_state()["count"]))
        dist.barrier()


def _construct(path: str, log: Path) -> None:
    meet()
    dataset = UCVolumeDataset(path)
    assert len(list(dataset)) == 20 // RANKS
    note(log, dataset.file_list_state())
    dist.barrier()


@pytest.mark.slow
def test_a_lister_that_is_killed_is_followed_by_the_next(tmp_path, temporary):
    """Its lock goes with it; another rank lists, and the rest take that list."""
    log = tmp_path / "log"
    statuses = run_ranks(_first_dies, log, world_size=RANKS)
    assert sorted(statuses) == [KILLED, 0, 0, 0]
    assert Counter(noted(log)) == {"dies": 1, "listed": 1, "took": RANKS - 1}


def _first_dies(log: Path) -> None:
    meet()

    def listing() -> FileList:
        if not noted(log):
            note(log, "dies")
            until_waited_for(RANKS - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return take(log, waiting=RANKS - 2)

    assert share_listing({"root": "x"}, listing).name(1) == "b/c"
    note(log, "took")


@pytest.mark.slow
def test_a_dataset_that_one_rank_alone_constructs_waits_for_nobody(tmp_path, temporary):
    """It lists, twice if it is constructed twice, while the others construct none."""
    log = tmp_path / "log"
    assert run_ranks(_one_alone, log, world_size=RANKS) == [0] * RANKS
    assert noted(log) == ["listed", "listed"]


def _one_alone(log: Path) -> None:
    meet()
    if dist.get_rank() == 1:
        share_listing({"root": "x"}, lambda: take(log))
        share_listing({"root": "x"}, lambda: take(log))
    dist.barrier()


@pytest.mark.slow
def test_other_jobs_restarts_and_datasets_have_listings_of_their_own(tmp_path, monkeypatch):
    """The list of another restart, another dataset or another job is not taken."""
    log = tmp_path / "log"
    assert run_ranks(_apart, log, world_size=2) == [0, 0]
    assert noted(log) == ["listed"] * 4
    assert run_ranks(_apart, log, world_size=2) == [0, 0]
    assert noted(log) == ["listed"] * 8


def _apart(log: Path) -> None:
    meet()
    for restart, root in (("0", "x"), ("1", "x"), ("1", "y"), ("2", "x")):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = restart
        share_listing({"root": root}, lambda: take(log, waiting=1))
        dist.barrier()


def test_a_list_from_before_a_rank_came_is_not_for_it(temporary):
    """One whose listing ended later is; and where nobody waits, none is put there."""
    seat = find_seat(LIGHTNING)
    ended = time.clock_gettime(time.CLOCK_BOOTTIME)
    with published(seat, ended):
        place = Place(seat, "x")
        assert place.read(ended + 0.01) is None
        assert place.read(ended - 0.01) is not None
        place.close()
    assert shared(temporary) == []
    place = Place(seat, "x")
    place.publish(FileList(NAMES), ended)
    assert shared(temporary) == [".lock"]
    place.close()


@contextlib.contextmanager
def published(seat, ended: float) -> Iterator[Path]:
    """A list that was put there since somebody waited, who then went away."""
    place = Place(seat, "x")
    directory = Path(tempfile.gettempdir()) / f"air-lightning-lists-{os.geteuid()}"
    (lock,) = directory.iterdir()
    mark = lock.with_suffix(".wait")
    mark.touch()
    place.publish(FileList(NAMES), ended)
    place.close()
    mark.unlink()
    yield lock.with_suffix(".list")


@pytest.mark.parametrize("spoil", ["garbage", "cut"])
def test_a_list_that_is_none_is_not_used(spoil):
    """A file in the list's place that is not a sound list: the rank lists."""
    seat = find_seat(LIGHTNING)
    ended = time.clock_gettime(time.CLOCK_BOOTTIME)
    with published(seat, ended) as path:
        path.write_bytes(b"x" * 99 if spoil == "garbage" else path.read_bytes()[:-1])
        place = Place(seat, "x")
        assert place.read(ended) is None
        place.close()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["open_to_others", "a_file"])
def test_what_cannot_be_trusted_is_not_used(tmp_path, temporary, spoil):
    """A directory open to others, or none: each rank lists."""
    log = tmp_path / "log"
    place = temporary / f"air-lightning-lists-{os.geteuid()}"
    if spoil == "a_file":
        place.write_text("x")
    else:
        place.mkdir(mode=0o700)
        place.chmod(0o755 if spoil == "open_to_others" else 0o700)
    assert run_ranks(_alike, log, world_size=2) == [0, 0]
    assert noted(log) == ["listed", "listed"]


def _alike(log: Path) -> None:
    meet()
    share_listing({"root": "x"}, lambda: take(log))
    dist.barrier()


@pytest.mark.slow
def test_an_error_of_the_listing_is_every_ranks_own(tmp_path):
    """Where nothing can be listed, each rank says so."""
    log = tmp_path / "log"
    assert run_ranks(_refused, log, world_size=2) == [0, 0]
    assert noted(log) == ["refused", "refused"]


def _refused(log: Path) -> None:
    meet()

    def listing() -> FileList:
        raise OSError("no listing today")

    with pytest.raises(OSError, match="no listing today"):
        share_listing({"root": "x"}, listing)
    note(log, "refused")


@pytest.mark.slow
def test_what_was_left_behind_is_swept(tmp_path, temporary):
    """Lists and locks that are older than an hour go when another is put there; fresh ones stay."""
    place = temporary / f"air-lightning-lists-{os.geteuid()}"
    place.mkdir(mode=0o700)
    for name in ("old.list", "old.lock", "new.list"):
        (place / name).write_text("[]")
    then = time.time() - 4000
    os.utime(place / "old.list", (then, then))
    os.utime(place / "old.lock", (then, then))
    assert run_ranks(_one_alone, tmp_path / "log", world_size=2) == [0, 0]
    left = {path.name for path in place.iterdir()}
    assert "new.list" in left
    assert not left & {"old.list", "old.lock"}


def test_a_process_alone_shares_nothing(tmp_path, temporary, monkeypatch):
    """Without several ranks in the environment there is no directory and no file."""
    log = tmp_path / "log"
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    share_listing({"root": "x"}, lambda: take(log))
    assert noted(log) == ["listed"]
    assert list(temporary.iterdir()) == []


ELASTIC = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "MASTER_PORT": "29500",
}
LIGHTNING = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_PORT": "1"}
SLURM = {"SLURM_LOCALID": "3", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "seat"),
    [
        (ELASTIC, (1, 4)),
        (ELASTIC | {"LOCAL_WORLD_SIZE": "1"}, None),
        (LIGHTNING, (1, 2)),
        (LIGHTNING | {"WORLD_SIZE": "1"}, None),
        (SLURM, (3, 16)),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (SLURM | {"LOCAL_RANK": "3", "WORLD_SIZE": "16"}, (3, 16)),
        (SLURM | ELASTIC, (1, 4)),
        (SLURM | LIGHTNING, (1, 2)),
        (SLURM | LIGHTNING | {"SLURM_NTASKS": "1", "SLURM_LOCALID": "1"}, (1, 2)),
        ({"WORLD_SIZE": "4"}, None),
        (LIGHTNING | {"WORLD_SIZE": "many"}, None),
        ({}, None),
    ],
)
def test_launchers_are_told_by_their_environment(environment, seat):
    """torchrun, Lightning's own and SLURM; what says nothing clear is no seat."""
    found = find_seat(environment)
    assert (found and (found.rank, found.ranks)) == seat


def test_the_first_rank_and_those_it_starts_are_one_job():
    """Lightning's first rank starts the others: its own identity is their parent's."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, find_seat(LIGHTNING).job.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with open(read_end) as file:
        assert file.read() == find_seat(LIGHTNING | {"LOCAL_RANK": "0"}).job
    assert find_seat(ELASTIC).job != find_seat(ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "1"}).job
