"""``UCVolumeDataset``: a stream of a volume's files, as local paths, that can be resumed.

One pass::

    grid       which stream is this process, now                           stream.py
    slice      the numbers of its files in this epoch's order              stream.py
    skip       the prefix that was delivered, untouched                    position.py
    read ahead the next files, in threads of this process                  ahead.py, cache.py
    deliver    count, yield, and hold the file until the next is asked for items.py

The count is of files delivered in the epoch, not since the last resume: a second resume is as exact
as the first.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from air_lightning.data.ahead import ReadAhead
from air_lightning.data.cache import open_cache
from air_lightning.data.checks import check_cache_dir, check_options, check_storage_options
from air_lightning.data.counters import RETRIES, count
from air_lightning.data.items import Items
from air_lightning.data.layers import Layer
from air_lightning.data.leases import Lease
from air_lightning.data.listing import compile_pattern
from air_lightning.data.manifest import read_manifest
from air_lightning.data.position import Order, Position, StreamPass, from_state, to_state
from air_lightning.data.sharing import list_for_node
from air_lightning.data.stream import (
    Grid,
    Uneven,
    current_grid,
    rank_length,
    slice_indices,
    slice_length,
)
from air_lightning.data.turns import current_turn
from air_lightning.errors import EmptyVolumeError, InvalidArgumentError
from air_lightning.volumes import path as volume_path
from air_lightning.volumes.storage import Retry, open_storage

if TYPE_CHECKING:
    from air_lightning.data.mapped import MappedDataset

_T = TypeVar("_T")

_DEPTHS = (16, 64)  # files read ahead by default: at least, and at most


class UCVolumeDataset(IterableDataset[str]):
    """Streams the files below a volume path as local paths, each ``(rank, worker)`` its own.

    A yielded path is valid until the next item is asked for: open it at once, do not keep it.

    Args:
        path: ``/Volumes/<catalog>/<schema>/<volume>[/...]`` or an fsspec URL; no local path
            (``file://`` says it). All files below it are listed here and now, but for dot-files;
            ranks of a node that construct it at the same time share one listing.
        cache_dir: A directory on local disk that ranks, epochs and restarts share, each file
            downloaded once per node; not one below ``path``. By default a private one, removed with
            the dataset.
        shuffle: Whether each epoch has an order of its own, a function of seed, epoch and list.
        seed: Seed of the shuffle.
        pattern: Glob on the relative path, as ``"*.png"`` (at any depth) or ``"train/**/*.png"``.
        manifest: A file that ``write_manifest`` or ``air-lightning manifest`` wrote: its list is
            taken, and nothing is listed.
        uneven: ``"pad"`` repeats files so that every stream has equally many, ``"drop"`` leaves
            files out, ``"keep"`` does neither: then ranks may differ by a file per worker.
        on_error: ``"skip"`` puts a good file of the same stream in place of a bad one, logs it and
            counts it in ``skipped``; the number of items does not change. ``"raise"`` raises.
        read_ahead: How many files each worker downloads ahead, 1024 at most; 0 for none. Default:
            16, or a batch's worth where that is more, 64 at most.
        min_free_bytes: Free disk to keep by evicting downloaded files; by default
            ``SGC_FSLAYER_MIN_FREE_DISK_BYTES``, else a tenth of the cache's file system.
        storage_options: For fsspec URLs, passed to the file system, as ``{"anon": True}``; by
            default the client finds credentials itself, as in the environment.

    Attributes:
        path: The normalized path.
        seed: As given.
        skipped: Bad files replaced so far by this process's stream; those of a loader's workers are
            in ``DataLoader.statistics()``.

    Raises:
        InvalidArgumentError: An argument cannot work; InvalidPathError for the path.
        VolumeNotMountedError: There are no volumes on this machine.
        EmptyVolumeError: There is no file, or none that matches the pattern.
        ManifestError: The manifest is missing, altered, or of another version.
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
        manifest: str | os.PathLike[str] | None = None,
        uneven: Uneven = "keep",
        on_error: str = "raise",
        read_ahead: int | None = None,
        min_free_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.path = volume_path.normalize(path)
        check_options(shuffle, seed, uneven, on_error, read_ahead)
        check_storage_options(storage_options)
        check_cache_dir(cache_dir, self.path)
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
            if manifest is None:
                self._files = list_for_node(storage, pattern, storage_options)
            else:
                self._files = read_manifest(
                    manifest, self.path, pattern=pattern, storage_options=storage_options
                )
        except BaseException:
            discard()
            raise
        self._cache.note(self._files)
        self._file_list_state = {"count": len(self._files), "fingerprint": self._files.fingerprint}
        self._epoch = 0
        self._asked_epoch: int | None = None
        self._loaded: Position | None = None
        self._pass: StreamPass | None = None

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

    def slice_length(self, grid: Grid, before: tuple[Layer, ...] = ()) -> int:
        """Files that the stream at this place of the grid delivers in one epoch.

        Args:
            grid: The place.
            before: What other grids delivered of the epoch, before this one.
        """
        return slice_length(len(self._files), grid, self._order.uneven, before)

    def file_list_state(self) -> dict[str, Any]:
        """What identifies the file list: its length, and a hash of its names."""
        return dict(self._file_list_state)

    def order_state(self) -> dict[str, Any]:
        """What decides which file is the i-th of an epoch, but for the list itself."""
        return self._order._asdict()

    def redistribute(self, before: tuple[Layer, ...]) -> None:
        """Let the next pass, if it is one of the present epoch, deal what other grids left of it.

        Args:
            before: What they delivered, in the order in which they followed each other.
        """
        self._loaded = Position(self._epoch, 0, before=before)

    def identity(self) -> dict[str, Any]:
        """What all ranks must agree on: path, pattern, order and file list."""
        files = {"files": len(self._files), "fingerprint": self._files.fingerprint}
        return {"path": self.path, "pattern": self._pattern, **self._order._asdict(), **files}

    def state_dict(self) -> dict[str, Any]:
        """Where the calling process's stream stands, as a dict of plain JSON types."""
        if self._loaded is not None:
            position = self._loaded
        elif self._pass is not None and self._asked_epoch in (None, self._pass.epoch):
            current = self._pass
            good = current.good if self._on_error == "skip" else None
            position = Position(current.epoch, current.delivered, before=current.before, good=good)
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
        here = self._loaded or Position(self._epoch, 0)
        loaded = from_state(state_dict, here, current_grid(), self._order, self._file_list_state)
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
        indices = current.indices[current.delivered :]
        ahead = ReadAhead(self._cache, self._files, indices, depth=self._depth())
        # Before the first item is asked for: workers are asked only when all have been forked.
        ahead.start()
        skip = self._skip if self._on_error == "skip" else None
        items = Items(current, ahead, transform, name=self._name, skip=skip)
        return self._deliver(current, ahead, items)

    def _deliver(self, current: StreamPass, ahead: ReadAhead, items: Items[_T]) -> Iterator[_T]:
        lease: Lease | None = None
        try:
            while current.delivered < len(current.indices):
                lease, item = items.take()
                current.delivered += 1
                self._use_up(current)
                yield item
                lease.close()
        finally:
            current.ended = True
            if lease is not None:
                lease.close()
            ahead.close()
        self._use_up(current)
        if self._pass is current and self._loaded is None:
            self._epoch = current.epoch + 1
            self._asked_epoch = None

    def _depth(self) -> int:
        """How many files to read ahead in this process."""
        if self._read_ahead is not None:
            return self._read_ahead
        turn = current_turn()
        return _DEPTHS[0] if turn is None else min(max(turn.batch_size, _DEPTHS[0]), _DEPTHS[1])

    def _begin(self) -> StreamPass:
        grid = current_grid()
        start = self._loaded or Position(self._epoch, 0)
        epoch, before = start.epoch, start.before
        indices = slice_indices(
            len(self._files), grid, epoch=epoch, before=before, **self._order._asdict()
        )
        # What earlier grids left of an epoch may well be less than a file for each stream.
        if self._order.uneven == "drop" and not len(indices) and not before:
            raise EmptyVolumeError(
                f'{self.path} has {len(self._files)} files for {grid.slots} streams: uneven="drop" '
                f"leaves none. Use fewer ranks or workers ({grid.world_size} x {grid.num_workers} "
                'here), or uneven="pad".'
            )
        delivered = len(indices) if start.finished else start.delivered
        self._pass = StreamPass(epoch, delivered, indices, before, start.good)
        self._pass.loaded = self._loaded
        return self._pass

    def _use_up(self, current: StreamPass) -> None:
        """A loaded position is the next pass's until a pass that began there delivered a file."""
        if self._loaded is current.loaded:
            self._loaded = None

    def _skip(self) -> int:
        self.skipped += 1
        return self.skipped

    def _name(self, index: int) -> str:
        return volume_path.join(self.path, self._files.name(index))
