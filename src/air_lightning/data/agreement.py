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
    an error       rank 0 raises it last, for its store mostly ends with it

Who meets whom: the training loaders of all ranks (``equal_batches``) over one path, whatever their
options, and otherwise loaders of the same options, so that an evaluation on one rank alone meets
nobody. The key counts how many loaders of such a name this process has begun; one that met nobody
is withdrawn when the next one begins. Where all ranks have loaders over a path that meet nobody
and differ in options, that is a warning. A store that fails is no reason to stop: then nothing is
checked.
"""

import hashlib
import json
import logging
import os
import time
import warnings
from collections import Counter
from typing import Any, NoReturn

from torch.utils.data import Dataset

from air_lightning.data.board import Board, default_store
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.differences import SKIP_VARIABLE, Records, by_value, difference, paths
from air_lightning.data.progress import Position
from air_lightning.data.stream import current_rank
from air_lightning.errors import RankMismatchError

_logger = logging.getLogger("air_lightning")

_LOOK_EVERY_S = 1.0
_OF_THE_LIST = ("files", "fingerprint")

_begun: Counter[str] = Counter()
_latest: "dict[str, Agreement]" = {}
_alone: set[str] = set()  # paths at which this process waited in vain


def agree(
    dataset: Any, *, num_workers: int, position: Position, batches: int | None, strict: bool
) -> "Agreement | None":
    """Publish what this rank is about to read; None where there is nothing to agree on.

    Args:
        dataset: The loader's dataset, which is or holds some of files.
        num_workers: Of the loader.
        position: Where the pass begins.
        batches: How many this pass has; None where that is not known.
        strict: Whether other numbers of batches, or other options, are an error; a warning
            otherwise.
    """
    rank, world_size = current_rank()
    sources = _sources(dataset) if world_size > 1 else []
    store = default_store() if sources and not os.environ.get(SKIP_VARIABLE) else None
    if store is None:
        return None
    order = {"sources": sources, "num_workers": num_workers, "epoch": position.epoch}
    path = _hash([[source["path"], source["pattern"]] for source in sources])
    name = _hash([path, "training"] if strict else [path, _options(order)])
    if name not in _latest or not _latest[name].withdraw():
        _begun[name] += 1
    # A training loader is waited for anew, whoever evaluated alone before.
    key = f"{path} training" if strict else path
    facts = {"start": _start(position), "alone": key in _alone}
    board = Board(store, f"air_agreement/{name}/{_begun[name]}", rank, world_size)
    crowd = None if strict else Board(store, f"air_agreement/{path}", rank, world_size)
    agreement = Agreement(board, order, batches, strict=strict, facts=facts, crowd=crowd, key=key)
    _latest[name] = agreement
    return agreement if agreement.publish() else None


class Agreement:
    """One rank's side of it.

    Args:
        board: Where the ranks publish.
        order: What must be the same on all ranks.
        batches: What should be.
        strict: Whether other numbers of batches are an error.
        facts: What explains a difference.
        crowd: Where the ranks tell of all their loaders over the path.
        key: By which it is remembered that others were waited for in vain.

    Attributes:
        settled: Whether there is nothing left to check.
        refused: Whether the ranks did not agree.
    """

    def __init__(
        self,
        board: "Board",
        order: dict[str, Any],
        batches: int | None,
        *,
        strict: bool,
        facts: dict[str, Any] | None = None,
        crowd: "Board | None" = None,
        key: str = "",
    ) -> None:
        self._board = board
        self._order = order
        self._batches = batches
        self._strict = strict
        self._facts = facts or {}
        self._crowd = crowd
        self._key = key
        self._next_look: float | None = None
        self.settled = self.refused = self._told = False

    def publish(self) -> bool:
        """Publish this rank's record; whether the store took it."""
        record = {**self._order, **self._facts, "batches": self._batches}
        try:
            if self._crowd is not None:
                self._crowd.publish({**record, "open": True}, (), total="open")
            self._board.publish(record, self._digests())
        except Exception as error:  # noqa: BLE001 - the store's own, of any kind
            self._give_up(error)
        return not self.settled

    def withdraw(self) -> bool:
        """Take the record back if others were looked for in vain; whether its place is free."""
        if self.settled or self._next_look is None:
            return False
        self.settled = True
        try:
            if self._crowd is not None:
                self._leave(self._crowd)
            return self._board.withdraw(self._digests())
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return True  # of a process group that is no more, and so is the record

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
            same = [self._board.all_have(digest) for digest in self._digests() if self.settled]
            records = {} if all(same) else self._board.records()
            unlike = self._look_around()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return
        if unlike:
            self._tell_unlike(unlike)
        if records:
            self._judge(records, same_order=same[0])

    def _digests(self) -> tuple[str, str]:
        return _hash(self._order), _hash(["batches", self._batches])

    def _all_here(self, *, last: bool) -> bool:
        now = time.monotonic()
        if self._next_look is None and self._key not in _alone:
            here = self._board.wait_for_all()
            if not here:
                _alone.add(self._key)
        elif self._next_look is None or last or now >= self._next_look:
            here = self._board.all_here()
        else:
            return False
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        return here

    def _look_around(self) -> Records:
        """The records of loaders that meet nobody, once, if all ranks have one."""
        if self._crowd is None or self._told:
            return {}
        if self.settled:
            self._leave(self._crowd)
            return {}
        records = self._crowd.records(wait=False) if self._crowd.all_here("open") else {}
        self._told = len({_hash(_options(record)) for record in records.values()}) > 1
        return records if self._told else {}

    def _leave(self, crowd: Board) -> None:
        crowd.publish({"open": False}, (), total="open", count=-1)

    def _judge(self, records: Records, *, same_order: bool) -> None:
        if not same_order and _explained(records):
            return
        if not same_order:
            self._refuse(difference(records))
        batches = by_value({rank: record["batches"] for rank, record in records.items()})
        message = (
            f"The ranks have different numbers of batches of {paths(records)} in this pass: "
            f"{batches}. A training step that waits for all ranks waits for ever once the first "
            'runs out. Use uneven="pad" (or "drop") and the same batch_size= on all ranks.'
        )
        if self._strict:
            self._refuse(message)
        warnings.warn(message, stacklevel=4)

    def _refuse(self, message: str) -> NoReturn:
        self.refused = True
        try:
            self._board.wait_for_readers()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
        raise RankMismatchError(message)

    def _tell_unlike(self, records: Records) -> None:
        text = difference({rank: {**r, "epoch": 0} for rank, r in records.items()})
        warnings.warn(
            f"{text} This is harmless only if these are different loaders, which each rank "
            "iterates over at another time.",
            stacklevel=4,
        )

    def _give_up(self, error: Exception) -> None:
        self.settled = True
        _logger.debug("Whether the ranks read the same files is not checked: %s", error)


def _sources(dataset: Any, depth: int = 3) -> list[dict[str, Any]]:
    """The identities of the datasets of files that a dataset is, or holds."""
    if isinstance(dataset, UCVolumeDataset):
        return [dataset.identity()]
    held = vars(dataset).values() if depth and isinstance(dataset, Dataset) else ()
    return [source for value in held for source in _sources(value, depth - 1)]


def _options(record: Any) -> list[Any]:
    """What the arguments of a loader and its datasets say, whatever files there are."""
    sources = [
        {name: value for name, value in source.items() if name not in _OF_THE_LIST}
        for source in record["sources"]
    ]
    return [sources, record["num_workers"]]


def _start(position: Position) -> str:
    if position.begun:
        return "begun"
    return "fresh" if position.loaded is None else "loaded"


def _explained(records: Records) -> bool:
    """Whether only the epochs differ, as they may."""
    if len({_hash([r["sources"], r["num_workers"]]) for r in records.values()}) > 1:
        return False
    if any(record.get("alone") for record in records.values()):
        return True  # a rank that went on alone may be in a later pass
    # A rank that had finished its epoch when a checkpoint was taken is at the start of the next.
    under_way = min(record["epoch"] for record in records.values())
    places = {(record["epoch"] - under_way, record.get("start")) for record in records.values()}
    return places <= {(0, "begun"), (1, "loaded")}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()
