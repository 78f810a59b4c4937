"""Several train loaders at once: which of them had ended when a save was made.

A CombinedLoader asks all of its loaders for a batch at each step. Under ``max_size`` one that has
ended gives none for the rest of the epoch, and under ``max_size_cycle`` one that has ended once
ends the epoch together with the last of the others. Lightning saves neither, and a loader that has
ended has the state of one that is about to begin.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from air_lightning.data.loader import DataLoader

_REACH = 4  # steps: a batch that is fetched ahead, one that is open, and some to spare


class Ends:
    """Notes, step by step, where each loader of a fit is, so that a save can look back."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[Any]]] = deque(maxlen=_REACH)

    def note(self, fit_loop: Any) -> None:
        """Note where the loaders are after a fetch; called before the fetcher counts it."""
        combined = fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1:
            places = [_place(loader) for loader in combined.flattened]
            self._steps.append((fit_loop._data_fetcher.fetched + 1, places))

    def forget(self) -> None:
        """Begin anew: a pass over the loaders begins."""
        self._steps.clear()

    def batches_ago(self, fit_loop: Any, ahead: int) -> list[int]:
        """For each loader, how many batches it gave in the last so many steps."""
        loaders = fit_loop._combined_loader.flattened
        if ahead == 0 or len(loaders) == 1:
            return [ahead] * len(loaders)
        step = fit_loop._data_fetcher.fetched - ahead
        places = next((found for number, found in self._steps if number == step), None)
        return [
            _since(loader, None if places is None else places[i], ahead)
            for i, loader in enumerate(loaders)
        ]


def _place(loader: Any) -> Any:
    return _key(loader._history[-1]) if isinstance(loader, DataLoader) else None


def _key(position: Any) -> tuple[int, int]:
    return position.epoch, position.batches


def _since(loader: Any, place: Any, ahead: int) -> int:
    if not isinstance(loader, DataLoader):
        return ahead
    history = list(loader._history)
    if place is None:
        return min(ahead, len(history) - 1)
    found = [ago for ago, known in enumerate(reversed(history)) if _key(known) == place]
    # A loader that has begun again since was at its end, which is where the new pass began.
    return found[0] if found else len(history) - 1


def ended(fit_loop: Any, states: Sequence[Any]) -> list[bool]:
    """Which loaders have ended in the epoch under way.

    Args:
        fit_loop: Lightning's.
        states: Of the loaders, as of the last batch that was trained on.
    """
    combined = fit_loop._combined_loader
    if combined is None or fit_loop.epoch_loop.batch_progress.current.processed == 0:
        return [False] * len(states)
    if combined._mode == "max_size_cycle":
        return list(getattr(combined._iterator, "_consumed", [])) or [False] * len(states)
    # Every step takes a batch of each: one that is at an epoch's start now has none left.
    is_longest = combined._mode == "max_size"
    return [is_longest and _is_at_start(state) for state in states]


def _is_at_start(state: Any) -> bool:
    return isinstance(state, dict) and state.get("batches") == 0 and not state.get("before")


@contextmanager
def left_out(combined: Any, has_ended: Sequence[bool]) -> Iterator[None]:
    """Let those that have ended give no batch to iterators that are made in the block."""
    if combined is None or combined._mode != "max_size" or not any(has_ended):
        yield
        return
    loaders = combined.flattened
    rest = [[] if over else loader for loader, over in zip(loaders, has_ended, strict=True)]
    combined.flattened = rest
    try:
        yield
    finally:
        combined.flattened = loaders


def restore_ended(combined: Any, has_ended: Sequence[bool]) -> None:
    """Let an iterator that was made know which of its loaders have ended once."""
    iterator: Any = None if combined is None else combined._iterator
    if hasattr(iterator, "_consumed") and len(iterator._consumed) == len(has_ended):
        iterator._consumed = [
            known or over for known, over in zip(iterator._consumed, has_ended, strict=True)
        ]
