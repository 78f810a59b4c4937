"""What the demo's step logs say: the chain of steps that count, the verdicts, a table, a plot.

A run is one or more starts of the training script. Of each start but the last, the steps up to
the one that the next start resumed from count; the steps after it were done again, and must have
come out the same. See ``step_log.py`` for the lines.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The sizes of the demo."""

    train_files: int
    val_files: int
    epochs: int
    ranks: int
    batch_size: int
    save_every: int

    @property
    def steps_per_epoch(self) -> int:
        return self.train_files // (self.ranks * self.batch_size)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs


class Verdict(NamedTuple):
    """One promise, whether it was kept, and by what that was seen."""

    name: str
    passed: bool
    seen: str


class StartLog:
    """The lines that the ranks of one start have written so far."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.ranks: dict[int, list[Record]] = {0: [], 1: []}
        self._offsets = {0: 0, 1: 0}

    def read(self) -> None:
        """Reads what was added since the last call; a line not yet complete is left for later."""
        for rank, records in self.ranks.items():
            try:
                with open(f"{self.directory}/rank{rank}.jsonl", "rb") as log:
                    log.seek(self._offsets[rank])
                    added = log.read()
            except FileNotFoundError:
                continue
            whole = added[: added.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            records.extend(json.loads(line) for line in whole.splitlines())

    def last_step(self) -> int:
        """The last step that any rank has done; before that, the step resumed from."""
        return max(
            (r["step"] for rank in self.ranks.values() for r in rank if "step" in r), default=0
        )

    def kind(self, kind: str, rank: int) -> list[Record]:
        return [record for record in self.ranks[rank] if record["kind"] == kind]

    def began_at(self) -> int:
        """The global step that this start went on from; 0 for a fresh one."""
        steps = {start["step"] for rank in self.ranks for start in self.kind("start", rank)}
        if len(steps) != 1:
            raise ValueError(f"ranks of {self.directory} began at different steps: {steps}")
        return int(steps.pop())

    def resumed_from(self) -> str | None:
        resumed: str | None = self.kind("start", 0)[0]["resumed_from"]
        return resumed

    def stalls(self) -> list[float]:
        return [save["stall_s"] for rank in self.ranks for save in self.kind("save", rank)]

    def waits(self) -> list[float]:
        return [step["wait_s"] for rank in self.ranks for step in self.kind("step", rank)]


@dataclass
class RunLog:
    """A training run: its starts, where each was killed, what each should go on from."""

    starts: list[StartLog]
    killed: list[str | None]
    expected: list[str | None]

    @cached_property
    def chain(self) -> dict[tuple[int, int], Record]:
        """The records that count, by (rank, step)."""
        found: dict[tuple[int, int], Record] = {}
        for start in self.starts:  # a later start overwrites what it did again
            for rank in start.ranks:
                found.update({(rank, step["step"]): step for step in start.kind("step", rank)})
        return found

    def done_again(self) -> list[tuple[Record, Record]]:
        """Pairs of records of one rank and step, from two starts."""
        seen: dict[tuple[int, int], Record] = {}
        pairs = []
        for start in self.starts:
            for rank in start.ranks:
                for step in start.kind("step", rank):
                    key = (rank, step["step"])
                    if key in seen:
                        pairs.append((seen[key], step))
                    seen[key] = step
        return pairs

    def accuracy(self) -> float:
        """Share of the held-out files recognised in the last validation, each file counted once."""
        hits = self.last_validation()
        return sum(hits.values()) / max(len(hits), 1)

    def last_validation(self) -> dict[str, bool]:
        last = self.starts[-1]
        records = [val for rank in last.ranks for val in last.kind("val", rank)]
        epoch = max((val["epoch"] for val in records), default=0)
        return {
            name: hit
            for val in records
            if val["epoch"] == epoch
            for name, hit in zip(val["files"], val["hits"], strict=True)
        }


def same(one: Record, other: Record) -> bool:
    """Whether two records are of the same batch and the same loss, bit for bit."""
    return all(one[field] == other[field] for field in ("step", "epoch", "files", "loss"))


def image_names(folder: str) -> set[str]:
    return {
        f"{label}/{name}"
        for label in os.listdir(folder)
        for name in os.listdir(f"{folder}/{label}")
    }


def each_file_once(plan: Plan, run: RunLog, files: set[str]) -> tuple[bool, str]:
    for epoch in range(plan.epochs):
        counts = Counter(n for r in run.chain.values() if r["epoch"] == epoch for n in r["files"])
        if counts != Counter(files):
            missed, twice = len(files - counts.keys()), sum(n > 1 for n in counts.values())
            return False, f"epoch {epoch}: {missed} files missed, {twice} seen more than once"
    return True, f"{plan.epochs} epochs of {len(files):,} files"


def same_steps(plan: Plan, one: RunLog, other: RunLog) -> tuple[bool, str]:
    wanted = {(rank, step + 1) for rank in range(plan.ranks) for step in range(plan.steps)}
    if one.chain.keys() != wanted or other.chain.keys() != wanted:
        return False, f"{len(one.chain)} and {len(other.chain)} lines, {len(wanted)} wanted"
    different = sorted({s for r, s in wanted if not same(one.chain[r, s], other.chain[r, s])})
    if different:
        return False, f"{len(different)} of {plan.steps} steps differ, the first is {different[0]}"
    return True, f"{plan.steps} steps on {plan.ranks} ranks"


def same_when_repeated(run: RunLog) -> tuple[bool, str]:
    pairs = run.done_again()
    different = sorted({old["step"] for old, new in pairs if not same(old, new)})
    steps = len({old["step"] for old, _ in pairs})
    return bool(pairs) and not different, f"{steps} steps done again, {len(different)} differ"


def resumed_from_newest(run: RunLog) -> tuple[bool, str]:
    got = [start.resumed_from() for start in run.starts]
    steps = [start.began_at() for start in run.starts]
    return got == run.expected and all(steps[1:]), " then ".join(f"step {s}" for s in steps[1:])


def same_final_state(plan: Plan, one: RunLog, other: RunLog) -> tuple[bool, str]:
    """Compares weights and Adam state of both runs' ranks as bytes."""
    import torch

    def tensors(value: Any, path: str = "") -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            return {path: (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())}
        if isinstance(value, dict):
            value = value.items()
        elif isinstance(value, list | tuple):
            value = enumerate(value)
        else:
            return {path: value}
        return {k: v for key, part in value for k, v in tensors(part, f"{path}/{key}").items()}

    states = [
        tensors(torch.load(f"{run.starts[-1].directory}/final-rank{rank}.pt", weights_only=True))
        for run in (one, other)
        for rank in range(plan.ranks)
    ]
    different = {k for state in states for k in state.keys() | states[0].keys()
                 if state.get(k) != states[0].get(k)}  # fmt: skip
    moments = sum("/exp_avg" in key for key in states[0])
    if different or not moments:
        return False, f"{len(different)} entries differ, e.g. {sorted(different)[:3]}"
    weights = sum(key.startswith("/model") for key in states[0])
    return True, f"{weights} weight tensors, {moments} moments, on each rank"


def learned(run: RunLog, files: set[str]) -> tuple[bool, str]:
    seen = run.last_validation()
    share = run.accuracy()
    return seen.keys() == files and share > 0.95, f"{share:.1%} of {len(seen)} held-out digits"


def report(plan: Plan, whole: RunLog, interrupted: RunLog, images: str) -> list[Verdict]:
    """Prints the table and the verdicts, and gives the verdicts."""
    train, val = image_names(f"{images}/train"), image_names(f"{images}/val")
    verdicts = [
        Verdict("each file once per epoch, undisturbed", *each_file_once(plan, whole, train)),
        Verdict(
            "each file once per epoch, killed twice", *each_file_once(plan, interrupted, train)
        ),
        Verdict("same batch and loss at every step", *same_steps(plan, whole, interrupted)),
        Verdict("steps done again came out the same", *same_when_repeated(interrupted)),
        Verdict("resumed from the newest complete save", *resumed_from_newest(interrupted)),
        Verdict("same final weights and Adam moments", *same_final_state(plan, whole, interrupted)),
        Verdict("over 95% right on held-out digits", *learned(interrupted, val)),
    ]
    print_table(whole, interrupted)
    for name, passed, seen in verdicts:
        print(f"{'PASS' if passed else 'FAIL'}  {name:<40} {seen}")
    return verdicts


def print_table(whole: RunLog, interrupted: RunLog) -> None:
    head = ("start", "steps", "resumed from", "saves", "stall per save", "data wait", "ended by")
    rows = [head, _row("uninterrupted", whole.starts[0], None)]
    for number, start in enumerate(interrupted.starts):
        rows.append(_row(f"start {number + 1} of 3", start, interrupted.killed[number]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    print()
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print("\nStall and data wait: milliseconds, median (longest); waits per step, all ranks.\n")


def _row(name: str, start: StartLog, killed: str | None) -> tuple[str, ...]:
    resumed = start.resumed_from()
    return (
        name,
        f"{start.began_at() + 1}-{start.last_step()}",
        "-" if resumed is None else resumed.rsplit("/", 1)[-1],
        str(len(start.kind("save", 0))),
        _milliseconds(start.stalls()),
        _milliseconds(start.waits()),
        "its end" if killed is None else f"SIGKILL: {killed}",
    )


def _milliseconds(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.1f} ({max(seconds) * 1e3:.0f})" if seconds else "-"


def draw(plan: Plan, whole: RunLog, interrupted: RunLog, path: str) -> None:
    """Draws rank 0's loss over the steps of both runs, kills and resumes marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), constrained_layout=True)
    axes.plot(*_losses(whole.starts[0]), color="0.75", linewidth=5, label="uninterrupted")
    for number, start in enumerate(interrupted.starts, 1):
        axes.plot(*_losses(start), linewidth=1.3, label=f"start {number}")
        if start.began_at():
            axes.axvline(start.began_at(), color="tab:green", linestyle=":")
            axes.text(start.began_at(), 0.97, "resume ", ha="right", va="top", rotation=90,
                      color="tab:green", transform=axes.get_xaxis_transform())  # fmt: skip
        if interrupted.killed[number - 1]:
            axes.axvline(start.last_step(), color="tab:red", linestyle="--")
            axes.text(start.last_step(), 0.97, " SIGKILL", ha="left", va="top", rotation=90,
                      color="tab:red", transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set(xlabel="step", ylabel="loss of rank 0", xlim=(0, plan.steps))
    axes.legend(loc="upper center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _losses(start: StartLog) -> tuple[list[int], list[float]]:
    steps = start.kind("step", 0)
    return [step["step"] for step in steps], [float.fromhex(step["loss"]) for step in steps]
