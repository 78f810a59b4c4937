"""The validations of a Trainer's fit: how far one has come, and the state from before it.

A save in the middle of a validation is one from before it: it is run again, from its beginning.
"""

from collections.abc import Callable, Mapping
from typing import Any


class Validation:
    """Notes on one Trainer's validations.

    Args:
        loop: Lightning's loop of the validations within fit.
        capture: Gives the state that a validation may change.

    Attributes:
        is_forced: Whether a save counts as one within a validation, which is about to begin.
    """

    def __init__(self, loop: Any, capture: Callable[[], Mapping[str, Any]]) -> None:
        self._capture = capture
        self._before: Mapping[str, Any] | None = None
        self.is_forced = False
        self.has_ended = False
        self._run = loop.run
        self._on_end = loop._on_evaluation_end
        self._trainer = loop.trainer
        loop.run = self._run_noted
        loop._on_evaluation_end = self._on_evaluation_end

    @property
    def is_running(self) -> bool:
        """Whether one is under way, its last hooks included."""
        return self._before is not None or self.is_forced

    @property
    def before(self) -> Mapping[str, Any] | None:
        """The state from before the one that would be run again."""
        return None if self.has_ended else self._before

    def forget(self) -> None:
        """None is under way: one that raised ended its fit."""
        self._before, self.has_ended = None, False

    def _run_noted(self) -> Any:
        self.forget()
        if self._trainer.state.fn == "fit" and not self._trainer.sanity_checking:
            self._before = self._capture()
        result = self._run()
        # Not where it raised: callbacks save on an exception when the loops have been left.
        self.forget()
        return result

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        self.has_ended = True  # its results are known to callbacks, which save now
        self._on_end(*args, **kwargs)
