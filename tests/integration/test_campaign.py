"""A short campaign of kills; ``python tests/campaign.py --kills 100`` is a long one."""

import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from campaign import Campaign
from campaign_kills import draw
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS, SEED = 12, 7


def test_twelve_kills_lose_nothing(tmp_path: Path) -> None:
    """Struck at moments that were drawn, trainings end as if they were not."""
    seed = int(os.environ.get("AIR_CAMPAIGN_SEED", SEED))
    log = tmp_path / "log"
    status = run_ranks(_campaign, seed, log=log, timeout_s=1100)
    told = log.read_text()
    assert status == [0], f"AIR_CAMPAIGN_SEED={seed} draws the same again.\n{told[-6000:]}"
    print(f"AIR_CAMPAIGN_SEED={seed}\n{told}")


def _campaign(seed: int) -> None:
    torch.set_num_threads(1)
    # Not tmp_path: workers make sockets in their TMPDIR, whose paths must not be long.
    with tempfile.TemporaryDirectory(prefix="c-") as directory:
        tally = Campaign(directory, seed, "ddp", signals=True).run(KILLS)
    print(tally.to_json())
    assert tally.kills == KILLS
    assert tally.moments.total() == KILLS


def test_a_seed_draws_the_same_again() -> None:
    """Moments and victims follow from the seed, and every kind of either is drawn."""
    first, second = (
        [draw(chance, 3.0, 2, signals=True) for _ in range(300)]
        for chance in (random.Random(5), random.Random(5))
    )
    assert first == second
    assert {moment.kind for moment, _ in first} == {
        *("time", "shard", "manifest", "marker", "directory", "deletion", "restore", "cache")
    }
    assert {blow.victim for _, blow in first} == {"group", "rank", "worker", "launcher"}
