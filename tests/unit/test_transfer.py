"""Downloads from a source that is changed, cut short and broken between any two of its reads."""

import errno
import threading
import time
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.errors import FileChangedError, StorageError
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.storage import open_storage
from air_lightning.volumes.streams import Team, cut
from air_lightning.volumes.transfer import Download, State, Times

SIZE = 40
EVENTS = ("nothing", "nothing", "overwrite", "grow", "shrink", "restore", "short", "empty", "EIO")


class File:
    """A file whose every version has bytes and a time of its own, and its handles' behaviour.

    Args:
        events: What happens before each read, in order; then nothing more.
        kind: ``"in place"``: all handles see the newest bytes. ``"renamed"``: a handle keeps its
            bytes, and reports its own state. ``"mount"``: it keeps them and reports the newest.
        clock: What listings add to the times of handles.
    """

    path = "/Volumes/main/default/data/x"
    step = 7
    min_span = 10
    cached = True
    settle_s = 0.0

    def __init__(self, events: list[str], kind: str, clock: float) -> None:
        self.versions = [b"a" * SIZE]
        self.times = Times()
        self.listed = FileInfo("x", SIZE, clock)
        self._events = deque(events)
        self._kind = kind
        self._lock = threading.Lock()

    def open(self) -> "Handle":
        return Handle(self, self._kind)

    def happen(self) -> str:
        """What happens now."""
        with self._lock:
            event = self._events.popleft() if self._events else "nothing"
            size = {"overwrite": SIZE, "grow": SIZE + 5, "shrink": SIZE - 5, "restore": SIZE}
            if event in size:
                letter = bytes([ord("a") + len(self.versions)])
                self.versions.append(letter * size[event])
            return event


class Handle:
    """One handle on such a file."""

    def __init__(self, file: File, kind: str) -> None:
        self._file = file
        self._opened = len(file.versions) - 1
        self._keeps = kind != "in place"
        self._tells_its_own = kind == "renamed"

    def read(self, offset: int, length: int) -> bytes:
        event = self._file.happen()
        if event == "EIO":
            raise OSError(errno.EIO, "Input/output error")
        data = self._file.versions[self._opened if self._keeps else -1]
        piece = data[offset : offset + length]
        return {"short": piece[: len(piece) // 2], "empty": b""}.get(event, piece)

    def state(self) -> State:
        newest = len(self._file.versions) - 1
        version = self._opened if self._tells_its_own else newest
        return State(len(self._file.versions[version]), float(version))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("clock", [0.0, 3600.0], ids=["same clock", "other clock"])
@pytest.mark.parametrize("kind", ["in place", "renamed", "mount"])
def test_a_download_is_one_version_of_the_listed_size_or_an_error(tmp_path_factory, kind, clock):
    """Whatever happens between reads, by one or four streams: never bytes of two versions."""
    target = tmp_path_factory.mktemp("download") / "copy"

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(EVENTS), max_size=30), st.sampled_from([10, 1000]))
    def check(events: list[str], min_span: int) -> None:
        file = File(events, kind, clock)
        file.min_span = min_span
        retry = Retry(budget_s=0.05, first_delay_s=0.0001, max_delay_s=0.001)
        try:
            Download(file, file.listed, str(target), retry).run()
        except FileChangedError:
            assert len(file.versions) > 1
        except StorageError:
            assert {"EIO", "short", "empty"} & set(events)
        else:
            assert target.read_bytes() in [v for v in file.versions if len(v) == SIZE]

    check()


@pytest.mark.parametrize("size", [8 << 20, 9_000_001])
def test_a_large_file_of_zeros_is_a_file_like_any_other(tmp_path, size):
    """Zeros are read once more, and then believed."""
    (tmp_path / "zeros").write_bytes(bytes(size))
    storage = open_storage(f"file://{tmp_path}")
    assert storage.download(storage.stat("zeros"), str(tmp_path / "copy")) == size
    assert (tmp_path / "copy").read_bytes() == bytes(size)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 24))
def test_spans_cover_a_file_once_and_in_order(size, min_span):
    """Every byte is in one span; there are four at most, and none that is not worth a stream."""
    spans = cut(size, min_span)
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert len(spans) == 1 or (len(spans) <= 4 and min(map(len, spans)) >= min_span)


def test_helping_threads_are_few_however_many_files_are_read():
    """Forty downloads at once start no more than twelve threads of their own, and all end."""
    lock, helping, seen, spans = threading.Lock(), set(), [0], []

    def work(team: Team) -> None:
        me = threading.current_thread()
        with lock:
            helping.update({me} if me.name == "air-download" else ())
            seen.append(len(helping))
        for span in team.spans():
            time.sleep(0.005)
            spans.append(span)
        with lock:
            helping.discard(me)

    teams = [Team(cut(100, 10), work) for _ in range(40)]
    threads = [threading.Thread(target=team.run) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == 160
    assert 0 < max(seen) <= 12
    assert not helping
