"""What the benchmarks share: turns, measures, and where they write.

Contenders take turns in each round, and none always comes first, so that whatever else the machine
does meets all of them. Before each turn Python's garbage is collected: else the collector would run
in the turn of whoever allocates next, and charge it with what the one before left.

``ratios`` are medians over the rounds of the ratio within a round; ``least`` compares the best of
all rounds of each, which is what the machine does when nothing disturbs it.
"""

import contextlib
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

TESTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests")
sys.path[:0] = [os.path.join(TESTS, "fuse"), TESTS]

from slow_mount import slow_mount  # noqa: E402 - found by the line above

PAGE = os.sysconf("SC_PAGE_SIZE")

Record = dict[str, float]
Rounds = dict[str, list[Any]]


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], Any]) -> Rounds:
    """Measure every contender once per round; returns what each measured, round by round."""
    found: Rounds = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            gc.collect()
            found[name].append(measure(name))
    return found


def timed(action: Callable[[], Any]) -> Record:
    """Seconds and CPU seconds of this process that an action takes."""
    began, used = time.perf_counter(), cpu()
    action()
    return {"s": time.perf_counter() - began, "cpu_s": cpu() - used}


def medians(found: Rounds) -> dict[str, Record]:
    """The median of each figure of each contender."""
    return {
        name: {key: round(median(r[key] for r in records), 4) for key in records[0]}
        for name, records in found.items()
    }


def compared(names: Sequence[str], rounds: int, measure: Callable[[str], Any], base: str) -> Any:
    """The medians of each contender, and their ratios to those of one."""
    found = medians(in_turns(names, rounds, measure))
    ratios = {
        name: {key: round(own[key] / to, 3) for key, to in found[base].items() if to}
        for name, own in found.items()
        if name != base
    }
    return {"contenders": found, "ratios": ratios}


def ratio(found: Rounds, ours: str, other: str, key: str = "s") -> float:
    """The median over the rounds of one contender's figure to another's."""
    pairs = zip(found[ours], found[other], strict=True)
    return round(median(a[key] / b[key] for a, b in pairs), 3)


def least(found: Rounds, ours: str, other: str, key: str = "s") -> float:
    """One contender's best figure to another's."""
    best = [min(record[key] for record in found[name]) for name in (ours, other)]
    return round(best[0] / best[1], 3)


def cpu() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@contextlib.contextmanager
def place(folder: str, fuse: bool) -> Iterator[str]:
    """The folder itself, or a mount of it on which each open takes 20 ms."""
    if not fuse:
        yield folder
        return
    with slow_mount(folder, open_delay_s=0.02) as mount:
        yield str(mount)
