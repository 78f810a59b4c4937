"""A drop-in ``torch.utils.data.DataLoader`` that knows what was consumed.

The promise: ``state_dict()`` speaks of the batches that ``next()`` returned, never of prefetched
ones, and a loader that loads it goes on with the very next batch, random draws included::

    iter(loader)          a position is chosen: where a load left it, or the start of an epoch
      torch's iterator    gets a view of the loader with the shims of worker.py in place of
                          dataset, collate_fn and worker_init_fn; the first turn is the position's
    next(iterator)        Delivered(batch, standing) is unwrapped, the position moves, and the time
                          that next() took is counted (timing.py)

Nothing is wrapped in ``__init__``: Lightning re-creates loaders from their arguments and would
wrap twice. The position lives on the loader, so it is there after the iterator is gone.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch
import torch.utils.data
from typing_extensions import override

from air_lightning.data.counters import rank_totals
from air_lightning.data.elastic import batches_left, position_from
from air_lightning.data.observed import Observed
from air_lightning.data.options import (
    PREFETCH_FACTOR,
    resolve_context,
    resolve_epoch,
    resolve_prefetch,
    resolve_workers,
)
from air_lightning.data.outlive import outliving
from air_lightning.data.passes import Pass, TimedIterator
from air_lightning.data.progress import Identity, Position, epoch_of, to_state
from air_lightning.data.stream import Checkpointable, data_rank
from air_lightning.data.timing import WaitTimer, sending_paused
from air_lightning.data.worker import stream_seed
from air_lightning.data.workers import Pooled
from air_lightning.errors import (
    EmptyVolumeError,
    InvalidArgumentError,
    NotCheckpointableError,
)

T_co = TypeVar("T_co", covariant=True)

HISTORY = 8
"""How many batches back ``state_dict(batches_ago=...)`` reaches."""

_NOT_COPIED = ("_iterator", "_side", "_counters", "_agreement", "pass_token")


class DataLoader(Observed, Pooled, torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader with defaults for volumes, exact length, and a state that resumes exactly.

    With a :class:`Checkpointable` iterable dataset (``UCVolumeDataset``, or any that has
    ``state_dict`` and ``load_state_dict``) the loader has a state. Datasets without work as in
    torch's own loader. Arguments are torch's; those that differ:

    Args:
        dataset: The dataset. If it has a ``set_epoch``, the loader calls it before each pass.
        num_workers: Worker processes. -1: 6 if torch.distributed is initialised when the loader
            is made, else 48. Any other value wins.
        prefetch_factor: Batches that each worker prepares ahead; left out without workers.
        persistent_workers: Always on with workers, whatever is given: re-forked workers forget
            which cached files they may evict.
        multiprocessing_context: None or fork. Workers are forked, as they share one cache.
        generator: Draws the workers' base seed, as in torch's. None: for a Checkpointable
            dataset a generator of the loader's own, so that iterating draws nothing from torch's
            global one.
        elastic: Whether ``load_state_dict`` takes the states of all ranks of another grid, and
            shares out over this one what they left of the epoch.

    Passes and epochs: a pass that was finished (``StopIteration``, or ``len(loader)`` batches
    taken) is followed by the next epoch; one that was abandoned by the same epoch from its start.
    ``set_epoch`` overrides. A dataset without ``set_epoch`` and without an ``"epoch"`` in its
    state is put back to its first state for each pass.

    Random streams: before each batch Python's, NumPy's and torch's generators are seeded with a
    hash of the dataset's ``seed``, ``PL_GLOBAL_SEED`` (Lightning's ``seed_everything``) if it is
    set, rank, epoch, worker, and the index of the batch's first item in its worker's stream.
    Nothing needs to be stored to go on exactly. Without workers the training process's
    generators are put back after each batch. A ``worker_init_fn`` runs as in torch's; seeds that
    it sets hold until the first batch.

    Raises:
        InvalidArgumentError: ``num_workers`` or ``prefetch_factor`` is out of range, or a start
            method other than fork was asked for, here or for the whole process.
    """

    # Spelled out, without **kwargs: for a signature that has them Lightning compares attributes
    # with torch's defaults, and would re-create a loader of num_workers=0 with 48.
    def __init__(  # noqa: PLR0917 - torch's own order of arguments
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = -1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = PREFETCH_FACTOR,
        persistent_workers: bool = True,  # noqa: ARG002 - torch's argument; always on
        pin_memory_device: str = "",
        in_order: bool = True,
        elastic: bool = False,
    ) -> None:
        workers = resolve_workers(num_workers)
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=resolve_context(multiprocessing_context, workers),
            generator=generator,
            prefetch_factor=resolve_prefetch(prefetch_factor, workers),
            persistent_workers=workers > 0,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.elastic = elastic
        self._history = deque([Position(epoch_of(dataset))], maxlen=HISTORY + 1)
        self._dataset_epoch = epoch_of(dataset)
        self._carries = not hasattr(dataset, "set_epoch")
        self._asked_epoch: int | None = None
        self._asked_at: Position | None = None
        self._files: Mapping[str, Any] | None = None
        self.pass_token: object = None
        self._timer = WaitTimer(totals=rank_totals)

    @override
    def __iter__(self) -> Any:
        self._timer.begin_pass()
        iterator = Pass(self) if self._checkpointable else super().__iter__()
        agreement = self._agree(self._history[-1], self.batches_at_end(self._history[-1]))
        return TimedIterator(iterator, self._timer, self._own_row(), agreement)

    @override
    def _get_iterator(self) -> Any:
        init = outliving(self._counting().starting(self.worker_init_fn))
        view = self._view(worker_init_fn=init)
        with sending_paused(when=self.num_workers > 0):
            return super(DataLoader, view)._get_iterator()

    @override
    def __len__(self) -> int:
        """Batches that this rank delivers in one epoch, also while it resumes in the middle.

        Exact for a dataset with ``slice_length`` (ours); torch's rule for others.

        Raises:
            TypeError: The dataset has no length.
        """
        if hasattr(self.dataset, "slice_length"):
            return self._batches_left(Position(0))
        return super().__len__()

    def begin(self) -> tuple[Position, Iterator[Any]]:
        """Start torch's iterator at the position of the next pass."""
        position = self._next_position()
        self._require_batches(position)
        self._asked_epoch = None
        return position, self._start(position)

    def _require_batches(self, position: Position) -> None:
        """Refuse an epoch of which ``drop_last`` leaves nothing: no step would be trained."""
        told = hasattr(self.dataset, "slice_length") and hasattr(self.dataset, "__len__")
        if not self.drop_last or position.before or not told:
            return
        files = len(self.dataset)
        if files and self._batches_left(Position(0)) == 0:
            raise EmptyVolumeError(
                f"drop_last=True leaves no batch: the {files} files of this rank are shared out "
                f"over num_workers={self.num_workers}, and batch_size={self.batch_size} is more "
                "than each of them has. Use fewer workers, a smaller batch_size, or "
                "drop_last=False."
            )

    def record(self, position: Position) -> None:
        """Note that one more batch was consumed."""
        self._history.append(position)

    def record_end(self) -> None:
        """Note that the last batch recorded was the epoch's last."""
        self._history[-1] = self._history[-1].end()

    def _next_position(self) -> Position:
        position, at_epoch = self._history[-1], self._epoch_asked_for()
        if position.loaded is not None and at_epoch in (None, position.epoch):
            return position
        if position.finished or self._reached_length(position):
            position = position.end().settled(carry=self._carries)
        at_epoch = position.epoch if at_epoch is None else at_epoch
        return Position(at_epoch, origins=position.origins)

    def _epoch_asked_for(self) -> int | None:
        if self._asked_epoch is not None:
            return self._asked_epoch
        # The dataset's own set_epoch, called by a training loop written for torch's loader.
        there, resuming = epoch_of(self.dataset), self._history[-1].loaded is not None
        return None if resuming or there == self._dataset_epoch else there

    def _reached_length(self, position: Position) -> bool:
        """Lightning stops at the length, and never pulls the StopIteration after it."""
        if hasattr(self.dataset, "slice_length"):
            # The end is known exactly; batches that were of another size before are not the length.
            return False
        try:
            return 0 < len(self) <= position.batches
        except TypeError:
            return False

    def _start(self, position: Position) -> Any:
        self._history.clear()
        self._history.append(position)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(position.epoch)
        self._dataset_epoch = epoch_of(self.dataset)
        seed = stream_seed(self.dataset, data_rank()[0], len(position.before))
        return self._run(position, seed)

    def batches_at_end(self, position: Position) -> int | None:
        """``position.batches`` at the end of its epoch; None for a dataset of unknown length."""
        if not hasattr(self.dataset, "slice_length"):
            return None
        return position.batches + self._batches_left(position)

    @property
    def batches_left(self) -> int | None:
        """Batches that are left of the epoch it is in; None for a dataset of unknown length."""
        position = self._history[-1]
        return self._batches_left(position) if hasattr(self.dataset, "slice_length") else None

    def _batches_left(self, position: Position) -> int:
        return batches_left(self.dataset, position, self._identity())

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way; between passes, of the next one."""
        if self._asked_epoch is not None:
            return self._asked_epoch
        return self._history[-1].settled().epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` begin this epoch.

        A position that was loaded in the middle of the same epoch is kept; that of another epoch
        is given up.

        Raises:
            InvalidArgumentError: ``epoch`` is not a count.
        """
        self._asked_epoch, self._asked_at = resolve_epoch(epoch), self._history[-1]

    def state_dict(self, *, batches_ago: int = 0) -> dict[str, Any]:
        """What this rank has consumed, JSON-serialisable if the dataset's own states are.

        Args:
            batches_ago: Report the state as it was this many batches earlier in this pass, for a
                training loop that fetches ahead of the step it is in. At most 8.

        Raises:
            NotCheckpointableError: The dataset has no state.
            InvalidArgumentError: There is no record of so many batches ago.
        """
        self._require_checkpointable()
        if type(batches_ago) is not int or not 0 <= batches_ago < len(self._history):
            raise InvalidArgumentError(
                f"state_dict(batches_ago={batches_ago!r}) was asked for; the loader has the "
                f"states of 0 to {len(self._history) - 1} batches ago in this pass (at most "
                f"{HISTORY}). Take the state sooner after the batch."
            )
        position = self._history[-1 - batches_ago]
        asked = batches_ago == 0 and self._asked_epoch is not None
        if asked and (position.finished or position is self._asked_at):
            # Not when batches were consumed since: then the pass before goes on.
            position = self._next_position()
        return to_state(position, self._identity(), carry=self._carries)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state: the next ``iter()`` begins with the batch after it.

        Args:
            state_dict: This rank's state, or the states of all ranks. With ``elastic=True`` these
                may be of another grid; what it left is shared out, each file once.

        Live workers are shut down; the next ``iter()`` forks new ones that skip what was
        delivered. Until the first ``next()``, ``state_dict()`` returns what was loaded.

        Raises:
            NotCheckpointableError: The dataset has no state.
            GridMismatchError: It is of another grid, and cannot be or must not be shared out.
            StateError: It is of an unknown version, malformed, another rank's, or was taken
                mid-epoch of another file list.
        """
        self._require_checkpointable()
        position = position_from(state_dict, self.dataset, self._identity(), elastic=self.elastic)
        self._drop_pool()
        self.pass_token = self._asked_epoch = None
        self._history.clear()
        self._history.append(position)
        self._dataset_epoch = epoch_of(self.dataset)

    def _identity(self) -> Identity:
        if self._files is None and hasattr(self.dataset, "file_list_state"):
            self._files = self.dataset.file_list_state()
        order = self.dataset.order_state() if hasattr(self.dataset, "order_state") else None
        place = (*data_rank(), self.num_workers, self.batch_size, self._files)
        return Identity(*place, not self._carries, order, self.drop_last)

    @property
    def _checkpointable(self) -> bool:
        iterable = isinstance(self.dataset, torch.utils.data.IterableDataset)
        return iterable and isinstance(self.dataset, Checkpointable)

    def _require_checkpointable(self) -> None:
        if not self._checkpointable:
            raise NotCheckpointableError(
                f"The state of a loader over {type(self.dataset).__name__} was asked for; an "
                "IterableDataset with state_dict() and load_state_dict() is wanted. Use "
                "UCVolumeDataset, or give the dataset these two methods."
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has the same arguments and position, and workers of its own."""
        state = dict(vars(self))
        state.update(dict.fromkeys(_NOT_COPIED), _history=copy.copy(self._history))
        return state
