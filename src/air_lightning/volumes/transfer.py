"""Copying one listed file from storage to local disk: the listed bytes, or an error.

The order of a download::

    read        all bytes, in spans of a large file by a few streams at once (streams.py)
    look        what size and time does the storage report now? As listed: done
    read again  on handles of its own, looking before and after
                  the same both times, of the listed size: that is the file, whole
                  the same both times, of another size: FileChangedError
                  not the same: somebody writes it; again within the retry budget, then the error

Looking afterwards is what finds a file that was overwritten while it was read: it may have the
listed size and be half old, half new. Storage that ends early without an error gave a short read,
which is transient: its bytes are asked for once more.
"""

import contextlib
import errno
import os
import time
from typing import NamedTuple, Protocol

from air_lightning.errors import AirError, FileChangedError, FileVanishedError, StorageError
from air_lightning.volumes.base import FileInfo
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.streams import Team, cut

Piece = bytes | memoryview

_PAGE = 4096


class State(NamedTuple):
    """What storage reports of a file."""

    size: int
    mtime: float


class Stream(Protocol):
    """One handle on a file."""

    def read(self, offset: int, length: int) -> Piece:
        """Up to ``length`` bytes, valid until the next read; none at the end of the file."""

    def state(self) -> State:
        """What is reported of the file now."""

    def close(self) -> None:
        """Close the handle."""


class Source(Protocol):
    """A file to be read.

    Attributes:
        path: The file as users see it.
        step: Bytes of one read.
        min_span: Bytes that are worth another stream.
        cached: Whether it is read through the kernel's page cache.
        settle_s: For how long storage may report an outdated size.
        times_differ: Whether listings are known to give other times than handles do; remembered
            here, as each file would otherwise be read twice.
    """

    path: str
    step: int
    min_span: int
    cached: bool
    settle_s: float
    times_differ: bool

    def open(self) -> Stream:
        """A handle of its own."""


class UnsettledError(OSError):
    """The file is being written, or its size may be outdated: look again in a moment."""


class NoRangesError(AirError):
    """The source gives files as a whole only."""


class _EndedError(Exception):
    """The file is reported to end before its listed size."""


class Download:
    """One download.

    Args:
        source: The file.
        info: It as listed.
        destination: A local path; overwritten.
        retry: How long to try.

    Attributes:
        mtime: The time that handles reported of what came.
    """

    def __init__(self, source: Source, info: FileInfo, destination: str, retry: Retry) -> None:
        self._source = source
        self._listed = State(info.size, info.mtime)
        self.mtime = info.mtime
        self._destination = destination
        self._retry = retry
        self._careful = source.times_differ
        self._last: State | None = None
        self._last_since = 0.0
        self._target = -1

    def run(self) -> int:
        """Download it; returns its bytes.

        Raises:
            FileVanishedError: It is gone.
            FileChangedError: It does not have the listed size, or goes on changing.
            StorageError: It cannot be read, retries included.
            NoRangesError: The source cannot be read in parts.
        """
        self._target = os.open(self._destination, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._target, 0)
            self._retry.call("download", self._source.path, self._attempt)
        except FileNotFoundError as error:
            raise vanished(self._source.path) from error
        except StorageError as error:
            if isinstance(error.__cause__, UnsettledError):
                raise self._changed() from error
            raise
        finally:
            os.close(self._target)
        return self._listed.size

    def _attempt(self) -> None:
        states = self._read()
        if not self._careful:
            if states == {self._listed}:
                return
            self._careful = True
            self._note(states)
            states = self._read()
        if len(states) > 1:
            self._note(states)
            raise UnsettledError(errno.EAGAIN, "it is being overwritten")
        state = next(iter(states))
        if state.size != self._listed.size:
            self._refuse(state)
        self.mtime = state.mtime
        self._source.times_differ = state.mtime != self._listed.mtime

    def _refuse(self, state: State) -> None:
        """Raise FileChangedError, but only for a size that was reported for a while."""
        # After a short read the kernel itself takes a file for shorter, until it asks again.
        doubtful = state.mtime == self._listed.mtime and state.size < self._listed.size
        since = self._note({state})
        if since is None or (doubtful and time.monotonic() - since < self._source.settle_s):
            raise UnsettledError(errno.EAGAIN, f"it seems to have {state.size} bytes now")
        raise self._changed()

    def _note(self, states: set[State]) -> float | None:
        """Remember what was reported; returns since when it is, None where that is new."""
        state = next(iter(states)) if len(states) == 1 else None
        if state is not None and state == self._last:
            return self._last_since
        self._last, self._last_since = state, time.monotonic()
        return None

    def _changed(self) -> FileChangedError:
        path, listed, now = self._source.path, self._listed.size, self._last
        if now is not None and now.size != listed:
            return changed(path, listed, now.size)
        return FileChangedError(
            f"{path} went on changing while it was read, for {self._retry.budget_s:.0f} s. Write "
            'files under another name and rename them, or pass on_error="skip".'
        )

    def _read(self) -> set[State]:
        """Read all of it; returns what was reported of it, one state where nothing changed."""
        states: set[State] = set()
        spans = cut(self._listed.size, self._source.min_span)
        team = Team(spans, lambda member: self._work(member, states))
        with contextlib.suppress(_EndedError):
            team.run()
        return states

    def _work(self, team: Team, states: set[State]) -> None:
        """What each thread of a download does: read spans until none is left, then look."""
        handle = _Handle(self._source, self._retry, doubtful=self._source.cached and team.shared)
        try:
            for number, span in enumerate(team.spans()):
                if self._careful and not number:
                    self._look(handle, states)
                self._copy(team, handle, span)
            if handle.used and not team.stopped:
                states.add(handle.state())
        except _EndedError:
            states.add(handle.state())
            raise
        finally:
            handle.close()

    def _look(self, handle: "_Handle", states: set[State]) -> None:
        before = handle.state()
        states.add(before)
        if before.size != self._listed.size:
            raise _EndedError

    def _copy(self, team: Team, handle: "_Handle", span: range) -> None:
        handle.used = True
        offset = span.start
        while offset < span.stop:
            piece = handle.read(offset, min(self._source.step, span.stop - offset))
            if team.stopped:
                return
            if not piece:
                raise _EndedError
            self._write(piece, offset)
            offset += len(piece)

    def _write(self, piece: Piece, offset: int) -> None:
        def write() -> None:
            view, at = memoryview(piece), offset
            while view:
                written = os.pwrite(self._target, view, at)
                view, at = view[written:], at + written

        self._retry.call("write", self._destination, write)


class _Handle:
    """A stream that is opened when it is needed, and anew where it fails for the moment.

    Args:
        source: What it opens.
        retry: How long to try.
        doubtful: Whether zeros are read once more. After a short read the kernel fills its page
            with zeros and takes the file for shorter; where another stream asks for the size in
            that moment, the zeros are given as the file's.

    Attributes:
        used: Whether something was copied from it.
    """

    def __init__(self, source: Source, retry: Retry, *, doubtful: bool) -> None:
        self._source = source
        self._retry = retry
        self._doubtful = doubtful
        self._stream: Stream | None = None
        self.used = False

    def read(self, offset: int, length: int) -> Piece:
        """Bytes; none only where the file is reported to end at or before ``offset``."""
        return self._retry.call("download", self._source.path, lambda: self._read(offset, length))

    def state(self) -> State:
        """What is reported of the file now."""
        return self._retry.call("stat", self._source.path, self._state)

    def close(self) -> None:
        """Close what is open; the next use opens it anew."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _state(self) -> State:
        try:
            return self._opened().state()
        except Exception:
            self.close()
            raise

    def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = self._source.open()
        return self._stream

    def _read(self, offset: int, length: int) -> Piece:
        try:
            stream = self._opened()
            piece = stream.read(offset, length)
            if not piece and (size := stream.state().size) > offset:
                raise OSError(errno.EIO, f"a short read: {offset} of {size} bytes came")
            if self._doubtful and _may_be_filled(piece, offset):
                self._confirm(piece, offset)
        except Exception:
            self.close()
            raise
        return piece

    def _confirm(self, piece: Piece, offset: int) -> None:
        """Read once more on a new handle, whose opening drops what the kernel kept."""
        self.close()
        at = 0
        while at < len(piece):
            again = self._opened().read(offset + at, len(piece) - at)
            if not again or again != piece[at : at + len(again)]:
                raise OSError(errno.EIO, f"a short read near byte {offset + at}")
            at += len(again)


def _may_be_filled(piece: Piece, offset: int) -> bool:
    """Whether a page in it, or the last one's part, ends in zeros."""
    if piece and not any(piece[-8:]):
        return True
    first = -(offset + 1) % _PAGE  # the last byte of the first page
    ends = bytes(piece[first::_PAGE])
    number = ends.find(0)
    while number >= 0:
        end = first + number * _PAGE + 1
        if not any(piece[max(0, end - 8) : end]):
            return True
        number = ends.find(0, number + 1)
    return False


def vanished(path: str) -> FileVanishedError:
    """The error for a listed file that is gone."""
    return FileVanishedError(
        f"{path} was listed and is no longer there. Leave training files in place while a run "
        'reads them, or pass on_error="skip".'
    )


def changed(path: str, want: int, got: int) -> FileChangedError:
    """The error for a file that does not have its listed size."""
    return FileChangedError(
        f"{path} was listed with {want} bytes and {got} came. Write files under another name "
        'and rename them, or pass on_error="skip".'
    )
