"""Whatever starts the ranks: one is killed, the job is started again, and nothing is lost."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from lightning.fabric import cli
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parents[1] / "fuse"))

from slow_mount import slow_mount

from air_lightning import list_checkpoints
from air_lightning.data.board import group_store
from integration import launched
from integration.launched import CACHE_VARIABLE, Job
from integration.training import assert_same, diary, result
from ranks import TERMINATED, free_port, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FILES = 22  # not a multiple of the batch size times ranks times workers
SCRIPT = str(Path(launched.__file__))
# Else restarted ranks find addresses of killed ones in the store that torchrun's agent keeps.
FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PACKAGES = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of small numbered text files, as a URL: one for all tests here."""
    directory = tmp_path_factory.mktemp("numbers")
    for number in range(FILES):
        (directory / f"{number:03d}.txt").write_text(str(number))
    return f"file://{directory}"


@pytest.fixture(scope="module")
def whole(numbers: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that nobody disturbs: two ranks."""
    job = Job(numbers, str(tmp_path_factory.mktemp("whole")))
    statuses = run_ranks(launched.start, job, world_size=2, log=f"{job.directory}/log")
    assert statuses == [0, 0], Path(job.directory, "log").read_text()[-4000:]
    return job


@pytest.fixture
def job(numbers: str, tmp_path: Path) -> Job:
    """The same run, in which rank 1 is killed once."""
    (tmp_path / "job").mkdir()
    return Job(numbers, str(tmp_path / "job"), kill_rank=1)


def once(function: Callable[..., Any], *args: Any, log: Path) -> int:
    """One start by a launcher, in a process of its own; gives its exit status."""
    (status,) = run_ranks(_at_a_port, free_port(), function, *args, log=log)
    return status


def _at_a_port(port: int, function: Callable[..., Any], *args: Any) -> None:
    # Lightning would take one that is free for a moment only.
    os.environ["MASTER_PORT"] = str(port)
    function(*args)


def assert_was_not_disturbed(job: Job, whole: Job) -> None:
    """What all ranks trained on, and what they ended with, is what it is without the kill."""
    assert os.path.exists(f"{job.directory}/killed")
    assert diary(job.run) == diary(whole.run)
    for rank in range(job.run.world_size):
        assert_same(result(job.run, rank), result(whole.run, rank))
    assert all(record.valid for record in list_checkpoints(job.checkpoints))


def assert_fails_then_ends(start: Callable[..., Any], job: Job, log: Path) -> None:
    """The start in which a rank is killed fails, and the next one comes to the end."""
    assert once(start, job, log=log) != 0
    assert os.path.exists(f"{job.directory}/killed"), log.read_text()[-6000:]
    assert once(start, job, log=log) == 0, log.read_text()[-6000:]


def by_torchrun(job: Job) -> None:
    os.environ.update(FRESH_STORES, PYTHONPATH=PACKAGES)
    options = ["--standalone", f"--nproc-per-node={job.devices}", "--max-restarts=1"]
    torchrun.main([*options, SCRIPT, job.as_json()])


def test_torchrun_restarts_the_ranks(job: Job, whole: Job, tmp_path: Path) -> None:
    """A killed rank costs torchrun one restart of all, which goes on exactly."""
    log = tmp_path / "log"
    assert once(by_torchrun, job, log=log) == 0, log.read_text()[-6000:]
    assert_was_not_disturbed(job, whole)


def leave_behind(job: Job, kept: str) -> None:
    """A start under an agent that keeps the store: what is in it at the end goes to a file."""
    store = restarted(0)
    try:
        launched.start(job)
    finally:
        if os.environ["RANK"] == "0" and hasattr(store, "list_keys"):  # torch 2.6 has not
            keys = [key for key in store.list_keys() if key.startswith("air_")]
            Path(kept).write_text(json.dumps({key: store.get(key).decode() for key in keys}))


def find_left_behind(job: Job, kept: str) -> None:
    """The next start, in whose store it all is."""
    store = restarted(1)
    if os.environ["RANK"] == "0" and os.path.exists(kept):
        for key, value in json.loads(Path(kept).read_text()).items():
            store.set(key, value)
    dist.barrier()
    launched.start(job)


def restarted(count: int) -> Any:
    """Join the ranks, as after so many restarts; gives the store."""
    dist.init_process_group("gloo")
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_MAX_RESTARTS="3",
        TORCHELASTIC_RESTART_COUNT=str(count),
        GROUP_WORLD_SIZE="1",
    )
    return group_store()


def test_what_an_earlier_start_left_in_the_store(job: Job, whole: Job, tmp_path: Path) -> None:
    """A restart in an agent's store obeys no signal, and believes no order, of the start before."""
    job = replace(job, kill_rank=0, kill_with=signal.SIGTERM)
    log, kept = tmp_path / "log", str(tmp_path / "kept.json")
    first = run_ranks(leave_behind, job, kept, world_size=2, log=log)
    assert set(first) == {TERMINATED}, log.read_text()[-6000:]
    again = run_ranks(find_left_behind, job, kept, world_size=2, log=log)
    assert again == [0, 0], log.read_text()[-6000:]
    assert_was_not_disturbed(job, whole)


def by_itself(job: Job) -> None:
    """As a user starts a script whose Trainer starts the other ranks."""
    os.execve(
        sys.executable,
        [sys.executable, SCRIPT, job.as_json()],
        {**os.environ, "PYTHONPATH": PACKAGES},
    )


def test_ranks_that_the_trainer_starts(job: Job, whole: Job, tmp_path: Path) -> None:
    """Under ddp a script starts its own other ranks; started twice, it goes on exactly."""
    assert_fails_then_ends(by_itself, job, tmp_path / "log")
    assert_was_not_disturbed(job, whole)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_ranks_that_live_in_fit_alone(job: Job, whole: Job, tmp_path: Path, strategy: str) -> None:
    """Spawned or forked, they go on exactly, and the process that started them gets the weights."""
    job = replace(job, strategy=strategy)
    assert_fails_then_ends(launched.start, job, tmp_path / "log")
    assert_was_not_disturbed(job, whole)
    weights = torch.load(f"{job.directory}/parent-0.pt", weights_only=True)
    assert_same(weights, result(whole.run)["model"])


def slurm_task(job: Job, port: int) -> None:
    """One task that srun starts; it has its own idea of which rank it is."""
    rank = os.environ.pop("RANK")
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(
        MASTER_PORT=str(port),
        SLURM_JOB_ID="4711",
        SLURM_STEP_ID="0",
        SLURM_JOB_NAME="train",
        SLURM_NNODES="1",
        SLURM_NODELIST="127.0.0.1",
        SLURM_NTASKS=str(job.devices),
        SLURM_NTASKS_PER_NODE=str(job.devices),
        SLURM_NODEID="0",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
    )
    launched.start(job)


def test_tasks_of_slurm(job: Job, whole: Job, tmp_path: Path) -> None:
    """Ranks that find nothing but SLURM's variables go on exactly."""
    log = tmp_path / "log"
    first = run_ranks(slurm_task, job, free_port(), world_size=2, log=log)
    assert 0 not in first
    again = run_ranks(slurm_task, job, free_port(), world_size=2, log=log)
    assert again == [0, 0], log.read_text()[-6000:]
    assert_was_not_disturbed(job, whole)


def as_rank_of_fabric_run(job: Job) -> None:
    """A rank that is there already, with what `fabric run` would say of it."""
    os.environ.update(LT_CLI_USED="1", LT_ACCELERATOR="cpu", LT_STRATEGY="ddp", LT_DEVICES="2")
    launched.start(job)


def by_fabric_run(job: Job) -> None:
    os.environ["PYTHONPATH"] = PACKAGES
    options = ["--accelerator=cpu", "--strategy=ddp", f"--devices={job.devices}"]
    options.append(f"--main-port={free_port()}")
    cli._main(["run", *options, SCRIPT, "--", job.as_json()], standalone_mode=False)


def test_fabric_run(job: Job, numbers: str, tmp_path: Path) -> None:
    """A loop of one's own under `fabric run`, started twice, goes on exactly."""
    job = replace(job, loop="fabric")
    whole = replace(job, directory=f"{tmp_path}/whole", kill_rank=None)
    statuses = run_ranks(as_rank_of_fabric_run, whole, world_size=2, log=tmp_path / "log")
    assert statuses == [0, 0], (tmp_path / "log").read_text()[-4000:]
    assert_fails_then_ends(by_fabric_run, job, tmp_path / "log")
    assert_was_not_disturbed(job, whole)


def as_node(job: Job, endpoint: str) -> None:
    """The agent of one node; its ranks are forked, and find what torchrun gives them."""
    node = int(os.environ["RANK"])
    os.environ.update(FRESH_STORES)
    os.environ[CACHE_VARIABLE] = f"{job.directory}/disk-{node}"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    config = LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.devices,
        run_id="two nodes",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={
            "is_host": node == 0,
            "last_call_timeout": 1,
            # Else an agent that gets no processor for 15 s is taken for one that is gone.
            "keep_alive_max_attempt": 100,
            "read_timeout": 300,
        },
        local_addr="127.0.0.1",
        max_restarts=1,
        start_method="fork",
    )
    elastic_launch(config, launched.start)(job)


def on_two_nodes(job: Job, log: Path) -> None:
    """One start by two agents, to its end."""
    endpoint = f"127.0.0.1:{free_port()}"
    statuses = run_ranks(as_node, job, endpoint, world_size=job.nodes, log=log)
    assert statuses == [0, 0], log.read_text()[-8000:]


@pytest.mark.fuse
def test_two_nodes(numbers: str, tmp_path: Path) -> None:
    """Two agents of two ranks: each node reads a file of the volume once; exact after a kill."""
    # Otherwise DDP lays gradients out anew after a start's first step, and the sum of four ranks'
    # gradients is made in another order in that step: its last bits are others.
    strategy = "ddp_find_unused_parameters_true"
    with slow_mount(numbers.removeprefix("file://")) as mount:
        whole = Job(f"file://{mount}", f"{tmp_path}/whole", nodes=2, strategy=strategy)
        Path(whole.directory).mkdir()
        on_two_nodes(whole, tmp_path / "log")
        opened = Counter(path for operation, path in mount.calls() if operation == "open")
        cached = Counter(path.name for path in Path(whole.directory).glob("disk-*/**/*.txt"))
        assert Counter(Path(path).name for path in opened.elements()) == cached
        assert len(cached) == FILES
        assert max(cached.values()) == 2
        job = replace(whole, directory=f"{tmp_path}/job", kill_rank=3)
        Path(job.directory).mkdir()
        on_two_nodes(job, tmp_path / "log")
    assert_was_not_disturbed(job, whole)
