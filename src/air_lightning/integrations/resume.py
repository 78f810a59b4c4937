"""AirResume: go on from the newest valid checkpoint, exactly.

    fit -> _restore_modules_and_callbacks -> resume_start(path)       every rank, group is up
      path given          it wins
      path None, "last"   rank 0 looks for the newest valid one and tells the others
      -> strategy.load_checkpoint (attach.py): the checkpoint, and this rank's own position
      -> position.Restorer: loaders before ``iter()``, generators after the first fetch

One rank chooses because listings of a volume may differ between nodes for some seconds; ranks
that resume from different steps train on, silently, with different weights. One whose listing does
not show the chosen checkpoint yet waits for it, for a minute, and then all ranks fail (binding.py).
"""

import logging
import os
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from air_lightning.data.stream import set_share
from air_lightning.errors import InvalidArgumentError
from air_lightning.integrations.attach import AirAttach, bind, bound
from air_lightning.integrations.last import UNKNOWN, agreed, newest
from air_lightning.integrations.other_name import refuse_trainer
from air_lightning.integrations.preemption import Preemption
from air_lightning.integrations.strategies import data_share
from air_lightning.volumes import path as volume_path

logger = logging.getLogger("air_lightning")

_VERSIONED = re.compile(r"/version_\d+(/|$)")


class AirResume(AirAttach):
    """Resumes ``trainer.fit`` from the newest valid checkpoint; starts fresh when there is none.

    A checkpoint is valid when its ``.metadata`` is what was written, and its files have their
    recorded sizes. Lightning's own, single files and sharded directories, count too, and the latest
    step wins.
    Restores weights, optimizers and loops as Lightning does, and for each rank its loader position
    and random generators, so that the run goes on with the batch that would have come next.

    An explicit path as ``fit(ckpt_path=...)`` wins. ``"last"`` means the newest valid one,
    and so does what Lightning chooses by itself where there is an ``OnExceptionCheckpoint``. Only
    a Trainer that has not trained yet resumes: a second ``fit`` goes on from memory.

    Args:
        dirpath: Directory whose children are checkpoints (a volume path, an fsspec URL or a local
            path). Default: the directories of the Trainer's ``ModelCheckpoint`` callbacks, those
            with ``save_weights_only=True`` left out, since nothing can be resumed from these.
        storage_options: Options for fsspec when ``dirpath`` is a URL.
        elastic: Whether training may go on with another number of ranks or workers than it was
            saved with: what is left of the epoch is shared out, each file once. As
            ``elastic=True`` of every ``air_lightning.DataLoader`` that trains, or of
            ``AirDataModule``, either of which is enough without this.
        save_on_signal: On SIGTERM or SIGUSR1 to any rank, end the step, save once, and exit with
            status 143; see "Preemption" in the docs.

    Raises:
        InvalidPathError: ``dirpath`` is no path of these kinds.
        InvalidArgumentError: ``elastic`` is neither true nor false.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        storage_options: dict[str, Any] | None = None,
        elastic: bool = False,
        save_on_signal: bool = True,
    ) -> None:
        if not isinstance(elastic, bool):
            raise InvalidArgumentError(f"elastic={elastic!r} was given; true or false is wanted.")
        self.dirpath = None if dirpath is None else volume_path.normalize(dirpath, allow_local=True)
        self.storage_options = storage_options
        self.elastic = elastic
        self._preemption = Preemption(self._roots) if save_on_signal else None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bind the Trainer, and decide from now on what it restores.

        Raises:
            InvalidArgumentError: The Trainer has no AirCheckpointIO, or is pytorch_lightning's.
        """
        refuse_trainer(trainer)
        set_share(data_share(trainer.strategy))
        binding = bind(trainer)
        if binding is None:
            raise InvalidArgumentError(
                "AirResume needs Trainer(plugins=[AirCheckpointIO()]); this Trainer saves through "
                f"{type(getattr(trainer.strategy, '_checkpoint_io', None)).__name__}, whose "
                "checkpoints hold rank 0's position only."
            )
        if self.elastic:
            binding.go_on_elsewhere()
        if stage == "fit":
            binding.take_torn_names()
            binding.resume = partial(self._choose, trainer)
            if self._preemption is not None:
                self._preemption.begin(trainer)

    def _choose(self, trainer: Any, given: Any, asked: Any) -> Any:
        roots = self._roots(trainer)
        # Also what was given: ``ckpt_path="last"`` is a path where the listing tells of one, and
        # nothing on a rank whose listing does not yet.
        return agreed(trainer, lambda: self._choose_here(trainer, given, asked, roots), roots)

    def _choose_here(self, trainer: Any, given: Any, asked: Any, roots: list[str]) -> Any:
        names: dict[str, tuple[str, ...]] = {}
        if given is not None:
            if not _is_lightnings_choice(given, asked, roots):
                return given
            path = volume_path.normalize(given, allow_local=True)
            # Lightning's may lie elsewhere, as that of an OnExceptionCheckpoint.
            names = {volume_path.parent(path): (volume_path.name(path),)}
            names.update(dict.fromkeys(roots, ("",)))
        found, is_ours = newest(names or roots, self.storage_options, names=names)
        binding = bound(trainer)
        if found is None:
            _tell_of_fresh_start(roots, self.dirpath)
        elif is_ours and binding is not None:
            binding.take(found)
        return found

    def _roots(self, trainer: Any) -> list[str]:
        if self.dirpath is not None:
            return [self.dirpath]
        return [
            volume_path.normalize(callback.dirpath, allow_local=True)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
            and callback.dirpath
            and not callback.save_weights_only
        ]


def _tell_of_fresh_start(roots: list[str], dirpath: str | None) -> None:
    rank_zero_info(f"AirResume: no valid checkpoint in {roots}; starting fresh.")
    if dirpath is None and any(_VERSIONED.search(root) for root in roots):
        logger.warning(
            "AirResume looks in %s, which the logger chose anew for this start: checkpoints of an "
            "earlier start are never found there. Give ModelCheckpoint(dirpath=...) or "
            "AirResume(dirpath) a directory that stays.",
            roots,
        )


def _is_lightnings_choice(path: Any, asked: Any, roots: Iterable[str]) -> bool:
    """Whether Lightning chose this path; one that the user wrote out is meant.

    For ``ckpt_path="last"`` it takes the newest by modification time among those named ``last``,
    whole or torn; so it does by itself where there is an ``OnExceptionCheckpoint``, whose file may
    be of a failure long ago.
    """
    if asked is not UNKNOWN:
        return asked is None or bool(asked == "last")
    target = volume_path.normalize(path, allow_local=True)
    is_last = volume_path.name(target).startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
    return is_last and volume_path.parent(target) in set(roots)
