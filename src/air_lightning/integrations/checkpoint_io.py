"""AirCheckpointIO: the plugin that saves asynchronously through DCP.

The call chain of one save under a Trainer::

    ModelCheckpoint -> trainer.save_checkpoint -> strategy.save_checkpoint    (every rank)
      -> AirCheckpointIO.save_on_all_ranks                                    (attach.py bound it)
        -> state.to_entries      flat tensors by name, one blob, one blob per rank
        -> AsyncSaver.save       waits for the save in flight, stages; the rest is in the background
          -> UCVolumeWriter      shards, then air_manifest.json, then .metadata, last

A complete checkpoint is never written over: a save to its path goes to ``<path>.alt``, and takes
the old one's place once it is published. Where a volume refuses the rename it stays under that
name, which loading and ``find_latest_valid`` know.

Where nothing bound the strategy, its rank 0 calls ``save_checkpoint``, and that process writes
the whole checkpoint by itself.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from air_lightning.checkpoint import attempt
from air_lightning.checkpoint.catalog import remove_checkpoint
from air_lightning.checkpoint.clone import can_clone, clone
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.order import both
from air_lightning.checkpoint.room import Detour
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.state import read_checkpoint, to_entries
from air_lightning.errors import CheckpointMismatchError, InvalidArgumentError
from air_lightning.integrations.located import Located, PathLike, locate
from air_lightning.volumes import path as volume_path


class AirCheckpointIO(CheckpointIO):
    """Saves a Trainer's checkpoints asynchronously, by every rank, as DCP directories.

    ``Trainer(plugins=[AirCheckpointIO()])`` is enough: a callback that Lightning finds through an
    entry point binds the Trainer's strategy to this plugin (single device, DDP, model parallel,
    FSDP).

    Args:
        storage_options: Options for fsspec when a checkpoint path is a URL.
        verify: Whether loading compares each file that is read with its recorded checksum.
            Sizes are always compared.
        timeout_s: Seconds that a background save may wait for another rank, and that waiting for
            a save may take.
        staging_dir: A local directory through which shards go to the checkpoint's; by default
            they are written there directly. See :class:`UCVolumeWriter`.

    Raises:
        InvalidArgumentError: ``timeout_s`` is not positive, or ``staging_dir`` not local.
    """

    def __init__(
        self,
        *,
        storage_options: dict[str, Any] | None = None,
        verify: bool = False,
        timeout_s: float = 1800.0,
        staging_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise InvalidArgumentError(
                f"timeout_s={timeout_s!r} was given; a positive number of seconds is wanted."
            )
        self.storage_options = storage_options
        self.verify = verify
        self.timeout_s = timeout_s
        self.staging_dir = None if staging_dir is None else Detour(staging_dir).directory
        self._saver: AsyncSaver | None = None
        self.group: dist.ProcessGroup | None = None
        self._world: object | None = None
        self._bound = False
        self._then: Callable[[], None] | None = None
        self._clones: dict[str, bool] = {}

    @property
    def stats(self) -> list[Any]:
        """One record per save of this process: stall, staging and writing in seconds, bytes."""
        return [] if self._saver is None else list(self._saver.stats)

    def connect(self) -> None:
        """Create what saves of all ranks need; every rank calls this at the same moment.

        The background runs its collectives on a gloo group of its own: on the user's group they
        would meet the training's collectives in another order on each rank, and deadlock.
        """
        self._bound = True
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._saver is not None and world is self._world:
            return
        if self._saver is not None:
            self._saver.close()
        self._world = world
        self.group = None
        if world is not None:
            timeout = timedelta(seconds=self.timeout_s)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._saver = AsyncSaver(
            process_group=self.group, no_dist=world is None, timeout_s=self.timeout_s
        )

    def save_on_all_ranks(
        self,
        checkpoint: dict[str, Any],
        path: PathLike,
        *,
        optimizer_names: Sequence[Mapping[int, str] | None],
        rank_blob: Mapping[str, Any],
        alike: Mapping[str, torch.Tensor],
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Start saving, together with every other rank; returns once the state is staged.

        Args:
            checkpoint: The Trainer's checkpoint dict.
            path: Directory that becomes the checkpoint, from ``choose_target``.
            optimizer_names: For each optimizer, the parameter name of each integer id.
            rank_blob: What only this rank knows: loader position and generators.
            alike: The parameters that are equal on all ranks, by name.
            storage_options: Options for fsspec, over those of the constructor.

        Raises:
            SaveFailedError: The save before this one failed in the background.
        """
        self.connect()
        rank = dist.get_rank() if self._world is not None else 0
        self._save(
            checkpoint,
            os.fspath(path),
            names=optimizer_names,
            rank=rank,
            rank_blob=rank_blob,
            alike=alike,
            storage_options=storage_options,
        )

    def _save(
        self,
        checkpoint: dict[str, Any],
        target: str,
        *,
        names: Sequence[Mapping[int, str] | None],
        rank: int,
        rank_blob: Mapping[str, Any],
        alike: Mapping[str, torch.Tensor],
        storage_options: dict[str, Any] | None,
    ) -> None:
        saver = self._saver
        assert saver is not None
        options = storage_options or self.storage_options
        entries = to_entries(
            checkpoint, optimizer_names=names, rank=rank, rank_blob=rank_blob, alike=alike
        )
        # Taken out here: the closure would keep the whole unstaged state alive during the upload.
        step, epoch = checkpoint.get("global_step"), checkpoint.get("epoch")
        weights_only = "optimizer_states" not in checkpoint

        def make_writer() -> UCVolumeWriter:
            return UCVolumeWriter(
                target,
                global_step=step,
                epoch=epoch,
                weights_only=weights_only,
                storage_options=options,
                staging_dir=self.staging_dir,
            )

        def replace_other() -> None:
            attempt.settle(target, options)

        follow_up = replace_other if rank == 0 else None
        saver.save(entries, make_writer, on_published=follow_up, unshared=entries.unshared)

    def choose_target(self, path: PathLike) -> str:
        """Where the next save to a path goes; asked on one rank, after ``wait`` on all.

        Raises:
            InvalidPathError: ``path`` is none.
            SaveFailedError: Its directory cannot be made.
        """
        target = volume_path.normalize(path, allow_local=True)
        chosen = attempt.choose(target, self.storage_options)
        attempt.require_place(chosen, self.storage_options)
        return chosen

    def prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate in the background what saving tensors like these will need."""
        if self._saver is not None:
            self._saver.prepare(tensors)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Save from this process alone; the host calls it when no strategy was bound.

        Under a bound strategy only a launcher that forked the ranks calls it, to hand rank 0's
        weights to the parent process: one file, which must be there at once.
        """
        if self._bound:
            target = volume_path.normalize(path, allow_local=True)
            TorchCheckpointIO().save_checkpoint(
                checkpoint, volume_path.local_dir(target) or target, storage_options
            )
            return
        if self._saver is None:
            self._saver = AsyncSaver(no_dist=True, timeout_s=self.timeout_s)
        self.wait()
        nameless = [None] * len(checkpoint.get("optimizer_states", ()))
        self._save(
            checkpoint,
            self.choose_target(path),
            names=nameless,
            rank=0,
            rank_blob={},
            alike={},
            storage_options=storage_options,
        )

    @override
    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint directory, or a single file that Lightning itself wrote.

        Raises:
            CheckpointError: The directory is no complete checkpoint.
            CheckpointMismatchError: One of Lightning's sharded strategies saved it.
            CorruptCheckpointError: A file is missing, short or altered.
            UnsafeCheckpointError: Reading it would run code (see ``weights_only``).
        """
        self.wait()
        located = locate(path, self.storage_options, resumable=False)
        return self.load(located, weights_only)[0]

    def load(
        self, located: Located, weights_only: bool | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Load the Trainer's checkpoint dict and what this rank alone saved, by this process alone.

        Returns:
            The checkpoint, tensors on the CPU, and this rank's blob; None for the latter where the
            checkpoint has none of this rank.
        """
        if located.is_file:
            return self._load_file(located.target, weights_only), None
        if located.is_lightnings:
            raise CheckpointMismatchError(
                f"{located.target} was saved by Lightning itself under ModelParallelStrategy or "
                "FSDPStrategy; this strategy does not read that. Resume once under the strategy "
                "that saved it, with AirCheckpointIO: what that saves resumes under any. "
                "`air-lightning export` gives its weights."
            )
        return self.read(located.target, weights_only)

    def read(
        self, target: str, weights_only: bool | None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read a checkpoint directory of this package, by this process alone.

        Args:
            target: The directory, from ``locate``.
            weights_only: As of ``torch.load``, for the blobs; None means True.
            **options: Of ``read_checkpoint``.
        """
        reader = UCVolumeReader(target, verify=self.verify, storage_options=self.storage_options)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return read_checkpoint(
            reader,
            rank=rank,
            weights_only=weights_only,
            process_group=None,
            no_dist=True,
            **options,
        )

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint, once the save in flight, its successor, is published."""
        target = volume_path.normalize(path, allow_local=True)

        def remove() -> None:
            for name in both(target):
                remove_checkpoint(name, storage_options=self.storage_options)

        if self._saver is None:
            remove()
        else:
            self._saver.after_published(remove)

    def after_published(self, action: Callable[[], None]) -> None:
        """Run something once the save in flight is published, or now; not if that fails."""
        if self._saver is None:
            action()
        else:
            self._saver.after_published(action)

    def clone(self, path: PathLike, name: PathLike) -> bool:
        """Let the checkpoint that was saved last have a second name, without saving it again.

        Asked on one rank. Made when the checkpoint is published.

        Args:
            path: Its own name.
            name: The second one, beside it.

        Returns:
            Whether that is possible here; elsewhere it must be saved under the second name, too.
        """
        source = volume_path.normalize(path, allow_local=True)
        target = volume_path.normalize(name, allow_local=True)
        parent = volume_path.parent(target)
        if volume_path.parent(source) != parent or target.startswith("/Volumes/"):
            return False  # a volume has no links, and is not asked for them
        if parent not in self._clones:
            self._clones[parent] = can_clone(target)
        if not self._clones[parent]:
            return False

        def make() -> None:
            written = attempt.choose(target, None)
            clone(attempt.newest(source, None), written)
            attempt.settle(written, None)

        self.after_published(make)
        return True

    def link(self, path: PathLike, link: PathLike) -> None:
        """Let a second name lead to a checkpoint once that is published, where links work.

        Elsewhere, as on volumes, nothing is made: ``AirResume`` finds the newest by itself.
        """
        target = volume_path.normalize(path, allow_local=True)
        name = volume_path.normalize(link, allow_local=True)
        local, there = volume_path.local_dir(target), volume_path.local_dir(name)
        if self._saver is None or local is None or there is None or name.startswith("/Volumes/"):
            return

        def make_link() -> None:
            remove_checkpoint(name)
            os.symlink(os.path.relpath(local, os.path.dirname(there)), there)

        self._saver.after_published(make_link)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the save in flight is published.

        Raises:
            SaveFailedError: It failed; raised once.
        """
        if self._saver is not None:
            self._saver.wait(timeout_s)

    @override
    def teardown(self) -> None:
        """Wait for the save in flight, bounded; its error stays for ``wait`` and masks no other."""
        if self._saver is not None:
            self._saver.settle()
        if self._then is not None:
            self._then()

    def at_teardown(self, action: Callable[[], None]) -> None:
        """Run something, instead of what was given before, once the last save has settled."""
        self._then = action

    def _load_file(self, target: str, weights_only: bool | None) -> dict[str, Any]:
        local = volume_path.local_dir(target)
        loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
            local or target, weights_only=weights_only
        )
        return loaded
