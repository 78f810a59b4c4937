"""``ckpt_path="last"``: the newest valid one of the checkpoints that are called so.

Lightning looks for it before any callback is called, among files as the operating system shows
them, and takes the latest by time of modification, whole or torn. It finds none where a directory
stands in for ``/Volumes``, nor behind a URL; then it warns, and evaluates the weights that the
model happens to have. Here, once all ranks are there::

    asked        what the user gave, from the arguments of the call itself
    newest_last  the latest step, of the names that callbacks give to their last checkpoint
    agreed       rank 0's answer, or its error, on every rank
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from air_lightning.checkpoint.catalog import list_root, newest_valid
from air_lightning.checkpoint.order import newest_first, step_of
from air_lightning.checkpoint.single_file import newest_file
from air_lightning.errors import AirError, CheckpointError
from air_lightning.integrations.choice import of_rank_zero
from air_lightning.integrations.model_checkpoint import as_written
from air_lightning.volumes import path as volume_path

UNKNOWN = object()  # of what was given: the call under way is not one that is known
_ENTRANCES = ("_fit_impl", "_validate_impl", "_test_impl", "_predict_impl")


def asked(trainer: Any) -> Any:
    """The ``ckpt_path`` that the call under way was given, or UNKNOWN; called from a set-up hook.

    Lightning puts what it found in the argument's place; its caller still has what was given.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        name = frame.f_code.co_name
        if name in _ENTRANCES and frame.f_locals.get("self") is trainer:
            told = _given(getattr(trainer, name), frame.f_back.f_locals)
            return _set(trainer) if told is None else told
        frame = frame.f_back
    return UNKNOWN


def _set(trainer: Any) -> Any:
    """What was given by ``trainer.ckpt_path = ...``."""
    is_set = getattr(trainer._checkpoint_connector, "_user_managed", False)
    return trainer.ckpt_path if is_set else None


def _given(entrance: Callable[..., Any], caller: dict[str, Any]) -> Any:
    try:
        told = inspect.signature(entrance).bind(*caller["args"], **caller["kwargs"])
    except (KeyError, TypeError):
        return UNKNOWN  # called in another way than by the releases of Lightning that are known
    return told.arguments.get("ckpt_path")


def agreed(trainer: Any, choose: Callable[[], Any], where: object) -> Any:
    """Rank 0's choice on every rank.

    Raises:
        CheckpointError: It failed on rank 0.
    """

    def look() -> Any:
        try:
            return choose()
        except (AirError, OSError) as error:
            raise CheckpointError(
                f"Looking for a checkpoint to load in {where} failed: {error}"
            ) from error

    return of_rank_zero(trainer.strategy, look)


def newest_last(trainer: Any, given: Any, options: dict[str, Any] | None) -> tuple[Any, bool]:
    """The newest valid checkpoint of those called ``last``, and whether it is ours; of one rank.

    Args:
        trainer: Its callbacks tell directories and names.
        given: What Lightning found; the answer where nothing has such a name.
        options: Passed to fsspec.

    Raises:
        CheckpointError: There are such names, and under none of them is a valid checkpoint.
    """
    names = _names(trainer)
    resumable = trainer.state.fn == "fit"
    found, is_ours = newest(names, options, resumable=resumable, names=names)
    if found is not None:
        rank_zero_info(f'ckpt_path="last" is {found}, the newest valid checkpoint of that name.')
        return found, is_ours
    if given is not None and os.path.isfile(given):
        return given, False  # weights alone, in a file of Lightning's
    called = [
        volume_path.join(root, entry.name)
        for root, prefixes in names.items()
        for entry in list_root(root, options)
        if entry.name.startswith(prefixes)
    ]
    if called:
        raise CheckpointError(
            f'ckpt_path="last" was given, and none of {called} is a valid checkpoint. Give the '
            "path of another one (`air-lightning ls ROOT` lists them), or to `fit` the callback "
            "AirResume(), which goes on from the newest valid one of any name."
        )
    return given, False


def _names(trainer: Any) -> dict[str, tuple[str, ...]]:
    """What the names of last checkpoints begin with, by directory."""
    names: dict[str, tuple[str, ...]] = {}
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            root, begin = as_written(str(callback.dirpath)), callback.CHECKPOINT_NAME_LAST
        elif isinstance(callback, OnExceptionCheckpoint):
            root, begin = os.path.split(callback.ckpt_path)
        else:
            continue
        known = volume_path.normalize(root, allow_local=True)
        names[known] = (*names.get(known, ()), begin)
    return names


def newest(
    roots: Iterable[str],
    options: dict[str, Any] | None,
    *,
    resumable: bool = True,
    names: dict[str, tuple[str, ...]] | None = None,
) -> tuple[str | None, bool]:
    """The path of the latest step, ours where two have the same; and whether it is ours.

    Args:
        roots: The directories that hold checkpoints.
        options: Passed to fsspec.
        resumable: Leave out those that hold weights alone.
        names: What names must begin with, by directory; any will do where this is left out.
    """
    begin = names or {}
    # Several ModelCheckpoints may share a directory.
    listed = {
        root: [e for e in list_root(root, options) if e.name.startswith(begin.get(root, ("",)))]
        for root in roots
    }
    found = [
        newest_valid(
            root,
            resumable=resumable,
            storage_options=options,
            listed=entries,
            begin=begin.get(root, ("",)),
        )
        for root, entries in listed.items()
    ]
    records = newest_first([record for record in found if record is not None], lambda _: True)
    ours = records[0] if records else None
    single = newest_file(listed, storage_options=options)
    if single is not None and (ours is None or single.step > step_of(ours)):
        return single.path, False
    return (None if ours is None else ours.path), ours is not None
