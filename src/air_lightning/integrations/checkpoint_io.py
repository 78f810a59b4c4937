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
the whole checkpoint by itself. In a Fabric loop ``attach`` binds it (``fabric.py``).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from typing_extensions import override

from air_lightning.checkpoint.catalog import remove_checkpoint
from air_lightning.checkpoint.dcp import UCVolumeReader
from air_lightning.checkpoint.order import both
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.state import read_checkpoint, to_entries, to_keyed_entries
from air_lightning.errors import CheckpointMismatchError, InvalidArgumentError
from air_lightning.integrations import files
from air_lightning.integrations.located import Located, PathLike, locate
from air_lightning.integrations.saving import Saves
from air_lightning.volumes import path as volume_path

if TYPE_CHECKING:
    from air_lightning.integrations.fabric import FabricBinding


class AirCheckpointIO(Saves, CheckpointIO):
    """Saves checkpoints of a Trainer or Fabric asynchronously, by every rank, as DCP directories.

    ``Trainer(plugins=[AirCheckpointIO()])`` is enough: a callback that Lightning finds through an
    entry point binds the Trainer's strategy to this plugin (single device, DDP, model parallel,
    FSDP). With Fabric: ``AirCheckpointIO().attach(fabric)``.

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
        super().__init__(
            storage_options=storage_options, timeout_s=timeout_s, staging_dir=staging_dir
        )
        self.verify = verify
        self._then: Callable[[], None] | None = None
        self._fabric: FabricBinding | None = None
        self._loaders: dict[str, Any] = {}

    def attach(self, fabric: Fabric) -> "AirCheckpointIO":
        """Let ``fabric.save`` and ``fabric.load`` be this plugin's, on every rank.

        Before or after ``fabric.launch()``, under single device, DDP, ModelParallelStrategy and
        FSDP; best before ``fabric.setup``. Attaching again changes nothing.

        Args:
            fabric: The Fabric of this process.

        Returns:
            This plugin, for ``wait``, ``resume`` and ``register``.

        Raises:
            InvalidTypeError: It is no Fabric; a Trainer takes the plugin in ``plugins=[...]``.
            InvalidArgumentError: Its strategy keeps its state where this release cannot save it,
                or another plugin is attached to it.
        """
        from air_lightning.integrations.fabric import attach

        self._fabric = attach(self, fabric)
        return self

    def register(self, **loaders: Any) -> None:
        """Save and restore these loaders in a Fabric loop without their being in its state.

        Args:
            **loaders: By the name under which each is saved; wrapped by Fabric or not. Objects
                with a state of each rank's own are as welcome: each rank gets its own back.

        Raises:
            InvalidArgumentError: One has no ``state_dict`` and ``load_state_dict``.
        """
        from air_lightning.integrations.fabric_position import require_loader

        self._loaders.update({name: require_loader(name, x) for name, x in loaders.items()})

    @property
    def registered(self) -> dict[str, Any]:
        """The loaders that were registered, by name."""
        return dict(self._loaders)

    def resume(
        self,
        root: PathLike,
        state: dict[str, Any],
        *,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> str | None:
        """Restore everything from the newest valid checkpoint of a Fabric loop.

        One rank chooses, all agree. Restored are the state, in place as by ``fabric.load``, loaders
        in it or registered, and this rank's random generators. Call it on every rank, last before
        the loop.

        Args:
            root: The directory that holds the checkpoints: a volume path, a URL or a local path.
            state: As of ``fabric.load``.
            strict: Likewise.
            weights_only: Likewise.

        Returns:
            The checkpoint's path, or None where there is none: nothing was changed then.

        Raises:
            InvalidArgumentError: The plugin is attached to no Fabric.
            CheckpointError: Looking, or loading, failed.
        """
        if self._fabric is None:
            raise InvalidArgumentError(
                "resume(root, state) was called, and the plugin is attached to no Fabric. Call "
                "attach(fabric) first. (Under a Trainer, AirResume resumes.)"
            )
        return self._fabric.resume(root, state, strict=strict, weights_only=weights_only)

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
        entries = to_entries(
            checkpoint,
            optimizer_names=optimizer_names,
            rank=self.rank,
            rank_blob=rank_blob,
            alike=alike,
        )
        self.save_entries(
            entries,
            os.fspath(path),
            step=checkpoint.get("global_step"),
            epoch=checkpoint.get("epoch"),
            weights_only="optimizer_states" not in checkpoint,
            storage_options=storage_options,
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Save from this process alone; the host calls it when no strategy was bound.

        Under a bound strategy only a launcher that forked the ranks calls it, to hand rank 0's
        weights to the parent process: one file, which must be there at once.
        """
        if self._bound:
            files.save_file(
                checkpoint, volume_path.normalize(path, allow_local=True), storage_options
            )
            return
        if self._saver is None:
            self._saver = AsyncSaver(no_dist=True, timeout_s=self.timeout_s)
        self.wait()
        if not files.is_trainers(checkpoint):
            self._save_alone_for_fabric(checkpoint, path, storage_options)
            return
        nameless = [None] * len(checkpoint.get("optimizer_states", ()))
        self.save_entries(
            to_entries(checkpoint, optimizer_names=nameless, rank=0, rank_blob={}),
            self.choose_target(path),
            step=checkpoint.get("global_step"),
            epoch=checkpoint.get("epoch"),
            weights_only="optimizer_states" not in checkpoint,
            storage_options=storage_options,
        )

    def _save_alone_for_fabric(
        self, checkpoint: dict[str, Any], path: PathLike, options: Any | None
    ) -> None:
        """Save what Fabric's strategy collected, on the one rank that it asks."""
        from air_lightning.integrations.fabric_state import progress, tell_of_attach

        tell_of_attach()
        entries = to_keyed_entries(checkpoint, models=(), optimizers={}, rank=0, rank_blob={})
        step, epoch = progress(checkpoint)
        self.save_entries(
            entries,
            self.choose_target(path),
            step=step,
            epoch=epoch,
            weights_only=False,  # which of them are weights is not told
            storage_options=options,
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
            return files.load_file(located.target, weights_only), None
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
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return read_checkpoint(
            self.reader(target),
            rank=rank,
            weights_only=weights_only,
            process_group=None,
            no_dist=True,
            **options,
        )

    def reader(self, target: str, **options: Any) -> UCVolumeReader:
        """A reader of a checkpoint's directory, with this plugin's options."""
        return UCVolumeReader(
            target, verify=self.verify, storage_options=self.storage_options, **options
        )

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint, once the save in flight, its successor, is published.

        In a Fabric loop every rank may call it; rank 0 deletes.
        """
        if self._fabric is not None and not self._fabric.is_global_zero:
            return
        target = volume_path.normalize(path, allow_local=True)

        def remove() -> None:
            for name in both(target):
                remove_checkpoint(name, storage_options=self.storage_options)

        if self._saver is None:
            remove()
        else:
            self._saver.after_published(remove)

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
