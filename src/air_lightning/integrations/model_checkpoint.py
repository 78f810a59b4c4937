"""What a ModelCheckpoint does only right with files that are there at once, corrected per instance.

What is corrected::

    dirpath       taken as it was written: Lightning makes relative paths of some URLs
    names         what a kill left of a save does not count as a file that exists: the resumed run
                  saves that step again, under the same name and not as ``-v1`` beside it
    links         made when what they lead to is published
    put off       a save that waits for a metric of the next validation waits for it after a resume
    save_last     a second name for the checkpoint that was just saved, where files can be linked,
                  and not a second save of the same step
    loggers       told of a checkpoint when it is published, on the training thread
    on_exception  a checkpoint that cannot be saved is a line in the log: the user's error comes
                  out; a run that ends on a signal has saved already
"""

import copy
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from air_lightning.checkpoint.order import both
from air_lightning.integrations.checkpoint_io import AirCheckpointIO
from air_lightning.integrations.signals import Preempted
from air_lightning.volumes import path as volume_path

_TELL = "_air_lightning_tell"
_PUT_OFF = "_defer_save_until_validation"
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
        resumes: Whether what is torn in its directory was this run's. Otherwise it may be another
            run's save in flight.
    """

    def __init__(self, callback: Any, io: AirCheckpointIO) -> None:
        self._io = io
        self._callback = callback
        self._save = callback._save_checkpoint
        self._save_topk = callback._save_topk_checkpoint
        self._save_last = callback._save_last_checkpoint
        self._file_exists = callback.file_exists
        self._fresh: str | None = None
        self.source: str | None = None
        self.resumes = False
        if callback.dirpath is not None:
            callback.dirpath = as_written(callback.dirpath)
        callback._link_checkpoint = self._link
        callback.file_exists = self._exists
        callback._save_checkpoint = self._note_path
        callback._save_topk_checkpoint = self._note_topk
        callback._save_last_checkpoint = self._save_last_once

    @property
    def put_off(self) -> bool:
        """Whether a save is due at the end of the next validation; not in Lightning's own state."""
        return bool(getattr(self._callback, _PUT_OFF, False))

    @put_off.setter
    def put_off(self, is_so: bool) -> None:
        # Lightning before 2.6 puts nothing off.
        if hasattr(self._callback, _PUT_OFF):
            setattr(self._callback, _PUT_OFF, is_so)

    def _link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        # Lightning links at the call, when the directory of an asynchronous save is not there.
        if trainer.is_global_zero and filepath != linkpath:
            self._io.link(filepath, linkpath)
        trainer.strategy.barrier()

    def _exists(self, filepath: str, trainer: Any) -> bool:
        names = [volume_path.local_dir(name) for name in both(as_written(filepath))]
        if None in names:
            if not self._file_exists(filepath, trainer):
                return False
        # Lightning looks for /Volumes itself, also where a directory stands in for it.
        elif not trainer.strategy.broadcast(any(name and os.path.exists(name) for name in names)):
            return False
        torn = self.resumes and trainer.is_global_zero and self._io.is_torn(filepath)
        return not trainer.strategy.broadcast(torn)

    def _note_path(self, trainer: Trainer, filepath: str) -> None:
        self._save(trainer, filepath)
        self._fresh = filepath

    def _note_topk(self, trainer: Trainer, candidates: Any) -> None:
        self._fresh = None  # nothing was in the top k this time, unless a save follows
        before = self._callback.last_model_path
        if self._callback.save_last is True:
            # Part of the state that is saved, and of the second name's. Without it a resumed run
            # takes its last checkpoint for another's, and leaves it there for good.
            self._callback.last_model_path = self._coming_last(trainer, candidates)
        try:
            self._save_topk(trainer, candidates)
        finally:
            self._callback.last_model_path = before

    def _coming_last(self, trainer: Trainer, candidates: Any) -> str:
        """The name that Lightning is about to give to the last checkpoint."""
        callback = self._callback
        name = callback.CHECKPOINT_NAME_LAST
        path: str = callback.format_checkpoint_name(candidates, name)
        if callback._enable_version_counter:
            version = callback.STARTING_VERSION
            while callback.file_exists(path, trainer) and path != callback.last_model_path:
                path = callback.format_checkpoint_name(candidates, name, ver=version)
                version += 1
        return path

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
        # A logger of an earlier Trainer is told for this one, not for both.
        tell = getattr(logger.after_save_checkpoint, _TELL, logger.after_save_checkpoint)

        def later(callback: Any) -> None:
            then = _as_it_is(callback)
            self._io.after_published(lambda: self._ready.append(lambda: tell(then)))

        setattr(later, _TELL, tell)
        logger.after_save_checkpoint = later

    def give(self) -> None:
        """Tell what there is to tell, on the calling thread: loggers may know nothing of others."""
        while self._ready:
            self._ready.popleft()()

    def give_at_end(self) -> None:
        """The same where an error may be on its way, which must not be masked."""
        try:
            self.give()
        except Exception:  # noqa: BLE001 - logged
            _log.exception("A logger failed when it was told of a checkpoint.")


def _as_it_is(callback: Any) -> Any:
    """A ModelCheckpoint with the paths that it has now: it will name others when it is told of."""
    real = callback.__init__.__self__  # Lightning passes a weak proxy, which cannot be copied
    if not isinstance(real, ModelCheckpoint):
        return callback  # a user's own, of which nothing is known
    then = copy.copy(real)
    then.best_k_models = dict(real.best_k_models)
    return then


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
        except Exception as error:  # noqa: BLE001 - the other ranks may be gone in any way
            _log.error("No checkpoint is saved on the exception. %s", error)

    callback.on_exception = on_exception
