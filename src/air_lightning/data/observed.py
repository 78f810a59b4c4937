"""What a loader tells beside its batches: statistics, and whether the other ranks read the same.

A base class of the loader without an ``__init__``: it holds nothing until a pass begins, and a copy
of a loader begins anew.
"""

from typing import Any

from air_lightning.data.agreement import Agreement, agree
from air_lightning.data.counters import Counters
from air_lightning.data.progress import Position
from air_lightning.data.timing import WaitTimer


class Observed:
    """The part of a loader that looks at what is going on.

    Attributes:
        equal_batches: Whether it is an error, and not only a warning, that other ranks have more or
            fewer batches, or other options, as for a training loop in which every step waits for
            all ranks.
    """

    equal_batches = False
    num_workers: int
    dataset: Any
    _timer: WaitTimer
    _counters: Counters | None = None
    _agreement: Agreement | None = None

    def statistics(self) -> dict[str, float]:
        """What this rank's workers did since the loader was made, by name.

        ``batches`` that were given and ``data_wait_s``, the seconds that ``next()`` took for them;
        ``files_downloaded``, ``bytes_downloaded`` and ``download_s`` (of all threads together),
        ``cache_hits``, ``evictions``, ``retries`` after transient errors, ``files_skipped`` (bad
        ones, replaced) and ``reads_through`` (files too large for the disk, read where they lie).
        """
        return {
            "batches": float(self._timer.batches),
            "data_wait_s": self._timer.wait_s,
            **self._counting().totals(),
        }

    def _counting(self) -> Counters:
        if self._counters is None:
            self._counters = Counters(max(1, self.num_workers))
        return self._counters

    def _own_row(self) -> memoryview | None:
        """Where this process counts for the loader, if it makes the items itself."""
        return self._counting().row(0) if self.num_workers == 0 else None

    def _agree(self, position: Position, batches: int | None) -> Agreement | None:
        """The agreement with the other ranks; a new one where they could differ since the last.

        Args:
            position: Where the pass begins.
            batches: How many its epoch has; None where that is not known.
        """
        reached = self._agreement
        if reached is None or reached.refused or position.loaded is not None:
            self._agreement = agree(
                self.dataset,
                num_workers=self.num_workers,
                position=position,
                batches=None if batches is None else batches - position.batches,
                strict=self.equal_batches,
            )
        return self._agreement
