"""The items of one pass: every file of a stream transformed, or a good one in place of a bad one.

A file is bad that cannot be had, or that the transform fails on. The number of items does not
depend on it: were one left out, the other ranks would wait for the batch that this one has not.
"""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from air_lightning.data.ahead import ReadAhead
from air_lightning.data.cache import is_shortage
from air_lightning.data.counters import FILES_SKIPPED, count
from air_lightning.data.generators import without_trace
from air_lightning.data.leases import Lease
from air_lightning.data.position import StreamPass
from air_lightning.data.substitutes import substitutes
from air_lightning.errors import StorageError

_logger = logging.getLogger("air_lightning")
_T = TypeVar("_T")


class Items(Generic[_T]):
    """Takes the items of a pass, in the stream's order.

    Args:
        current: The pass. Whoever takes counts what was delivered; which file was the last good
            one is noted here.
        ahead: Where the files come from.
        transform: Gets the local path, while it is valid.
        name: A file's path on the volume, by its number in the list; for messages.
        skip: Called for each bad file that was replaced, returns how many there were so far. None
            lets the first bad file raise.
    """

    def __init__(
        self,
        current: StreamPass,
        ahead: ReadAhead,
        transform: Callable[[str], _T],
        *,
        name: Callable[[int], str],
        skip: Callable[[], int] | None,
    ) -> None:
        self._pass = current
        self._ahead = ahead
        self._transform = transform
        self._name_of = name
        self._skip = skip

    def take(self) -> tuple[Lease, _T]:
        """The next item, and what holds its file until it is closed.

        Raises:
            StorageError: The file cannot be had; or no file can be found in its place.
        """
        place = self._pass.delivered
        try:
            lease = self._ahead.take()
        except StorageError as error:
            if self._must_raise(error):
                raise
            return self._replace(self._name(place), error)
        try:
            found = lease, self._transformed(lease)
        except Exception as error:
            name = self._name(place)
            if self._must_raise(error):
                _add_note(error, f"The file is {name}.")
                raise
            return self._replace(name, error)
        self._pass.good = place
        return found

    def _replace(self, bad: str, error: Exception) -> tuple[Lease, _T]:
        """A good file of the same stream: one after it, or the last good one, or another."""
        current, tried = self._pass, 0
        for other in substitutes(current.delivered, len(current.indices), current.good):
            tried += 1
            try:
                lease = self._ahead.fetch(int(current.indices[other]))
                found = lease, self._transformed(lease)
            except Exception as also:
                if self._must_raise(also):
                    raise
                _logger.debug("Nor can %s be used: %s", self._name(other), also)
            else:
                current.good = other
                self._report(bad, error, self._name(other))
                return found
        raise StorageError(
            f"{bad} cannot be used ({type(error).__name__}: {error}), nor can any of the "
            f"{tried} other files of its stream that were tried in its place. Check the "
            "volume, and the function given to map()."
        ) from error

    def _report(self, bad: str, error: Exception, taken: str) -> None:
        assert self._skip is not None
        count(FILES_SKIPPED)
        _logger.warning(
            "Skipped the bad file %s (%s: %s) and took %s in its place; %d skipped so far",
            *(bad, type(error).__name__, error, taken, self._skip()),
        )

    def _transformed(self, lease: Lease) -> _T:
        try:
            if self._skip is None:
                return self._transform(lease.path)
            with without_trace():
                return self._transform(lease.path)
        except BaseException:
            lease.close()
            raise

    def _must_raise(self, error: Exception) -> bool:
        """A full disk makes no file bad: skipping would lose good ones without a word."""
        return self._skip is None or is_shortage(error)

    def _name(self, place: int) -> str:
        return self._name_of(int(self._pass.indices[place]))


def _add_note(error: Exception, note: str) -> None:
    """Say which file it was: a decoder's own message seldom does."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    _logger.error("%s: %s. %s", type(error).__name__, error, note)
