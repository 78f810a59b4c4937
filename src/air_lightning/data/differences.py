"""What ranks are about to read differently, in words: the value on each rank, and the remedy."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Records: TypeAlias = Mapping[int, Mapping[str, Any]]

SKIP_VARIABLE = "AIR_SKIP_AGREEMENT"

_REMEDIES = {
    "files": "Files came or went while the ranks listed them: wait until nothing writes there, or "
    "leave the new files out by pattern=, and start again.",
    "fingerprint": "Files were replaced while the ranks listed them: wait until nothing writes "
    "there, and start again.",
    "epoch": "Load states of one and the same checkpoint on all ranks, and give set_epoch() the "
    "same number.",
}
_OTHER_REMEDY = "Give all ranks the same {}=."


def difference(records: Records) -> str:
    """What differs between ranks, with the value on each, and what to do."""
    flat = {rank: _flat(record) for rank, record in records.items()}
    changed: list[str] = []
    for name in dict.fromkeys(name for record in flat.values() for name in record):
        if len({repr(record.get(name)) for record in flat.values()}) > 1:
            changed.append(name)  # noqa: PERF401 - longer as one expression
    if "files" in changed and "fingerprint" in changed:
        changed.remove("fingerprint")  # it follows from the other
    values = "; ".join(
        f"{name}={by_value({rank: record.get(name) for rank, record in flat.items()})}"
        for name in changed
    )
    remedies = " ".join(_REMEDIES.get(name) or _OTHER_REMEDY.format(name) for name in changed)
    return (
        f"The ranks are about to read {paths(records)} differently, so files would be repeated "
        f"and left out: {values}. {remedies} ({SKIP_VARIABLE}=1 turns this check off.)"
    )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as one table; of several sources, those values that differ between them in a row."""
    names = dict.fromkeys(name for source in record["sources"] for name in source)
    table = {name: [source.get(name) for source in record["sources"]] for name in names}
    flat = {name: row[0] if len(row) == 1 else row for name, row in table.items()}
    return {**flat, "num_workers": record["num_workers"], "epoch": record["epoch"]}


def by_value(values: Mapping[int, Any]) -> str:
    """As ``3 on ranks 0-2, 5; 4 on rank 3``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(those)}" for value, those in ranks.items())


def _ranks(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def paths(records: Records) -> str:
    """The datasets that records are about."""
    first = next(iter(records.values()))
    return ", ".join(source["path"] for source in first["sources"])
