"""``UCVolumeDataset``: a stream of a volume's files, as local paths, that can be resumed.

One pass::

    grid       which stream is this process, now                        stream.py
    slice      the numbers of its files in this epoch's order           stream.py
    skip       the prefix that was delivered, untouched                 position.py
    read ahead the next files, in threads of this process               ahead.py, cache.py
    deliver    count, yield, and hold the file until the next is asked for

The count is of files delivered in the epoch, not since the last resume: a second resume is as exact
as the first.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from torch.utils.data import IterableDataset

from air_lightning.data.ahead import MAX_DEPTH, ReadAhead
from air_lightning.data.cache import Lease, open_cache
from air_lightning.data.counters import FILES_SKIPPED, RETRIES, count
from air_lightning.data.listing import compile_pattern, take_listing
from air_lightning.data.position import Order, Position, from_state, to_state
from air_lightning.data.stream import (
    Grid,
    Indices,
    Uneven,
    current_grid,
    rank_length,
    slice_indices,
    slice_length,
)
from air_lightning.data.substitutes import substitutes
from air_lightning.errors import EmptyVolumeError, InvalidArgumentError, StorageError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.storage import Retry, open_storage

if TYPE_CHECKING:
    from air_lightning.data.mapped import MappedDataset

_logger = logging.getLogger("air_lightning")
_T = TypeVar("_T")


class UCVolumeDataset(IterableDataset[str]):
    """Streams the files below a volume path as local paths, each ``(rank, worker)`` its own.

    A yielded path is valid until the next item is asked for: open it at once, do not keep it.

    Args:
        path: ``/Volumes/<catalog>/<schema>/<volume>[/...]`` or an fsspec URL; no local path
            (``file://`` says it). All files below it are listed here and now, but for dot-files.
        cache_dir: A directory on local disk that ranks, epochs and restarts share, each file
            downloaded once per node. By default a private one, removed with the dataset.
        shuffle: Whether each epoch has an order of its own, a function of seed, epoch and list.
        seed: Seed of the shuffle.
        pattern: Glob on the relative path, as ``"*.png"`` (at any depth) or ``"train/**/*.png"``.
        uneven: ``"pad"`` repeats files so that every stream has equally many, ``"drop"`` leaves
            files out, ``"keep"`` does neither: then ranks may differ by a file per worker.
        on_error: ``"skip"`` puts a good file of the same stream in place of a bad one, logs it and
            counts it in ``skipped``; the number of items does not change. ``"raise"`` raises.
        read_ahead: How many files each worker downloads ahead, 1024 at most.
        min_free_bytes: Free disk to keep by evicting downloaded files; by default
            ``SGC_FSLAYER_MIN_FREE_DISK_BYTES``, else a tenth of the cache's file system.
        storage_options: For fsspec URLs, passed to the file system.

    Attributes:
        path: The normalized path.
        seed: As given.
        skipped: Bad files replaced so far by this process's stream; those of a loader's workers are
            in ``DataLoader.statistics()``.

    Raises:
        InvalidArgumentError: An argument cannot work; InvalidPathError for the path.
        VolumeNotMountedError: There are no volumes on this machine.
        EmptyVolumeError: There is no file, or none that matches the pattern.
        StorageError: The path is a file or cannot be listed, or there is no place for a cache.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        pattern: str | None = None,
        uneven: Uneven = "keep",
        on_error: str = "raise",
        read_ahead: int = 16,
        min_free_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.path = volume_path.normalize(path)
        _check_options(shuffle, seed, uneven, on_error, read_ahead)
        _check_storage_options(storage_options)
        if pattern is not None:
            compile_pattern(pattern)
        self.seed = seed
        self.skipped = 0
        self._pattern = pattern
        self._order = Order(shuffle, seed, uneven)
        self._on_error = on_error
        self._read_ahead = read_ahead
        retry = Retry(on_retry=functools.partial(count, RETRIES))
        storage = open_storage(self.path, storage_options=storage_options, retry=retry)
        self._cache, discard = open_cache(storage, cache_dir, min_free_bytes)
        try:
            self._files = take_listing(storage, pattern)
        except BaseException:
            discard()
            raise
        self._file_list_state = {"count": len(self._files), "fingerprint": self._files.fingerprint}
        self._epoch = 0
        self._asked_epoch: int | None = None
        self._loaded: Position | None = None
        self._pass: _Pass | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the pass in progress, or else of the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass one of this epoch; a loaded position of another one is dropped.

        Raises:
            InvalidArgumentError: It is not a number, 0 or more.
        """
        if type(epoch) is not int or epoch < 0:
            raise InvalidArgumentError(f"epoch={epoch!r} was given; wanted is a number, 0 or more.")
        self._asked_epoch = self._epoch = epoch
        if self._pass is not None and self._pass.ended:
            self._pass = None
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None

    def __len__(self) -> int:
        """Files that this rank delivers in one epoch, over all its workers."""
        return rank_length(len(self._files), current_grid(), self._order.uneven)

    def slice_length(self, grid: Grid) -> int:
        """Files that the stream at this place of the grid delivers in one epoch."""
        return slice_length(len(self._files), grid, self._order.uneven)

    def file_list_state(self) -> dict[str, Any]:
        """What identifies the file list: its length, and a hash of names and sizes."""
        return dict(self._file_list_state)

    def identity(self) -> dict[str, Any]:
        """What all ranks must agree on: path, pattern, order and file list."""
        files = {"files": len(self._files), "fingerprint": self._files.fingerprint}
        return {"path": self.path, "pattern": self._pattern, **self._order._asdict(), **files}

    def state_dict(self) -> dict[str, Any]:
        """Where the calling process's stream stands, as a dict of plain JSON types."""
        if self._loaded is not None:
            position = self._loaded
        elif self._pass is not None and self._asked_epoch in (None, self._pass.epoch):
            position = Position(self._pass.epoch, self._pass.delivered)
        else:
            position = Position(self._epoch, 0)
        return to_state(position, current_grid(), self._order, self._file_list_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass where a state dict says; the files before it are not touched.

        The end of an epoch is the start of the next one, unless ``set_epoch`` asked for the epoch
        that ended: then its pass is empty.

        Raises:
            StateError: The state does not fit; the message says why and what to do.
        """
        loaded = from_state(
            state_dict, self._epoch, current_grid(), self._order, self._file_list_state
        )
        if loaded.finished and self._asked_epoch != loaded.epoch:
            loaded = Position(loaded.epoch + 1, 0)
        self._loaded = loaded
        self._epoch = loaded.epoch

    def map(self, fn: Callable[[str], _T]) -> "MappedDataset[_T]":
        """A dataset of ``fn(local_path)`` with the same state and options."""
        from air_lightning.data.mapped import MappedDataset

        return MappedDataset(self, fn)

    def __iter__(self) -> Iterator[str]:
        return self.deliver(str)

    def deliver(self, transform: Callable[[str], _T]) -> Iterator[_T]:
        """One pass over this process's stream, each path transformed while it is valid.

        Args:
            transform: Gets the local path; where it fails, the file counts as bad.
        """
        current = self._begin()
        ahead = ReadAhead(
            self._cache,
            self._files,
            map(int, current.indices[current.delivered :]),
            depth=self._read_ahead,
        )
        lease: Lease | None = None
        try:
            while current.delivered < len(current.indices):
                lease, item = self._next_item(ahead, current, transform)
                current.delivered += 1
                yield item
                lease.close()
        finally:
            current.ended = True
            if lease is not None:
                lease.close()
            ahead.close()
        if self._pass is current and self._loaded is None:
            self._epoch = current.epoch + 1
            self._asked_epoch = None

    def _begin(self) -> "_Pass":
        grid = current_grid()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            epoch, delivered = loaded.epoch, loaded.delivered
        else:
            epoch, delivered = self._epoch, 0
        indices = slice_indices(len(self._files), grid, epoch=epoch, **self._order._asdict())
        if self._order.uneven == "drop" and not len(indices):
            raise EmptyVolumeError(
                f'{self.path} has {len(self._files)} files for {grid.slots} streams: uneven="drop" '
                f"leaves none. Use fewer ranks or workers ({grid.world_size} x {grid.num_workers} "
                'here), or uneven="pad".'
            )
        if loaded is not None and loaded.finished:
            delivered = len(indices)
        self._pass = _Pass(epoch, delivered, indices)
        return self._pass

    def _next_item(
        self, ahead: ReadAhead, current: "_Pass", transform: Callable[[str], _T]
    ) -> tuple[Lease, _T]:
        place = current.delivered
        try:
            lease = ahead.take()
        except StorageError as error:
            if self._on_error == "raise":
                raise
            return self._substitute(current, transform, self._name(current, place), error)
        try:
            found = lease, _transformed(lease, transform)
        except Exception as error:
            name = self._name(current, place)
            if self._on_error == "raise":
                _add_note(error, f"The file is {name}.")
                raise
            return self._substitute(current, transform, name, error)
        current.good = place
        return found

    def _substitute(
        self, current: "_Pass", transform: Callable[[str], _T], bad: str, error: Exception
    ) -> tuple[Lease, _T]:
        """A good file of the same stream: one after it, or the last good one, or another."""
        tried = 0
        for other in substitutes(current.delivered, len(current.indices), current.good):
            tried += 1
            try:
                lease = self._cache.fetch(self._files[int(current.indices[other])])
                found = lease, _transformed(lease, transform)
            except Exception as also:  # noqa: BLE001 - whatever a user's decoder raises
                _logger.debug("Nor can %s be used: %s", self._name(current, other), also)
            else:
                current.good = other
                self.skipped += 1
                count(FILES_SKIPPED)
                _logger.warning(
                    "Skipped the bad file %s (%s: %s) and took %s in its place; %d skipped so far",
                    *(bad, type(error).__name__, error, self._name(current, other), self.skipped),
                )
                return found
        raise StorageError(
            f"{bad} cannot be used ({type(error).__name__}: {error}), nor can any of the "
            f"{tried} other files of its stream that were tried in its place. Check the "
            "volume, and the function given to map()."
        ) from error

    def _name(self, current: "_Pass", place: int) -> str:
        return volume_path.join(self.path, self._files[int(current.indices[place])].name)


class _Pass:
    """One pass of one stream; ``delivered`` counts from the epoch's start.

    Attributes:
        good: The place of the file that was delivered last, None before the first one.
    """

    def __init__(self, epoch: int, delivered: int, indices: Indices) -> None:
        self.epoch = epoch
        self.delivered = delivered
        self.indices = indices
        self.ended = False
        self.good: int | None = None


def _transformed(lease: Lease, transform: Callable[[str], _T]) -> _T:
    try:
        return transform(lease.path)
    except BaseException:
        lease.close()
        raise


def _add_note(error: Exception, note: str) -> None:
    """Say which file it was: a decoder's own message seldom does."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    _logger.error("%s: %s. %s", type(error).__name__, error, note)


def _check_options(
    shuffle: object,
    seed: object,
    uneven: object,
    on_error: object,
    read_ahead: object,
) -> None:
    choices = {"shuffle": (False, True), "uneven": get_args(Uneven), "on_error": ("raise", "skip")}
    given = {"shuffle": shuffle, "uneven": uneven, "on_error": on_error}
    for option, wanted in choices.items():
        if given[option] not in wanted:
            names = ", ".join(map(repr, wanted))
            raise InvalidArgumentError(f"{option}={given[option]!r} was given; wanted: {names}.")
    if type(seed) is not int:
        raise InvalidArgumentError(f"seed={seed!r} was given; wanted is an int.")
    if type(read_ahead) is not int or not 0 <= read_ahead <= MAX_DEPTH:
        raise InvalidArgumentError(
            f"read_ahead={read_ahead!r} was given; wanted is a number of files, from 0 for none to "
            f"{MAX_DEPTH}."
        )


def _check_storage_options(storage_options: object) -> None:
    if storage_options is not None and not (
        isinstance(storage_options, Mapping)
        and all(isinstance(key, str) for key in storage_options)
    ):
        # Not its value: it may hold a secret.
        raise InvalidArgumentError(
            f"storage_options of type {type(storage_options).__name__} was given; wanted is a dict "
            'of options of the file system by name, as {"anon": True}.'
        )
