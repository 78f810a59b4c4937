"""What ranks leave for each other in the store belongs to one start of the job."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from air_lightning.data.board import Board, default_store


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What torchrun tells the ranks of one node, to which it gives its own store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield monkeypatch
    dist.destroy_process_group()


def test_a_restart_finds_nothing_of_the_start_before(agent: pytest.MonkeyPatch) -> None:
    """In the store of an agent, each start has keys of its own."""
    Board(default_store(), "key", 0, 1).publish({}, ())
    assert Board(default_store(), "key", 0, 1).all_here()
    agent.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not Board(default_store(), "key", 0, 1).all_here()


def test_starts_that_cannot_be_told_apart_have_no_store(agent: pytest.MonkeyPatch) -> None:
    """Agents of several nodes count each for itself; without restarts that is no matter."""
    agent.setenv("GROUP_WORLD_SIZE", "2")
    assert default_store() is None
    agent.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert default_store() is not None
    agent.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    agent.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert default_store() is not None
