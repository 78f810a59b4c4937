"""Readers of one file on a volume that outlive the trouble of its handle."""

import io
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from air_lightning.volumes.retry import Retry

_logger = logging.getLogger("air_lightning")

_MOST_VIEWS = 1024  # IOV_MAX of Linux: of more, preadv and writev refuse all


class RetryingReader(io.RawIOBase):
    """A seekable file that opens itself anew where a read fails for the moment.

    A handle that went stale (ESTALE, ENOTCONN after a remount) never recovers by itself.

    Args:
        opener: Opens the file; the reader owns what it returns.
        path: The file as users see it.
        retry: How long to try.
    """

    def __init__(self, opener: Callable[[], BinaryIO], path: str, retry: Retry) -> None:
        super().__init__()
        self._opener = opener
        self._path = path
        self._retry = retry
        self._position = 0
        self._file: BinaryIO | None = None
        retry.call("open", path, self._handle)

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position of the next read."""
        if whence == io.SEEK_END:
            self._position = self._retry.call(
                "read", self._path, lambda: self._handle().seek(offset, whence)
            )
        else:
            self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer; 0 at the end of the file."""
        data = self._retry.call("read", self._path, lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file beneath."""
        if not self.closed:
            self._drop()
        super().close()

    def _handle(self) -> BinaryIO:
        if self._file is None:
            self._file = self._opener()
        return self._file

    def _read(self, length: int) -> bytes:
        try:
            handle = self._handle()
            if handle.tell() != self._position:
                handle.seek(self._position)
            return handle.read(length)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                _logger.debug("Closing a broken handle of %s: %s", self._path, error)


class FileRanges:
    """Reads parts of a local file into memory that is there already; for one thread.

    Args:
        local: The file, as the operating system knows it.
        path: The file as users see it.
        retry: How long to try.
    """

    def __init__(self, local: str, path: str, retry: Retry) -> None:
        self._local = local
        self._path = path
        self._retry = retry
        self._descriptor: int | None = None

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """See :class:`~air_lightning.volumes.base.RangeReader`."""
        waiting = list(reversed(views))
        done = 0

        def read() -> int:
            return self._read(offset + done, waiting)

        while waiting:
            count = self._retry.call("read", self._path, read)
            if count == 0:
                break
            done += count
            advance(waiting, count)
        return done

    def close(self) -> None:
        """Close the file, if it was opened."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                _logger.debug("Closing a handle of %s: %s", self._path, error)

    def _read(self, position: int, waiting: list[memoryview]) -> int:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._local, os.O_RDONLY | os.O_CLOEXEC)
            return os.preadv(self._descriptor, first_views(waiting), position)
        except OSError:
            self.close()  # a handle that went stale never recovers by itself
            raise


def first_views(waiting: list[memoryview]) -> list[memoryview]:
    """The views that one system call may take of a list that lies in reverse order."""
    return waiting[: -_MOST_VIEWS - 1 : -1]


def advance(waiting: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of views that lie in reverse order."""
    while waiting and count >= waiting[-1].nbytes:
        count -= waiting.pop().nbytes
    if count:
        waiting[-1] = waiting[-1][count:]
