"""The workers of a loader: forked with what the next pass begins with, kept from pass to pass.

A base class of the loader without an ``__init__``. torch's iterator gets a view of the loader, with
the shims of ``worker.py`` in place of dataset, collate function and worker_init_fn: nothing is
wrapped in the loader itself, which Lightning re-creates from its arguments.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from air_lightning.data.counters import Counters
from air_lightning.data.outlive import outliving
from air_lightning.data.passes import RoundRobinIter
from air_lightning.data.progress import Position
from air_lightning.data.timing import sending_paused
from air_lightning.data.turns import Turns
from air_lightning.data.worker import WorkerSide


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
        view = self._equipped(self._side, position, seed)
        if self.num_workers == 0:
            return _SingleProcessDataLoaderIter(view)
        self.check_worker_number_rationality()
        with sending_paused():
            self._iterator = RoundRobinIter(view, position.next_worker)
        return self._iterator

    def _equipped(self, side: WorkerSide, position: Position, seed: int) -> Any:
        # Without workers the dataset is as alive as a live worker's, unless a state was loaded.
        tell = self.num_workers > 0 or position.loaded is not None
        standings, before = (position.known, position.before) if tell else ({}, ())
        workers = self.num_workers
        side.equip(
            self.collate_fn,
            self.worker_init_fn,
            standings,
            before,
            turns=Turns(workers, self.batch_size or 1) if workers else None,
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
