"""The iterators that a loader hands out: one pass, its timing, and torch's with a first turn."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

from air_lightning.data.agreement import Agreement
from air_lightning.data.counters import counting_into
from air_lightning.data.deaths import watch
from air_lightning.data.generators import borrowed_generators
from air_lightning.data.progress import Position
from air_lightning.data.timing import WaitTimer
from air_lightning.data.worker import Delivered
from air_lightning.errors import WorkerDiedError

if TYPE_CHECKING:
    from air_lightning.data.loader import DataLoader


class Pass:
    """One pass over a loader with a state: unwraps batches and moves the loader's position."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        # A token and not the pass itself: with a cycle, workers would outlive a deleted loader
        # until the garbage collector happens to run.
        self._token = loader.pass_token = object()
        self._enter(loader.begin())
        # What other grids left may be nothing for this rank, but something for others.
        self._resumed = self._position.batches > 0 and not self._position.before
        self._failed = self._ended = False

    def _enter(self, begun: tuple[Position, Iterator[Any]]) -> None:
        self._position, self._iterator = begun
        if self._loader.num_workers > 0:
            watch(self)
        self._last = self._loader.batches_at_end(self._position)

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        self._check_current()
        if self._ended:
            raise StopIteration
        try:
            delivered = self._pull()
        except StopIteration:
            self._end()
            raise
        except Exception:
            self._failed = True
            raise
        self._consume(delivered)
        return delivered.batch

    @property
    def at_end(self) -> bool:
        """Whether the batch delivered last was the epoch's last; False where that is unknown."""
        return self._position.batches == self._last

    def _check_current(self) -> None:
        if self._loader.pass_token is not self._token:
            raise RuntimeError(
                "This iterator's pass is over: iter() or load_state_dict() was called on its "
                "loader since. The loader of a dataset with a state has one pass at a time; make "
                "a second loader to read in parallel."
            )

    def _pull(self) -> Delivered:
        try:
            return self._fetch()
        except StopIteration:
            if not self._resumed or self._failed:
                raise
            # Nothing was left: the state was taken after the last batch, by someone who could
            # not know that it was the last. An empty epoch would be skipped in silence.
            self._resumed = False
            self._loader.record_end()
            self._enter(self._loader.begin())
            return self._fetch()

    def _fetch(self) -> Delivered:
        if self._loader.num_workers > 0:
            return self._from_worker()
        with borrowed_generators():
            return next(self._iterator)  # type: ignore[no-any-return]

    def _from_worker(self) -> Delivered:
        try:
            delivered: Delivered = next(self._iterator)
        except WorkerDiedError:
            raise
        except RuntimeError as error:
            dead = [worker for worker in self._workers() if not worker.is_alive()]
            if dead:
                raise _died(dead, self._position) from error
            raise
        return delivered

    def death(self) -> WorkerDiedError | None:
        """The error that says which workers of this pass were killed, if any were."""
        # Those of a pass that is over have ended, too, with no fault.
        dead = [worker for worker in self._workers() if worker.exitcode]
        return _died(dead, self._position) if dead else None

    def _workers(self) -> list[Any]:
        workers: list[Any] = getattr(self._iterator, "_workers", [])
        return workers

    def _consume(self, delivered: Delivered) -> None:
        self._resumed = False
        streams = max(1, self._loader.num_workers)
        self._position = self._position.after(delivered.worker, delivered.standing, streams=streams)
        self._loader.record(self._position)
        if self.at_end:
            self._loader.record_end()

    def _end(self) -> None:
        self._ended = True
        if not self._failed:
            self._loader.record_end()


class TimedIterator:
    """Counts the time that each ``next()`` takes, and what it does.

    Args:
        iterator: Of the batches.
        timer: Of the loader.
        row: Where to count what the calling thread itself does, if it makes the items.
        agreement: With the other ranks, if there is one to be reached.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        timer: WaitTimer,
        row: memoryview | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._iterator = iterator
        self._timer = timer
        self._row = row
        self._agreement = agreement

    def __iter__(self) -> "TimedIterator":
        return self

    def __next__(self) -> Any:
        if self._agreement is not None:
            self._agreement.check()
        began = time.perf_counter()
        try:
            with counting_into(self._row):
                batch = next(self._iterator)
        except StopIteration:
            self._timer.end_pass()
            if self._agreement is not None:
                self._agreement.check(last=True)
            raise
        self._timer.add(began, time.perf_counter())
        if getattr(self._iterator, "at_end", False):
            # Lightning stops at the loader's length, and never pulls the StopIteration after it.
            self._timer.end_pass()
        return batch

    def __del__(self) -> None:
        # A pass that is broken off has no other end.
        if not sys.is_finalizing():
            self._timer.end_pass()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is at its end: no iterator of workers can be copied, and Lightning copies
        # containers that hold one.
        return iter, ((),)


def _died(workers: list[Any], position: Position) -> WorkerDiedError:
    told = ", ".join(
        f"{worker.name} (pid {worker.pid}, "
        + (f"signal {-code})" if code < 0 else f"exit code {code})")
        for worker in workers
        for code in [worker.exitcode or 0]
    )
    return WorkerDiedError(
        f"A worker of the DataLoader ended in the middle of epoch {position.epoch}, after "
        f"{position.batches} batches: {told}. Signal 9 is mostly the kernel's, for memory (dmesg | "
        "grep -i oom). Nothing is lost: start again from the last checkpoint, with fewer workers, "
        "or a smaller batch, prefetch_factor or read_ahead."
    )


# What it takes to end an iterator's workers, by the iterator's id. The garbage collector finalizes
# all of a cycle's queues before it asks anything in it to end: torch would ask its workers through
# closed ones, and wait for each of them until it is terminated, 5 s later. Every exception of a
# worker makes such a cycle, and a Trainer is in one.
_means: dict[int, tuple[Any, ...]] = {}


class RoundRobinIter(_MultiProcessingDataLoaderIter):
    """torch's iterator with the first turn given to the worker whose turn it was."""

    def __init__(self, loader: "DataLoader[Any]", first_worker: int) -> None:
        self._first_worker = first_worker
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown = True  # what torch's own end of it looks at may not be there yet
            raise
        queues = self._index_queues, self._worker_result_queue
        _means[id(self)] = (*queues, self._workers, self._workers_done_event)

    @override
    def __del__(self) -> None:
        super().__del__()
        _means.pop(id(self), None)

    @override
    def _try_put_index(self) -> None:
        if self._send_idx == 0:
            # torch has just made a new cycle that begins at worker 0.
            for _ in range(self._first_worker):
                next(self._worker_queue_idx_cycle)
            self._first_worker = 0
        super()._try_put_index()
