"""What runs where items are made: in a forked worker, or in the training process without workers.

torch's fetcher sees the shims of this module in place of the user's dataset and collate function::

    iter(shim)        the pass begins: epoch and seed are read from memory shared with the loader
      next(stream)    first item of a batch: the generators are seeded for this batch
                      first item of a pass: the dataset is put where its stream stands
      collate(items)  the user's collate, then Delivered(batch, where the stream stands after it)

The state rides with the batch, so what the loader records is what was consumed: a batch that is
still prefetched keeps its state with it.
"""

import functools
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import default_convert, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from air_lightning.data import parcel
from air_lightning.data.generators import seed_generators
from air_lightning.data.layers import Layer
from air_lightning.data.turns import Turns, take_part

State = dict[str, Any]

_OPENING = -1  # in place of an item's index: the draws of the dataset's own __iter__


class Standing(NamedTuple):
    """Where one worker's stream stands.

    Attributes:
        items: Items delivered in this epoch. 0: the state is that of the end of the epoch before,
            from which a dataset that counts epochs itself learns which one is next.
        state: The dataset's state.
        ended: Whether the stream is known to have nothing left in this epoch: its end was seen
            within its last batch. A last batch that is full does not show that it is the last:
            a dataset without epochs must then itself know its end from its state.
    """

    items: int
    state: State
    ended: bool = False


class Delivered:
    """A batch on its way to the training process, with where its stream stands after it."""

    __slots__ = ("batch", "standing", "worker")

    def __init__(self, batch: Any, worker: int, standing: Standing) -> None:
        self.batch = batch
        self.worker = worker
        self.standing = standing

    def packed(self) -> "Packed":
        """The same for the way to another process, where it is a ``Delivered`` again.

        Raises:
            InvalidTypeError: The batch cannot be sent.
        """
        return Packed(parcel.dumps(self.batch), self.worker, self.standing)

    def pin_memory(self) -> "Delivered":
        """The same with its batch in page-locked memory; torch's pinning thread calls it."""
        return Delivered(pin_memory(self.batch), self.worker, self.standing)


class Packed(NamedTuple):
    """A batch that was packed (parcel.py) by the thread that made it.

    Not by the queue's thread: there, what cannot be pickled is lost and waited for without end, and
    a worker that ends removes a directory of sockets while that thread makes the first one in it.
    """

    parcel: bytes
    worker: int
    standing: Standing

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, tuple(self)


def _arrived(packed: bytes, worker: int, standing: Standing) -> Delivered:
    return Delivered(parcel.loads(packed), worker, standing)


class Signal:
    """Epoch and seed of the pass, in memory that forked workers share with the loader.

    Workers that live on between epochs have no other way to learn what the next pass is.
    """

    _LAYOUT = struct.Struct("<qQ")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LAYOUT.size)

    def write(self, epoch: int, seed: int) -> None:
        """Announce the next pass; workers read it when they begin it."""
        self._LAYOUT.pack_into(self._memory, 0, epoch, seed)

    def read(self) -> tuple[int, int]:
        """The (epoch, seed) written last."""
        epoch, seed = self._LAYOUT.unpack_from(self._memory, 0)
        return epoch, seed


class WorkerSide:
    """Stands in for dataset, collate function and worker_init_fn of one pool of workers.

    Each forked worker has its own copy, with the copy's own dataset.

    Args:
        dataset: The user's dataset, with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, dataset: Any) -> None:
        self._signal = Signal()
        self._dataset = dataset
        self._collate_fn: Callable[[Any], Any] = default_convert
        self._worker_init_fn: Callable[[int], None] | None = None
        self._standings: dict[int, Standing] = {}
        self._before: tuple[Layer, ...] = ()
        self._beginning: State | None = None
        self._stream: _Stream | None = None
        self._turns: Turns | None = None
        self._first_worker = 0

    def equip(
        self,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], None] | None,
        standings: Mapping[int, Standing],
        before: tuple[Layer, ...] = (),
        *,
        turns: Turns | None = None,
        first_worker: int = 0,
    ) -> None:
        """Say what workers forked from now on shall do; live workers do not learn of it.

        Args:
            collate_fn: The user's collate (or torch's convert) function.
            worker_init_fn: The user's, called first in each worker, or None.
            standings: Where the streams stand at the next pass, by worker; a stream that is not
                named begins at its start.
            before: What other grids delivered of the next pass's epoch, for the next pass alone.
            turns: Orders the downloads of the workers; None without workers.
            first_worker: Whose batch is the first one of the next pass.
        """
        self._turns, self._first_worker = turns, first_worker
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._standings = dict(standings)
        self._before = before

    def announce(self, epoch: int, seed: int) -> None:
        """Tell live workers, and those forked from now on, what the next pass is."""
        self._signal.write(epoch, seed)

    def init(self, worker: int) -> None:
        """Hide the shim, then call the user's function: torch's worker_init_fn."""
        info = get_worker_info()
        if info is not None:
            # Otherwise init functions that reach for get_worker_info().dataset would silently
            # change the shim instead of the dataset. WorkerInfo refuses plain assignment.
            object.__setattr__(info, "dataset", self._dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        epoch, seed = self._signal.read()
        standing = self._standings.pop(worker, None)
        before, self._before = self._before, ()
        opener = functools.partial(self._open, before)
        self._stream = _Stream(opener, worker, epoch, seed, standing)
        if self._turns is not None:
            take_part(self._turns.turn(worker, self._first_worker))
            self._first_worker = 0  # of every later pass
            self._stream.start()
        return self._stream

    def collate(self, items: Any) -> "Delivered | Packed":
        """Collate a batch and note where its stream stands after it; in a worker, pack it."""
        assert self._stream is not None, "torch calls iter() before it collates"
        batch = self._collate_fn(items)
        worker, delivered, ended = self._stream.close_batch()
        standing = Standing(delivered, self._dataset.state_dict(), ended)
        done = Delivered(batch, worker, standing)
        return done if get_worker_info() is None else done.packed()

    def _open(
        self, before: tuple[Layer, ...], epoch: int, standing: Standing | None
    ) -> Iterator[Any]:
        dataset = self._dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if before:
            dataset.redistribute(before)
        if standing is not None:
            # Before the standing is loaded: whoever resumes has a beginning to go back to, too.
            self._note_beginning()
            return self._resume(standing)
        if self._beginning is not None:
            dataset.load_state_dict(self._beginning)
        else:
            self._note_beginning()
        return iter(dataset)

    def _resume(self, standing: Standing) -> Iterator[Any]:
        """What is left of the epoch; leaves a dataset that has nothing left at its next epoch."""
        dataset, nothing = self._dataset, iter(())
        if standing.ended and self._beginning is not None:
            return nothing
        dataset.load_state_dict(standing.state)
        before, now = standing.state.get("epoch"), dataset.state_dict().get("epoch")
        over = type(before) is type(now) is int and now > before
        if standing.ended and not hasattr(dataset, "set_epoch"):
            over = True  # the state of a dataset at its very end leads on to its next epoch
        elif not over and (standing.ended or standing.items == 0):
            # Bring it there: the state may be short of the end (drop_last).
            for _ in dataset:
                pass
            over = True
        return nothing if over and standing.items > 0 else iter(dataset)

    def _note_beginning(self) -> None:
        """Keep the state of a dataset that cannot tell one epoch from the next.

        A pass leaves such a dataset at its end, and its next pass would be cut short or empty.
        One that knows of epochs (a ``set_epoch``, or an ``"epoch"`` in its state) moves itself.
        """
        if self._beginning is None and not hasattr(self._dataset, "set_epoch"):
            state = self._dataset.state_dict()
            self._beginning = None if "epoch" in state else dict(state)


class _Stream:
    """The items of one pass in one worker, with the generators seeded batch by batch."""

    def __init__(
        self,
        opener: Callable[[int, Standing | None], Iterator[Any]],
        worker: int,
        epoch: int,
        seed: int,
        standing: Standing | None,
    ) -> None:
        self._opener: Callable[[int, Standing | None], Iterator[Any]] | None = opener
        self._worker = worker
        self._epoch = epoch
        self._seed = seed
        self._standing = standing
        self._items = 0 if standing is None else standing.items
        self._iterator: Iterator[Any] | None = None
        self._batch_begins = True
        self._ended = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Open the dataset, and so begin its read-ahead, before the first item is asked for.

        What it raises is raised with the first item: an exception in iter() would kill a live
        worker without its message.
        """
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - whatever a user's dataset raises
            self._failure = error

    def _open(self) -> None:
        # Otherwise a cycle keeps an abandoned pass, its read-ahead included, until collected.
        opener, self._opener = self._opener, None
        if opener is not None:
            self._reseed(_OPENING)
            self._iterator = opener(self._epoch, self._standing)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        self._open()
        assert self._iterator is not None, "opened above"
        if self._batch_begins:
            self._reseed(self._items)
            self._batch_begins = False
        try:
            item = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._items += 1
        return item

    def close_batch(self) -> tuple[int, int, bool]:
        """End a batch; returns this worker, its items so far, and whether its end was seen."""
        self._batch_begins = True
        return self._worker, self._items, self._ended

    def _reseed(self, index: int) -> None:
        seed_generators(digest(self._seed, self._epoch, self._worker, index))


def digest(*parts: object) -> int:
    """An unsigned 64-bit number that depends on all parts, the same in every process."""
    text = "|".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def stream_seed(dataset: Any, rank: int, grids_before: int = 0) -> int:
    """The seed of a rank's streams: of the dataset's seed, Lightning's if it is set, and rank.

    Args:
        dataset: The dataset.
        rank: The rank.
        grids_before: How many other grids delivered files of the epoch before: their streams have
            made the draws of the first files of each.
    """
    seeds = (getattr(dataset, "seed", None), os.environ.get("PL_GLOBAL_SEED"))
    return digest(*seeds, rank, grids_before) if grids_before else digest(*seeds, rank)
