"""One save in flight for all ranks, and what waits for it: the engine of AirCheckpointIO.

It knows entries and directories, and nothing of who asks: a Trainer's strategy, Fabric's, or a host
that nothing was bound to.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from air_lightning.checkpoint import attempt
from air_lightning.checkpoint.ahead import large_tensors
from air_lightning.checkpoint.dcp import UCVolumeWriter
from air_lightning.checkpoint.room import Detour
from air_lightning.checkpoint.saver import AsyncSaver
from air_lightning.checkpoint.state import Entries
from air_lightning.errors import InvalidArgumentError
from air_lightning.integrations.located import PathLike
from air_lightning.integrations.second_name import SecondNames, link
from air_lightning.volumes import path as volume_path


class Saves:
    """Saves entries asynchronously, one checkpoint at a time, together with every other rank.

    Args:
        storage_options: Options for fsspec when a checkpoint path is a URL.
        timeout_s: Seconds that a background save may wait for another rank, and that waiting for
            a save may take.
        staging_dir: A local directory through which shards go to the checkpoint's.

    Raises:
        InvalidArgumentError: ``timeout_s`` is not positive, or ``staging_dir`` not local.
    """

    def __init__(
        self,
        *,
        storage_options: dict[str, Any] | None,
        timeout_s: float,
        staging_dir: str | os.PathLike[str] | None,
    ) -> None:
        if not timeout_s > 0:
            raise InvalidArgumentError(
                f"timeout_s={timeout_s!r} was given; a positive number of seconds is wanted."
            )
        self.storage_options = storage_options
        self.timeout_s = timeout_s
        self.staging_dir = None if staging_dir is None else Detour(staging_dir).directory
        self.group: dist.ProcessGroup | None = None
        self._saver: AsyncSaver | None = None
        self._world: object | None = None
        self._bound = False
        self._second_names = SecondNames()
        self._target: str | None = None  # of the last save, which may be in flight

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
            group = dist.new_group(backend="gloo", timeout=timeout)
            self.group = cast("dist.ProcessGroup", group)  # all ranks are members
        self._saver = AsyncSaver(
            process_group=self.group, no_dist=world is None, timeout_s=self.timeout_s
        )

    @property
    def rank(self) -> int:
        """This process among those that save together."""
        return dist.get_rank() if self._world is not None else 0

    def save_entries(
        self,
        entries: Entries,
        target: str,
        *,
        step: int | None,
        epoch: int | None,
        weights_only: bool,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Start saving entries; returns once they are staged.

        Args:
            entries: This rank's.
            target: From ``choose_target``.
            step: The global step, for the manifest.
            epoch: The epoch, likewise.
            weights_only: Whether there is no more than weights in it, likewise.
            storage_options: Options for fsspec, over those of the constructor.
        """
        saver = self._saver
        assert saver is not None
        options = storage_options or self.storage_options

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

        follow_up = replace_other if self.rank == 0 else None
        shares = {"unshared": entries.unshared, "unsure": entries.unsure}
        saver.save(entries, make_writer, on_published=follow_up, **shares)

    def begun(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Let the copy of a state begin, after ``wait``, while the entries for a save are made."""
        if self._saver is None or not self._saver.copies_much():
            return nullcontext()
        return self._saver.begun(large_tensors(state))

    def choose_target(self, path: PathLike) -> str:
        """Where the next save to a path goes; asked on one rank, after ``wait`` on all.

        Raises:
            InvalidPathError: ``path`` is none.
            SaveFailedError: Its directory cannot be made.
        """
        target = volume_path.normalize(path, allow_local=True)
        chosen = attempt.choose(target, self.storage_options)
        attempt.require_place(chosen, self.storage_options)
        self._target = target
        return chosen

    def is_torn(self, path: PathLike) -> bool:
        """Whether under this name is only what a killed process left of a save; of one rank."""
        target = volume_path.normalize(path, allow_local=True)
        return target != self._target and attempt.is_torn(target, self.storage_options)

    def prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate in the background what saving tensors like these will need."""
        if self._saver is not None:
            self._saver.prepare(tensors)

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
        make = self._second_names.clone(path, name)
        if make is not None:
            self.after_published(make)
        return make is not None

    def link(self, path: PathLike, name: PathLike) -> None:
        """Let a second name lead to a checkpoint once that is published, where links work.

        Elsewhere, as on volumes, nothing is made: ``AirResume`` finds the newest by itself.
        """
        make = link(path, name)
        if make is not None and self._saver is not None:
            self._saver.after_published(make)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the save in flight is published.

        Raises:
            SaveFailedError: It failed; raised once.
        """
        if self._saver is not None:
            self._saver.wait(timeout_s)
