"""A campaign of kills: two ranks train, are killed at random moments, and lose nothing.

    python tests/campaign.py --kills 100 --seed 7 [--strategy ddp|2x1] [--signals]

A *life* is one training: attempts are started and struck until one comes to its end. Then the next
life begins, until there were as many kills as were asked for. What is shown of each:

    after a kill   each checkpoint that counts as valid is whole (deep) and loads; the newest is no
                   older than before, and lags behind the training by the save in flight at most
    a restart      goes on from that newest one
    at the end     every batch of every rank is that of the uninterrupted run, each file once per
                   epoch; so are weights, moments, metrics, generators, best and last checkpoint
    leftovers      none in checkpoints, in temporary directories, caches and shared memory, but what
                   torch itself leaves there when a worker is killed

The seed decides on moments and victims; what a process does at a moment is up to the machine.
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from air_lightning import (
    AirCheckpointIO,
    find_latest_valid,
    list_checkpoints,
    prune_checkpoints,
    verify_checkpoint,
)
from campaign_kills import Blow, Moment, draw, run_to
from campaign_run import (
    EPOCHS,
    FILES,
    NUM_WORKERS,
    SAVE_EVERY,
    STEPS,
    TRAIN,
    VALIDATE,
    VALIDATION_FILES,
    WORLD_SIZE,
    Life,
    result,
    starts,
    timeline,
    train,
    validations,
)
from integration.training import assert_same

ENDED, PREEMPTED, STUCK = 0, 143, 254


@dataclass
class Tally:
    """What a campaign came to."""

    kills: int = 0
    lives: int = 0
    attempts: int = 0
    steps_again: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)  # in directories, after an attempt
    kept: Counter[str] = field(default_factory=Counter)  # beside those that should be, at the end

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self))


class Campaign:
    """Lives and kills below one directory.

    Args:
        directory: A new one.
        seed: Decides on moments and victims.
        strategy: Of all lives, as in ``integration.training``.
        signals: Whether half of the blows are SIGTERM.
        tell: Called with each line of what happens.
    """

    def __init__(
        self, directory: str, seed: int, strategy: str, *, signals: bool, tell: Any = print
    ) -> None:
        self._directory, self._strategy, self._signals = directory, strategy, signals
        self._tell = tell
        self._chance = random.Random(seed)
        self.tally = Tally()
        self._begun: Counter[tuple[Life, int]] = Counter()  # starts that were checked
        os.environ["AIR_VOLUMES_ROOT"] = f"{directory}/volumes"
        for path, count in ((TRAIN, FILES), (VALIDATE, VALIDATION_FILES)):
            local = Path(self._local(path))
            local.mkdir(parents=True)
            for number in range(count):
                (local / f"{number:03d}.txt").write_text(str(number))
        self._reference, self._usual_s = self._uninterrupted()

    def _local(self, path: str) -> str:
        return path.replace("/Volumes", os.environ["AIR_VOLUMES_ROOT"], 1)

    def _uninterrupted(self) -> tuple[Life, float]:
        life = self._life("reference", "/Volumes/main/default/reference", shares_cache=False)
        begun = time.monotonic()
        _, status = self._attempt(life, Moment("time"), None)
        assert status == ENDED, self._log(life)
        usual_s = time.monotonic() - begun
        for rank in range(WORLD_SIZE):
            batches, _ = timeline(life, rank)
            assert len(batches) == STEPS
        self._check_files(life)
        return life, usual_s

    def _life(self, name: str, checkpoints: str, *, shares_cache: bool) -> Life:
        life = Life(f"{self._directory}/{name}", checkpoints, self._strategy, shares_cache)
        os.makedirs(life.scratch)
        return life

    def _attempt(self, life: Life, moment: Moment, blow: Blow | None) -> tuple[bool, int | None]:
        roots = (self._local(life.checkpoints), life.scratch)
        Path(f"{life.directory}/log").write_text("")
        return run_to(moment, blow, lambda: train(life), WORLD_SIZE, roots, f"{life.directory}/log")

    def _log(self, life: Life) -> str:
        return Path(f"{life.directory}/log").read_text()[-6000:]

    def run(self, kills: int) -> Tally:
        """Kill until there were that many kills; raises AssertionError at the first fault."""
        while self.tally.kills < kills:
            self._live(kills)
        return self.tally

    def _live(self, kills: int) -> None:
        """One life, from its first start to its end."""
        number = self.tally.lives = self.tally.lives + 1
        on_volume = self._chance.random() < 0.5
        place = "/Volumes/main/default" if on_volume else f"{self._directory}/local"
        life = self._life(
            f"life-{number}", f"{place}/life-{number}", shares_cache=self._chance.random() < 0.5
        )
        self._tell(f"life {number}: checkpoints in {life.checkpoints}, cache {life.cache}")
        newest, before = 0, self.tally.kills
        shared_memory = set(os.listdir("/dev/shm"))
        while True:
            moment, blow = draw(self._chance, self._usual_s, WORLD_SIZE, signals=self._signals)
            asked = blow if self.tally.kills < kills else None
            begun = time.monotonic()
            struck, status = self._attempt(life, moment, asked)
            self.tally.attempts += 1
            self._count(moment, blow, struck=struck)
            newest = self._check_after(life, newest)
            what = f"{moment}: {blow}" if struck else "undisturbed"
            self._tell(
                f"  {time.monotonic() - begun:5.2f} s  {what} -> {status}; newest step {newest}"
            )
            assert status != STUCK, f"a rank did not end by itself; {self._log(life)}"
            if status == ENDED:
                break
            # The port was free when it was chosen, and another program took it.
            assert struck or "EADDRINUSE" in self._log(life), f"{status}: {self._log(life)}"
        self._check_end(life)
        self._check_shared_memory(shared_memory, self.tally.kills - before)
        shutil.rmtree(life.directory)
        shutil.rmtree(self._local(life.checkpoints))

    def _count(self, moment: Moment, blow: Blow, *, struck: bool) -> None:
        if struck:
            self.tally.kills += 1
            self.tally.moments[moment.kind] += 1
            self.tally.victims[f"{blow.victim} {blow.number}"] += 1

    def _check_after(self, life: Life, before: int) -> int:
        """Check what an attempt left; gives the step of the newest checkpoint, 0 for none."""
        records = list_checkpoints(life.checkpoints)
        for record in records:
            self.tally.left["whole" if record.valid else _remains(self._local(record.path))] += 1
            if record.valid:
                verify_checkpoint(record.path, deep=True)
                # Not load_checkpoint: of a path and its alternative that gives the newer one.
                loaded, _ = AirCheckpointIO(verify=True).read(record.path, None)
                assert loaded["global_step"] == record.step
                strays = _strays(self._local(record.path))
                assert not strays, f"{record.path} holds {strays}"
        path = find_latest_valid(life.checkpoints)
        newest = 0 if path is None else verify_checkpoint(path).step or 0
        assert newest >= before, f"step {before} was published, and the newest is {newest}"
        self._check_start(life, before)
        self._check_lag(life, newest)
        return newest

    def _check_start(self, life: Life, wanted: int) -> None:
        """The attempt, if it came to train, began at what was the newest then."""
        for rank in range(WORLD_SIZE):
            for start in starts(life, rank)[self._begun[life, rank] :]:
                assert start["step"] == wanted, f"step {wanted} was there, but it began {start}"
                self._begun[life, rank] += 1

    def _check_lag(self, life: Life, newest: int) -> None:
        """Of what was trained, only the save in flight and the steps after it may be lost."""
        for rank in range(WORLD_SIZE):
            batches, _ = timeline(life, rank)
            lag = len(batches) - newest
            assert lag < 3 * SAVE_EVERY, f"{len(batches)} steps, and the newest save is {newest}"

    def _check_end(self, life: Life) -> None:
        for rank in range(WORLD_SIZE):
            wanted, _ = timeline(self._reference, rank)
            batches, again = timeline(life, rank)
            assert batches == wanted
            assert validations(life, rank) == validations(self._reference, rank)
            assert_same(result(life, rank), result(self._reference, rank), f"rank {rank}: ")
            self.tally.steps_again += again
        self._check_counts(life)
        self._check_files(life)
        self._check_checkpoints(life)

    def _check_shared_memory(self, before: set[str], kills: int) -> None:
        """Nothing of a training is left there; of torch's own, no more than it was killed at.

        A worker that hands on a tensor makes a file, and unlinks it in the same call: one that is
        killed in between leaves it, with plain torch as well.
        """
        left = {name for name in set(os.listdir("/dev/shm")) - before if _is_left(name)}
        torchs = {name for name in left if name.startswith("torch_")}
        self.tally.left["tensor in shared memory"] += len(torchs)
        assert left == torchs, f"left in shared memory: {left}"
        assert len(torchs) <= kills, f"left in shared memory by {kills} kills: {left}"

    def _check_counts(self, life: Life) -> None:
        """Each file once per epoch, but for the padding."""
        epochs: dict[int, Counter[str]] = collections.defaultdict(Counter)
        for rank in range(WORLD_SIZE):
            for batch in timeline(life, rank)[0]:
                epochs[batch["epoch"]].update(batch["files"])
        padding = -FILES % (WORLD_SIZE * NUM_WORKERS)
        assert len(epochs) == EPOCHS
        for delivered in epochs.values():
            assert len(delivered) == FILES
            assert delivered.total() == FILES + padding
            assert max(delivered.values()) == 2

    def _check_checkpoints(self, life: Life) -> None:
        """Those of the uninterrupted run are there under their names; ``prune`` takes the others.

        Others: those that were saved on a signal, and of each kill between a publication and
        the deletion that follows it, the checkpoint that was to be deleted, or what is left of it.
        """
        kept = {Path(r.path).name for r in list_checkpoints(self._reference.checkpoints)}
        found = list_checkpoints(life.checkpoints)
        assert kept <= {Path(record.path).name for record in found if record.valid}
        for record in found:
            name = Path(record.path).name
            assert "-v" not in name, f"{name}: a name was taken by what a kill had left"
            if name not in kept:
                self.tally.kept["whole" if record.valid else "torn"] += 1
        prune_checkpoints(life.checkpoints, keep_last=len(kept))
        assert all(record.valid for record in list_checkpoints(life.checkpoints))

    def _check_files(self, life: Life) -> None:
        """Nothing temporary is left when a training has ended."""
        left = {name for name in os.listdir(life.scratch) if not _may_stay(life.scratch, name)}
        assert not left, f"left in the temporary directory: {left}"
        if life.cache is not None:
            parts = list(Path(life.cache).rglob("*.part"))
            assert not parts, f"left in the cache: {parts}"
            files = sorted(path.read_text() for path in Path(life.cache).rglob("*.txt"))
            assert files == sorted(map(str, [*range(FILES), *range(VALIDATION_FILES)]))


def _may_stay(scratch: str, name: str) -> bool:
    """Whether something in the temporary directory is no fault of ours."""
    if re.fullmatch(r"tmp\w{8}", name):
        # torch opens some such files to see whether more can be opened, when a worker has died.
        path = f"{scratch}/{name}"
        return os.path.isfile(path) and not os.path.getsize(path)
    if name.startswith("air-lightning-cache-"):
        # Killed between making it and owning it; the first start a minute later deletes it.
        return set(os.listdir(f"{scratch}/{name}")) <= {".owner.draft"}
    # Lists: there for good, each start clears it of what is an hour old. The other: sockets
    # through which Python itself hands on shared memory, of workers that were killed.
    return name == f"air-lightning-lists-{os.getuid()}" or name.startswith("pymp-")


def _remains(local: str) -> str:
    """What a directory that is no checkpoint is made of."""
    names = os.listdir(local)
    parts = [
        "shards" * any(name.endswith(".distcp") and name[0] != "." for name in names),
        "manifest" * ("air_manifest.json" in names),
        "marker" * (".metadata" in names),
        "temporary" * any(name.endswith(".tmp") for name in names),
    ]
    return "+".join(filter(None, parts)) or "empty"


def _strays(local: str) -> set[str]:
    """Files of a checkpoint's directory that its manifest does not name."""
    manifest = json.loads(Path(f"{local}/air_manifest.json").read_text())
    return set(os.listdir(local)) - {*manifest["files"], ".metadata", "air_manifest.json"}


def _is_left(name: str) -> bool:
    if name.startswith("torch_"):
        # Of the process of that number: one that still runs is another program's, at handing it on.
        return not os.path.exists(f"/proc/{name.split('_')[1]}")
    # Semaphores are unlinked where they are made; those seen here are of other programs.
    return name.startswith(("psm_", "air"))


def main() -> None:
    """Run a campaign from the command line; exit status 1 at the first fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--strategy", default="ddp", help="ddp, or 2x1 for ModelParallelStrategy")
    parser.add_argument("--signals", action="store_true", help="let half of the blows be SIGTERM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(f"seed {options.seed}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
        campaign = Campaign(directory, options.seed, options.strategy, signals=options.signals)
        tally = campaign.run(options.kills)
    print(tally.to_json())
    print(f"{tally.kills} kills in {time.monotonic() - begun:.0f} s: nothing lost, nothing twice")


if __name__ == "__main__":
    main()
