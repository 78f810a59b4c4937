"""The workers of a loader: forked with what the next pass begins with, kept from pass to pass.

A base class of the loader without an ``__init__``. torch's iterator gets a view of the loader, with
the shims of ``worker.py`` in place of dataset, collate function and worker_init_fn: nothing is
wrapped in the loader itself, which Lightning re-creates from its arguments.
"""

import copy
import functools
from collections.abc import Callable
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from air_lightning.data.counters import Counters
from air_lightning.data.outlive import block_termination, outliving
from air_lightning.data.passes import RoundRobinIter
from air_lightning.data.progress import Position
from air_lightning.data.timing import sending_paused
from air_lightning.data.turns import Turns
from air_lightning.data.worker import WorkerSide


class StartInTurn(ForkContext):
    """Starts processes when all are there, the one first whose batch is needed first.

    A fork of a large process takes tens of milliseconds. In the order of their numbers, a resume
    whose first batch comes from the last of 48 workers would wait for all the others. These do
    nothing yet: on few processors, the first worker and the forks would wait for them.

    Args:
        count: How many processes there will be.
        first: The number of the first one.
        hold: What all others do before anything else.
    """

    def __init__(self, count: int, first: int, hold: Callable[[], None]) -> None:
        super().__init__()
        self._count, self._first, self._hold = count, first, hold
        self._made: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override] # noqa: N802 - the name of the class that it stands for
        """A process whose ``start`` waits for the last one's."""
        hold = None if len(self._made) == self._first else self._hold
        kwargs["target"] = functools.partial(_run_held, hold, kwargs["target"])
        process: Any = super().Process(*args, **kwargs)
        self._made.append(process)
        process.start = self._start_last if len(self._made) == self._count else _later
        return process  # type: ignore[no-any-return]

    def _start_last(self) -> None:
        for process in (*self._made[self._first :], *self._made[: self._first]):
            del process.start  # the class's own is behind it
            process.start()

    def kill_all(self) -> None:
        """End those that were started, where not all could be: nobody would ever ask them."""
        for process in self._made:
            if process.pid is not None:
                process.kill()
                process.join()


def _later() -> None:
    """Start nothing: the last one starts all."""


def _run_held(hold: Callable[[], None] | None, target: Callable[..., Any], *args: Any) -> None:
    block_termination()
    try:
        if hold is not None:
            hold()
    except KeyboardInterrupt:
        return  # without a word, as torch's workers
    target(*args)


class Pooled:
    """The part of a loader that runs its workers."""

    dataset: Any
    num_workers: int
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    generator: Any
    check_worker_number_rationality: Callable[[], None]
    _counting: Callable[[], Counters]
    _iterator: Any
    _side: WorkerSide | None = None

    def _run(self, position: Position, seed: int) -> Any:
        """Torch's iterator over the batches from a position on."""
        if self._side is None:
            self._side = WorkerSide(self.dataset)
        self._side.announce(position.epoch, seed)
        if position.loaded is not None or not self._pool_alive():
            # Live workers hold datasets that moved on: only a fork takes standings over.
            self._drop_pool()
        if self._iterator is not None:
            self._iterator._reset(self)
            return self._iterator
        workers, first = self.num_workers, position.next_worker
        turns = Turns(workers, self.batch_size or 1) if workers else None
        view = self._equipped(self._side, position, seed, turns)
        if turns is None:
            return _SingleProcessDataLoaderIter(view)
        self.check_worker_number_rationality()
        view.multiprocessing_context = context = StartInTurn(workers, first, turns.hold)
        try:
            with sending_paused():
                self._iterator = RoundRobinIter(view, first)
        except BaseException:
            context.kill_all()
            raise
        finally:
            turns.begin()
        return self._iterator

    def _equipped(
        self, side: WorkerSide, position: Position, seed: int, turns: Turns | None
    ) -> Any:
        # Without workers the dataset is as alive as a live worker's, unless a state was loaded.
        tell = self.num_workers > 0 or position.loaded is not None
        standings, before = (position.known, position.before) if tell else ({}, ())
        side.equip(
            self.collate_fn,
            self.worker_init_fn,
            standings,
            before,
            turns=turns,
            first_worker=position.next_worker,
        )
        init = outliving(self._counting().starting(side.init))
        view = self._view(dataset=side, collate_fn=side.collate, worker_init_fn=init)
        if self.generator is None:
            # Otherwise each iter() draws from the global generator that dropout draws from.
            view.generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        return view

    def _view(self, **attributes: Any) -> Any:
        """This loader as torch's iterator shall see it."""
        view = copy.copy(self)
        view.__dict__.update(attributes)
        return view

    def _pool_alive(self) -> bool:
        pool: Any = self._iterator
        return pool is not None and all(worker.is_alive() for worker in pool._workers)

    def _drop_pool(self) -> None:
        pool: Any = self._iterator
        if pool is not None:
            pool._shutdown_workers()
            self._iterator = None
