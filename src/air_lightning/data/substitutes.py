"""Which files are tried in place of a bad one.

Neighbours first, with the file that was delivered last, whose place a state keeps: so the choice is
the same for a run that was resumed. Then ever farther ones, so that a long run of bad files ends in
a good one as long as there are any to speak of, and a volume where nothing can be read ends in an
error after a few dozen tries.
"""

from collections.abc import Iterator

_NEAR = 8


def substitutes(place: int, count: int, good: int | None) -> Iterator[int]:
    """Places in a stream, in the order in which they are tried, each one once.

    Args:
        place: Where the bad file is.
        count: The stream's length.
        good: Where the file lies that was delivered last, if one was.
    """
    tried = {place}
    for other in _candidates(place, good):
        if 0 <= other < count and other not in tried:
            tried.add(other)
            yield other


def _candidates(place: int, good: int | None) -> Iterator[int]:
    yield from range(place + 1, place + _NEAR + 1)
    if good is not None:
        yield good
    yield from range(place - 1, place - _NEAR - 1, -1)
    for doubling in range(4, 63):
        yield place + (1 << doubling)
        yield place - (1 << doubling)
