"""How many bytes of one stream's files may be ahead, also where a size is told by the first look.

A file enters in the stream's order before its download starts, and leaves when it is taken. Until
a size is known only a couple may enter; from then on one whose size is not known is taken to be as
large as the last one that was looked at, and corrected when it is looked at itself.
"""

import threading

_BLIND = 2  # files on their way while no size of the stream is known
_PATIENCE_S = 2.0  # for the first size: a look that hangs must not keep all other files back


class Budget:
    """The bytes of one stream; used by its threads.

    Args:
        max_bytes: How many may be ahead; one file always may.
        patience_s: Seconds after which files are let in though no size is known yet.
    """

    def __init__(self, max_bytes: int, *, patience_s: float = _PATIENCE_S) -> None:
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._blind: set[int] = set()
        self._typical: int | None = None
        self._closed = False

    def enter(self, number: int, size: int | None) -> int:
        """Wait until a file may be downloaded; returns the bytes that it is taken to have.

        Args:
            number: The file's number in the stream; one that is in already need not wait.
            size: Its bytes, None where they are not known.
        """
        with self._changed:
            if number in self._sizes:
                return self._sizes[number]
            if size is None:
                size = self._guess(number)
            self._changed.wait_for(lambda: self._closed or self._fits(size))
            self._sizes[number] = size
            self._bytes += size
            return size

    def correct(self, number: int, size: int) -> None:
        """Say how large a file is."""
        with self._changed:
            self._typical = size
            self._blind.discard(number)
            if number in self._sizes:
                self._bytes += size - self._sizes[number]
                self._sizes[number] = size
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """A file was taken, or is not wanted any more."""
        with self._changed:
            self._bytes -= self._sizes.pop(number, 0)
            self._blind.discard(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Let everything in: nobody wants it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _guess(self, number: int) -> int:
        def may_guess() -> bool:
            return self._closed or self._typical is not None or len(self._blind) < _BLIND

        if not self._changed.wait_for(may_guess, self._patience_s):
            self._typical = 0
        if self._typical is None:
            self._blind.add(number)
        return self._typical or 0

    def _fits(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._max_bytes
