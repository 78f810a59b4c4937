"""Which of several checkpoints is the newest; no torch.

By step, then by time. But ``<path>`` and ``<path>.alt`` are saves of one path, and there the later
one replaces the earlier, also where it is of the same or a lower step: a run that was started again
from an older state saves to ``last.ckpt`` too. Killed before the earlier is deleted, both are
complete. The time is the manifest's, by the writer's clock; the step decides where one has none.
"""

from collections.abc import Callable, Iterable

from air_lightning.checkpoint.examine import CheckpointRecord

SUFFIX = ".alt"

_Age = tuple[int, float, str, bool]


def both(path: str) -> tuple[str, str]:
    """The two names that a checkpoint of this path may have."""
    return path, path + SUFFIX


def as_published(records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """Sort the checkpoints under the two names of one path, the one published last at the end.

    Args:
        records: In the order of ``both``. Of two alike the second is the later: it is written only
            while there is a first.
    """
    found = list(records)
    if any(record.time is None for record in found):
        return sorted(found, key=step_of)
    return sorted(found, key=lambda record: (record.time or 0.0, step_of(record)))


def newest_first(
    records: Iterable[CheckpointRecord], judge: Callable[[CheckpointRecord], bool]
) -> list[CheckpointRecord]:
    """Sort the checkpoints of a directory; one that was replaced comes right after its successor.

    Args:
        records: At most one for each path.
        judge: Says whether one is complete; asked about possible successors alone.
    """
    by_path = {record.path: record for record in records}

    def age(record: CheckpointRecord) -> _Age:
        successor = _successor(record, by_path)
        if successor is not None and judge(successor):
            return (*_age(successor), False)
        return (*_age(record), True)

    return sorted(by_path.values(), key=age, reverse=True)


def _successor(
    record: CheckpointRecord, by_path: dict[str, CheckpointRecord]
) -> CheckpointRecord | None:
    """The later of the two names of a path, where both are and this is the earlier."""
    names = both(record.path.removesuffix(SUFFIX))
    published = as_published(by_path[name] for name in names if name in by_path)
    return None if published[-1] is record else published[-1]


def _age(record: CheckpointRecord) -> tuple[int, float, str]:
    return step_of(record), record.time or 0.0, record.path


def step_of(record: CheckpointRecord) -> int:
    """Its step, -1 where nothing tells it."""
    return -1 if record.step is None else record.step
