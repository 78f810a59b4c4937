"""Whether all ranks are about to read the same files in the same order.

The promise: ranks that differ get an error before their first batch, instead of wrong slices or
a wait without end; a rank that is late, or alone, is delayed by seconds at most, and once. No
collective is used, since those hang where only one rank iterates, but the process group's store::

    iter(loader)   set   <key>/rank<r>     this rank's record, for messages
                   add   <key>/<digest>    how many ranks have this very record
                   add   <key>/total       how many ranks are here
    first batch    the others are waited for, ``WAIT_S`` at most, while the workers make it
    later batches  another look once a second, until all ranks are here
    all here       the records of others are read only if a count is short of the total

The key names the dataset and how many times this process has begun to agree on it, so ranks meet
in the order of their loaders. A store that fails is no reason to stop: then nothing is checked.
"""

import hashlib
import json
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed
from torch.utils.data import Dataset

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.stream import current_rank
from air_lightning.errors import RankMismatchError

_logger = logging.getLogger("air_lightning")

WAIT_S = 10.0
SKIP_VARIABLE = "AIR_SKIP_AGREEMENT"
_LOOK_EVERY_S = 1.0
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05

_REMEDIES = {
    "files": "Files came or went while the ranks listed them: wait until nothing writes there, or "
    "leave the new files out by pattern=, and start again.",
    "fingerprint": "Files were replaced while the ranks listed them: wait until nothing writes "
    "there, and start again.",
    "epoch": "Load states of one and the same checkpoint on all ranks, and give set_epoch() the "
    "same number.",
}
_OTHER_REMEDY = "Give all ranks the same {}=."

_begun: Counter[str] = Counter()


def agree(
    dataset: Any, *, num_workers: int, epoch: int, batches: int | None, strict: bool
) -> "Agreement | None":
    """Publish what this rank is about to read; None where there is nothing to agree on.

    Args:
        dataset: The loader's dataset, which is or holds some of files.
        num_workers: Of the loader.
        epoch: Of the pass.
        batches: How many this pass has; None where that is not known.
        strict: Whether other numbers of batches are an error; a warning otherwise.
    """
    rank, world_size = current_rank()
    sources = _sources(dataset) if world_size > 1 else []
    store = _default_store() if sources and not os.environ.get(SKIP_VARIABLE) else None
    if store is None:
        return None
    name = _hash([[source["path"], source["pattern"]] for source in sources])
    _begun[name] += 1
    board = _Board(store, f"air_agreement/{name}/{_begun[name]}", rank, world_size)
    order = {"sources": sources, "num_workers": num_workers, "epoch": epoch}
    agreement = Agreement(board, order, batches, strict=strict)
    return agreement if agreement.publish() else None


class Agreement:
    """One rank's side of it.

    Args:
        board: Where the ranks publish.
        order: What must be the same on all ranks.
        batches: What should be.
        strict: Whether other numbers of batches are an error.

    Attributes:
        settled: Whether there is nothing left to check.
        refused: Whether the ranks did not agree.
    """

    def __init__(
        self, board: "_Board", order: dict[str, Any], batches: int | None, *, strict: bool
    ) -> None:
        self._board = board
        self._order = order
        self._batches = batches
        self._strict = strict
        self._next_look: float | None = None
        self.settled = self.refused = False

    def publish(self) -> bool:
        """Publish this rank's record; whether the store took it."""
        try:
            self._board.publish(self._order, self._batches)
        except Exception as error:  # noqa: BLE001 - the store's own, of any kind
            self._give_up(error)
        return not self.settled

    def check(self, *, last: bool = False) -> None:
        """Look whether all agree, before a batch is handed out.

        Args:
            last: The pass is over: look now, however recent the last look is.

        Raises:
            RankMismatchError: They do not.
        """
        if self.settled:
            return
        try:
            self.settled = self._all_here(last=last)
            same_order, same_batches = self._compare() if self.settled else (True, True)
            records = {} if same_order and same_batches else self._board.records()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return
        if not same_order:
            self.refused = True
            raise RankMismatchError(_difference(records))
        if not same_batches:
            self._tell_uneven(records)

    def _all_here(self, *, last: bool) -> bool:
        now = time.monotonic()
        if self._next_look is None:
            here = self._board.wait_for_all()
        elif last or now >= self._next_look:
            here = self._board.all_here()
        else:
            return False
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        return here

    def _compare(self) -> tuple[bool, bool]:
        return self._board.all_have(self._order), self._board.all_have(self._batches)

    def _tell_uneven(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        batches = _by_value({rank: record["batches"] for rank, record in records.items()})
        message = (
            f"The ranks have different numbers of batches of {_paths(records)} in this pass: "
            f"{batches}. A training step that waits for all ranks waits for ever once the first "
            'runs out. Use uneven="pad" (or "drop") and the same batch_size= on all ranks.'
        )
        if self._strict:
            self.refused = True
            raise RankMismatchError(message)
        warnings.warn(message, stacklevel=4)

    def _give_up(self, error: Exception) -> None:
        self.settled = True
        _logger.debug("Whether the ranks read the same files is not checked: %s", error)


class _Board:
    """The keys of one agreement in the process group's store."""

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._world_size = world_size

    def publish(self, order: dict[str, Any], batches: int | None) -> None:
        """Publish this rank's record; the total last, so that all of it is there when it counts."""
        record = json.dumps({**order, "batches": batches})
        self._store.set(f"{self._key}/rank{self._rank}", record)
        for name in (_hash(order), _hash(batches), "total"):
            self._count(name, 1)

    def all_here(self) -> bool:
        """Whether all ranks have published. Does not wait."""
        return self._count("total") >= self._world_size

    def wait_for_all(self) -> bool:
        """Wait for all ranks for a while; whether they are here."""
        deadline, pause = time.monotonic() + WAIT_S, _FIRST_POLL_S
        while not self.all_here():
            if time.monotonic() + pause > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
        return True

    def all_have(self, value: Any) -> bool:
        """Whether all ranks have published this."""
        return self._count(_hash(value)) >= self._world_size

    def records(self) -> dict[int, dict[str, Any]]:
        """The records by rank, as many as can be read in ``WAIT_S``."""
        deadline = time.monotonic() + WAIT_S
        records: dict[int, dict[str, Any]] = {}
        for rank in range(self._world_size):
            # Those of later ranks may be missing: each of very many ranks reads them all.
            if not records or time.monotonic() < deadline:
                records[rank] = json.loads(self._store.get(f"{self._key}/rank{rank}"))
        return records

    def _count(self, name: str, number: int = 0) -> int:
        return int(self._store.add(f"{self._key}/{name}", number))


def _default_store() -> Any:
    """The store of the default process group; None where this torch has no such way to it."""
    try:
        # Private, and the only way: a process group made by torchrun keeps its store to itself.
        return torch.distributed.distributed_c10d._get_default_store()
    except Exception as error:  # noqa: BLE001 - whatever another torch raises
        _logger.debug("Whether the ranks read the same files is not checked: %s", error)
        return None


def _sources(dataset: Any, depth: int = 3) -> list[dict[str, Any]]:
    """The identities of the datasets of files that a dataset is, or holds."""
    if isinstance(dataset, UCVolumeDataset):
        return [dataset.identity()]
    held = vars(dataset).values() if depth and isinstance(dataset, Dataset) else ()
    return [source for value in held for source in _sources(value, depth - 1)]


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def _difference(records: Mapping[int, Mapping[str, Any]]) -> str:
    flat = {rank: _flat(record) for rank, record in records.items()}
    changed: list[str] = []
    for name in dict.fromkeys(name for record in flat.values() for name in record):
        if len({repr(record.get(name)) for record in flat.values()}) > 1:
            changed.append(name)  # noqa: PERF401 - longer as one expression
    if "files" in changed and "fingerprint" in changed:
        changed.remove("fingerprint")  # it follows from the other
    values = "; ".join(
        f"{name}={_by_value({rank: record.get(name) for rank, record in flat.items()})}"
        for name in changed
    )
    remedies = " ".join(_REMEDIES.get(name) or _OTHER_REMEDY.format(name) for name in changed)
    return (
        f"The ranks are about to read {_paths(records)} differently, so files would be repeated "
        f"and left out: {values}. {remedies} (A loader that some ranks alone iterate over counts "
        f"as the same rank's next one; {SKIP_VARIABLE}=1 turns this check off.)"
    )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as one table; of several sources, those values that differ between them in a row."""
    names = dict.fromkeys(name for source in record["sources"] for name in source)
    table = {name: [source.get(name) for source in record["sources"]] for name in names}
    flat = {name: row[0] if len(row) == 1 else row for name, row in table.items()}
    return {**flat, "num_workers": record["num_workers"], "epoch": record["epoch"]}


def _by_value(values: Mapping[int, Any]) -> str:
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


def _paths(records: Mapping[int, Mapping[str, Any]]) -> str:
    first = next(iter(records.values()))
    return ", ".join(source["path"] for source in first["sources"])
