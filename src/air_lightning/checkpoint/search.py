"""Finding the newest whole checkpoint of many, by a look at few; no torch.

A look at a directory is some requests, of which each may take 20 ms. What is newest is told by the
recorded step, which takes a look; but most names tell it too. So, in order::

    families   names that differ in their numbers alone, as ``epoch=0-step=100.ckpt``; a path and
               its ``.alt`` are one name
    look       at all of small families and all names without a number; at a sample of large ones,
               and at more of those where none of the sample recorded a step
    doubt      where one of a family recorded another step than its name tells: look at them all
    examine    the files, from the newest on, until one is whole, and its marker no garbage
    look on    at those whose names tell as high a step as its own, until there are none left

A name is thus believed only where four of its family told the truth.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from air_lightning.checkpoint.examine import (
    Candidate,
    CheckpointRecord,
    examine,
    examine_marker,
    look,
)
from air_lightning.checkpoint.manifest import step_in_name
from air_lightning.checkpoint.order import SUFFIX, newest_first
from air_lightning.volumes import path as paths

_BLIND = 64  # of a family in which none has a manifest yet; it may be folders of data, thousands
_SAMPLE = 4  # more would be more certain; a mount looks them up one after the other
_AHEAD = 8
_TOGETHER = 32  # requests on their way at the same time: each is a wait, and hardly any work

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each(action: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Do something that waits for storage to many items, in threads; results in their order."""
    waiting = list(items)
    if len(waiting) <= 1:
        return [action(item) for item in waiting]
    with ThreadPoolExecutor(min(_TOGETHER, len(waiting)), "air-catalog") as pool:
        return list(pool.map(action, waiting))


@dataclass(frozen=True)
class _Name:
    """The directories of one path, ``<path>`` and ``<path>.alt``, and the step that it tells."""

    directories: tuple[str, ...]
    step: int | None

    @property
    def rank(self) -> int:
        return -1 if self.step is None else self.step


class Search:
    """One search among the directories of a root.

    Args:
        children: The directories' paths.
        options: Passed to fsspec.
        resumable: Whether to leave out those that hold weights alone.
    """

    def __init__(
        self, children: Iterable[str], options: dict[str, Any] | None, *, resumable: bool
    ) -> None:
        self._options = options
        self._resumable = resumable
        self._families = _families(children)
        self._looked: dict[str, Candidate] = {}
        self._examined: dict[str, CheckpointRecord | None] = {}
        self._opened: set[str] = set()  # those whose marker was read

    def run(self) -> tuple[CheckpointRecord | None, list[CheckpointRecord]]:
        """Return the newest whole checkpoint, and the newer ones that are not whole."""
        self._look(name for family in self._families for name in _sample(family))
        silent = [family for family in self._families if not self._records(family)]
        self._look(name for family in silent for name in family[:_BLIND])
        self._look(name for family in self._families if self._lies(family) for name in family)
        left = [name for family in self._families for name in family if not self._has_seen(name)]
        left.sort(key=lambda name: name.rank, reverse=True)
        many = _AHEAD
        while True:
            found, passed = self._newest()
            least = -1 if found is None or found.step is None else found.step
            ahead = [name for name in left[:many] if name.rank >= least]
            if not ahead:
                return found, passed
            self._look(ahead)
            left, many = left[len(ahead) :], 2 * many

    def _look(self, names: Iterable[_Name]) -> None:
        paths_ = [path for name in names if not self._has_seen(name) for path in name.directories]
        candidates = each(lambda path: look(path, self._options), paths_)
        self._looked.update(zip(paths_, candidates, strict=True))

    def _has_seen(self, name: _Name) -> bool:
        return name.directories[0] in self._looked

    def _records(self, family: Sequence[_Name]) -> bool:
        """Whether one of those looked at has a manifest."""
        looked = (self._looked.get(path) for name in family for path in name.directories)
        return any(each is not None and each.manifest is not None for each in looked)

    def _lies(self, family: Sequence[_Name]) -> bool:
        for name in family:
            for path in name.directories:
                candidate = self._looked.get(path)
                manifest = None if candidate is None else candidate.manifest
                recorded = None if manifest is None else manifest.global_step
                if recorded is not None and recorded != name.step:
                    return True
        return False

    def _newest(self) -> tuple[CheckpointRecord | None, list[CheckpointRecord]]:
        """The newest whole one of those looked at, and the newer ones that are not whole."""
        # Weights alone are left out before they are put in order: they replace nothing that a run
        # could be resumed from, also where they were saved later to the same path.
        records = [
            candidate.record
            for candidate in self._looked.values()
            if not (self._resumable and candidate.record.weights_only)
        ]
        ordered = newest_first(records, self._is_whole)
        passed: list[CheckpointRecord] = []
        for number, record in enumerate(ordered):
            # After one that is not whole, two together, then four: there may be many.
            self._examine(ordered[number : number + 1 + min(len(passed), _TOGETHER)])
            judged = self._judged(record.path)
            if judged is not None and judged.valid:
                return judged, passed
            if judged is not None:
                passed.append(judged)
        return None, passed

    def _is_whole(self, record: CheckpointRecord) -> bool:
        self._examine([record])
        judged = self._judged(record.path)
        return judged is not None and judged.valid

    def _judged(self, path: str) -> CheckpointRecord | None:
        """The record of one that was examined, its marker read too."""
        judged = self._examined[path]
        if judged is not None and judged.valid and path not in self._opened:
            judged = self._examined[path] = examine_marker(self._looked[path], judged)
            self._opened.add(path)
        return judged

    def _examine(self, records: Iterable[CheckpointRecord]) -> None:
        due = [record.path for record in records if record.path not in self._examined]
        judged = each(lambda path: examine(self._looked[path]), due)
        self._examined.update(zip(due, judged, strict=True))


def _families(children: Iterable[str]) -> list[list[_Name]]:
    """Put names together that differ in their numbers alone, each family from the highest on."""
    directories: dict[str, list[str]] = {}
    for child in children:
        directories.setdefault(child.removesuffix(SUFFIX), []).append(child)
    families: dict[str, list[_Name]] = {}
    for path, both in directories.items():
        shape = re.sub(r"\d+", "0", paths.name(path))
        families.setdefault(shape, []).append(_Name(tuple(both), step_in_name(path)))
    return [sorted(names, key=lambda name: name.rank, reverse=True) for names in families.values()]


def _sample(family: Sequence[_Name]) -> Sequence[_Name]:
    """All of a small family; of a large one the highest, the lowest, and some in between."""
    if len(family) <= _SAMPLE:
        return family
    last = len(family) - 1
    return [family[number * last // (_SAMPLE - 1)] for number in range(_SAMPLE)]
