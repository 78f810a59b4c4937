"""What a ModelCheckpoint does only right with files that are there at once, corrected per instance.

dirpath       taken as it was written: Lightning makes relative paths of some URLs
links         made when what they lead to is published
save_last     a second name for the checkpoint that was just saved, where files can be linked,
and not a second save of the same step
loggers       told of a checkpoint when it is published, on the training thread
on_exception  a checkpoint that cannot be saved is a line in the log: the user's error comes out;
              a run that ends on a signal has saved already
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from air_lightning.errors import SaveFailedError
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.signals import Preempted
from air_lightning.volumes import path as volume_path

_log = logging.getLogger("air_lightning")


def as_written(dirpath: str) -> str:
    """The path that was given as ``ModelCheckpoint(dirpath=...)``.

    Lightning takes ``dbfs:/...`` and ``file:///...`` for relative paths, and would save below the
    working directory: on a cluster, on a disk that goes with the machine.
    """
    prefix = os.getcwd().rstrip("/") + "/"
    rest = dirpath.removeprefix(prefix)
    if rest == dirpath:
        return dirpath
    if rest.startswith("dbfs:/"):
        return volume_path.normalize(rest)
    if rest.startswith("file:/"):
        return rest.removeprefix("file:")
    return dirpath


class Adopted:
    """One ModelCheckpoint, bound.

    Args:
        callback: The ModelCheckpoint.
        io: Of its Trainer.

    Attributes:
        source: While ``save_last`` saves what was saved a moment ago under another name: that name.
    """

    def __init__(self, callback: Any, io: AirCheckpointIO) -> None:
        self._io = io
        self._save = callback._save_checkpoint
        self._save_topk = callback._save_topk_checkpoint
        self._save_last = callback._save_last_checkpoint
        self._fresh: str | None = None
        self.source: str | None = None
        if callback.dirpath is not None:
            callback.dirpath = as_written(callback.dirpath)
        callback._link_checkpoint = self._link
        callback._save_checkpoint = self._note_path
        callback._save_topk_checkpoint = self._note_topk
        callback._save_last_checkpoint = self._save_last_once

    def _link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        # Lightning links at the call, when the directory of an asynchronous save is not there.
        if trainer.is_global_zero and filepath != linkpath:
            self._io.link(filepath, linkpath)
        trainer.strategy.barrier()

    def _note_path(self, trainer: Trainer, filepath: str) -> None:
        self._save(trainer, filepath)
        self._fresh = filepath

    def _note_topk(self, trainer: Trainer, candidates: Any) -> None:
        self._fresh = None  # nothing was in the top k this time, unless a save follows
        self._save_topk(trainer, candidates)

    def _save_last_once(self, trainer: Trainer, candidates: Any) -> None:
        # Lightning calls the two one after the other: nothing has changed in between.
        self.source, self._fresh = self._fresh, None
        try:
            self._save_last(trainer, candidates)
        finally:
            self.source = self._fresh = None


class LoggerNotices:
    """Tells loggers of checkpoints that are there.

    Lightning tells them when the call returns; those that upload checkpoints would upload nothing,
    or half of one.

    Args:
        io: Of the Trainer.
    """

    def __init__(self, io: AirCheckpointIO) -> None:
        self._io = io
        self._ready: deque[Callable[[], None]] = deque()

    def defer(self, logger: Any) -> None:
        """Let this logger be told later."""
        tell = logger.after_save_checkpoint

        def later(callback: Any) -> None:
            self._io.after_published(lambda: self._ready.append(lambda: tell(callback)))

        logger.after_save_checkpoint = later

    def give(self) -> None:
        """Tell what there is to tell, on the calling thread: loggers may know nothing of others."""
        while self._ready:
            self._ready.popleft()()


def save_on_exception_quietly(callback: Any) -> None:
    """Let a callback that saves on an exception not raise another one in its place.

    The other ranks may not have failed, and do not come to the save.
    """
    save = callback.on_exception

    def on_exception(trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, Preempted):
            return
        try:
            save(trainer, pl_module, exception)
        except SaveFailedError as error:
            _log.error("No checkpoint is saved on the exception. %s", error)

    callback.on_exception = on_exception
