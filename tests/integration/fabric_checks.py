"""What a Fabric with the plugin does, one function each; run in ranks that are forked once."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from air_lightning import (
    AirCheckpointIO,
    CheckpointError,
    CheckpointMismatchError,
    InvalidTypeError,
    SaveFailedError,
    StateError,
    UCVolumeWriter,
    UnsafeCheckpointError,
    list_checkpoints,
    verify_checkpoint,
)
from air_lightning.data.stream import data_rank
from air_lightning.integrations.fabric_entry import AirAttachFabric
from integration.fabric_loop import FEATURES, Loop, build, fabric_of, loader_of, weights_and_moments
from integration.training import assert_same, whole

STRATEGIES = ["ddp", "2x1", "1x2", "fsdp1"]


class Job:
    """One Fabric with a model and an optimizer that took two steps."""

    def __init__(
        self, strategy: str, *, attach: bool = True, seed: int = 3, **options: Any
    ) -> None:
        self.fabric = fabric_of(strategy, dist_world(), **options)
        self.plugin = AirCheckpointIO(timeout_s=300)
        if attach:
            self.plugin.attach(self.fabric)
        self.fabric.launch()
        torch.manual_seed(seed)
        self.model = self.fabric.setup_module(build())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        for _ in range(2):
            self.fabric.backward(self.model(torch.ones(2, FEATURES)).sum())
            self.optimizer.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def save(self, path: str, **options: Any) -> None:
        """Save, and wait until it is published."""
        self.fabric.save(path, self.state, **options)
        self.plugin.wait()

    def all(self) -> Any:
        """Whole weights and moments."""
        return copy.deepcopy(weights_and_moments(self.fabric, self.model, self.optimizer))


def dist_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def barriers() -> Iterator[None]:
    """Nothing of a check begins before, or goes on after, another rank's."""
    dist.barrier()
    yield
    dist.barrier()


def checkpoints_move_between_strategies(root: str) -> None:
    """What one strategy saved, every other one loads, bit for bit."""
    saved = {}
    for kind in STRATEGIES:
        job = Job(kind)
        job.save(f"{root}/{kind}")
        saved[kind] = job.all()
    for source in STRATEGIES:
        for kind in STRATEGIES:
            job = Job(kind, seed=4)
            assert job.fabric.load(f"{root}/{source}", job.state) == {}
            if dist.get_rank() == 0:
                assert_same(job.all(), saved[source], f"{source} under {kind}")
            else:
                job.all()


def every_rank_writes(root: str) -> None:
    """Under DDP the ranks share the writing, and the plugin line alone is enough for it."""
    plugin = AirCheckpointIO()
    fabric = fabric_of("ddp", 2, plugins=[plugin], callbacks=[AirAttachFabric()])
    fabric.launch()
    model, optimizer = build(), None
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    fabric.save(f"{root}/line", {"model": model, "optimizer": optimizer})
    plugin.wait()
    Job("ddp").save(f"{root}/attached")
    for name in ("line", "attached"):
        names = os.listdir(f"{root}/{name}")
        assert {shard.split("_")[2] for shard in names if shard.endswith(".distcp")} == {"0", "1"}
        assert verify_checkpoint(f"{root}/{name}", deep=True).world_size == 2


def without_attach_rank_zero_writes(root: str) -> None:
    """Unattached, rank 0 alone writes a checkpoint, which an attached Fabric loads."""
    plugin = AirCheckpointIO()
    fabric = fabric_of("ddp", 2, plugins=[plugin])
    fabric.launch()
    model = fabric.setup_module(build())
    torch.manual_seed(9)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, FEATURES)).sum())
    optimizer.step()
    fabric.save(f"{root}/alone", {"model": model, "optimizer": optimizer, "step": 5})
    plugin.wait()
    dist.barrier()
    assert verify_checkpoint(f"{root}/alone").step == 5
    wanted = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    again = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(f"{root}/alone", again)
    assert_same((dict(model.state_dict()), optimizer.state_dict()), wanted)
    for kind in STRATEGIES:
        job = Job(kind)
        state = {**job.state, "step": 0}
        job.fabric.load(f"{root}/alone", state)
        assert state["step"] == 5
        if dist.get_rank() == 0:
            assert_same(job.all()[1]["state"], wanted[1]["state"], kind)
        else:
            job.all()


def filters_and_strictness(root: str) -> None:
    """A filter leaves entries out, which then takes strict=False; a refusal changes nothing."""
    for kind in ("ddp", "2x1", "fsdp1"):
        job = Job(kind)
        job.save(f"{root}/{kind}", filter={"model": lambda name, _: "bias" not in name})
        saved = job.all()[0]
        other = Job(kind, seed=4)
        before = other.all()
        with pytest.raises(CheckpointMismatchError, match="missing in the checkpoint: 0.bias"):
            other.fabric.load(f"{root}/{kind}", other.state)
        with pytest.raises(CheckpointMismatchError, match="nothing under 'scheduler'"):
            other.fabric.load(f"{root}/{kind}", {"scheduler": 1})
        with pytest.raises(CheckpointMismatchError, match="parameters per group"):
            few = torch.optim.AdamW([next(iter(other.model.parameters()))])
            other.fabric.load(f"{root}/{kind}", {"optimizer": few})
        assert_same(other.all(), before)
        other.fabric.load(f"{root}/{kind}", {"model": other.model}, strict=False)
        mixed = {name: (before[0] if "bias" in name else saved)[name] for name in before[0]}
        assert_same(other.all()[0], mixed)


def values_come_back(root: str) -> None:
    """Values, nested tensors, schedulers and sharded averages come back; the rest is returned."""
    for kind in ("ddp", "2x1"):
        job = Job(kind)
        scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
        scheduler.step()
        average = {name: value * 2 for name, value in job.model.state_dict().items()}
        job.state |= {"scheduler": scheduler, "average": average, "step": 7, "epoch": 2}
        job.state |= {"history": {"losses": [1.5, torch.ones(3)], 3: ("a", None)}, "extra": [1]}
        job.save(f"{root}/{kind}")
        record = verify_checkpoint(f"{root}/{kind}")
        assert (record.step, record.epoch) == (7, 2)
        other = torch.optim.lr_scheduler.StepLR(Job(kind).optimizer, 1, 0.5)
        zeros = {name: value * 0 for name, value in average.items()}
        wanted = {"scheduler": other, "average": zeros, "step": 0, "history": None}
        left = job.fabric.load(f"{root}/{kind}", wanted)
        assert other.state_dict() == scheduler.state_dict()
        assert wanted["step"] == 7
        assert wanted["history"][3] == ("a", None)
        assert torch.equal(wanted["history"]["losses"][1], torch.ones(3))
        assert_same(whole(wanted["average"]), whole(average))
        assert (left["epoch"], left["extra"]) == (2, [1])
        assert ("model" in left) == (kind == "ddp")  # sharded ones are read by who asks for them


def raw_weights(root: str) -> None:
    """load_raw takes files, directories of ours and others'; Lightning's Fabric files load too."""
    wanted = {name: torch.randn_like(value) for name, value in shared_weights().items()}
    alone = dist.new_group([0])  # older torch knows no other way to save alone among ranks
    with barriers():
        if dist.get_rank() == 0:
            torch.save(wanted, f"{root}/raw.pt")
            torch.save({"state_dict": wanted, "epoch": 1}, f"{root}/trainer.ckpt")
            for name, state in (("plain", wanted), ("nested", {"model": wanted})):
                writer = UCVolumeWriter(f"{root}/{name}")
                dcp.save(state, storage_writer=writer, process_group=alone)
    source = Job("ddp")
    source.model.load_state_dict(wanted)
    source.save(f"{root}/ours")
    source.fabric.save(f"{root}/called", {"net": source.model})
    source.plugin.wait()
    for kind in STRATEGIES:
        for name in ("raw.pt", "trainer.ckpt", "plain", "nested", "ours", "called"):
            job = Job(kind)
            job.fabric.load_raw(f"{root}/{name}", job.model)
            assert_same_on_first(job.all()[0], wanted, f"{name} under {kind}")
        with pytest.raises(CheckpointError, match="another module's"):
            job.fabric.load_raw(f"{root}/raw.pt", torch.nn.Linear(2, 2))
    lightnings = fabric_of("ddp", 2)
    lightnings.launch()
    lightnings.save(f"{root}/lightnings.ckpt", {"model": source.model, "step": 4})
    sharded = Job("2x1", attach=False)
    sharded.fabric.save(f"{root}/shards", {"model": sharded.model, "step": 6})
    for kind in ("2x1", "ddp"):
        job = Job(kind, seed=5)
        job.fabric.load_raw(f"{root}/shards", job.model)
        assert_same_on_first(job.all()[0], sharded.all()[0], kind)
    with pytest.raises(CheckpointMismatchError, match="saved by Fabric itself"):
        job.fabric.load(f"{root}/shards", {"model": job.model})
    again = {"model": Job("2x1", seed=5).model, "step": 0}
    Job("2x1").fabric.load(f"{root}/shards", again)
    assert again["step"] == 6
    job = Job("ddp", seed=5)
    state = {"model": job.model, "step": 0}
    job.fabric.load(f"{root}/lightnings.ckpt", state)
    assert state["step"] == 4
    assert_same(job.all()[0], wanted)


def shared_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)  # the same values on every rank
    return dict(build().state_dict())


def assert_same_on_first(got: Any, wanted: Any, where: str) -> None:
    if dist.get_rank() == 0:
        assert_same(got, wanted, where)


def a_rank_that_stays_away_is_named(root: str) -> None:
    """A save that one rank does not come to is an error that names it, and the next one works."""
    job = Job("ddp")
    late = AirCheckpointIO(timeout_s=1.0)
    fabric = fabric_of("ddp", 2)
    late.attach(fabric)
    fabric.launch()
    if dist.get_rank() == 0:
        with pytest.raises(SaveFailedError, match=r"have not come to it in \d+ s: 1"):
            fabric.save(f"{root}/away", job.state)
    dist.barrier()
    job.save(f"{root}/next")
    dist.barrier()
    assert [record.path for record in list_checkpoints(root) if record.valid] == [f"{root}/next"]


def a_failed_save_is_told_to_all(root: str) -> None:
    """Every rank gets a background error once, and what was to be deleted after it stays."""
    for raises in (lambda job: job.plugin.wait(), lambda job: job.save(f"{root}/later")):
        job = Job("2x1")
        job.save(f"{root}/good")
        dist.barrier()
        job.state["lambda"] = lambda: None  # pickled on rank 0 alone
        job.fabric.save(f"{root}/bad", job.state)
        job.plugin.remove_checkpoint(f"{root}/good")
        del job.state["lambda"]
        with pytest.raises(SaveFailedError, match="cannot be pickled"):
            raises(job)
        job.save(f"{root}/later")
        dist.barrier()
        assert verify_checkpoint(f"{root}/good").valid
        dist.barrier()
    job.fabric.save(f"{root}/last", job.state)
    job.plugin.remove_checkpoint(f"{root}/good")
    job.plugin.wait()
    dist.barrier()
    names = {os.path.basename(record.path) for record in list_checkpoints(root) if record.valid}
    assert names == {"later", "last"}


def a_rank_that_cannot_load_fails_all(root: str) -> None:
    """Where one rank misses its shard all ranks raise, and nothing was changed."""
    job = Job("2x1")
    job.save(f"{root}/c")
    with barriers():
        if dist.get_rank() == 0:
            for name in os.listdir(f"{root}/c"):
                if name.startswith("__1_"):
                    os.truncate(f"{root}/c/{name}", 10)
    other = Job("2x1", seed=4)
    before = other.all()
    with pytest.raises(CheckpointError):
        other.fabric.load(f"{root}/c", other.state)
    assert_same(other.all(), before)


class Touchy:
    """Has a state that it takes on some ranks only."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise KeyError("b")


class TouchyLoader(Touchy, torch.utils.data.Dataset[int]):
    """A loader of this kind."""


def a_state_that_one_rank_refuses_fails_all(root: str) -> None:
    """Where an object or a loader of one rank takes no state all raise, and go on in step."""
    for kind in (Touchy, TouchyLoader):
        job = Job("ddp")
        job.state["touchy"] = kind(refuses=dist.get_rank() == 1)
        job.save(f"{root}/{kind.__name__}/c")
        error, text = (KeyError, "b") if dist.get_rank() == 1 else (CheckpointError, "on rank 1")
        with pytest.raises(error, match=text):
            job.fabric.load(f"{root}/{kind.__name__}/c", job.state)
        job.state["touchy"] = kind(refuses=False)
        assert job.plugin.resume(f"{root}/{kind.__name__}", job.state) is not None


class Unreadable(os.PathLike[str]):
    """A path that cannot be asked for."""

    def __fspath__(self) -> str:
        raise RuntimeError("no such place")


def what_rank_zero_cannot_choose_fails_all(root: str) -> None:
    """An error of any class while rank 0 chooses is an error on every rank, and they go on."""
    job = Job("ddp")
    is_first = dist.get_rank() == 0
    error, text = (RuntimeError, "no such") if is_first else (CheckpointError, "Rank 0 failed.*no")
    with pytest.raises(error, match=text):
        job.plugin.resume(Unreadable() if is_first else root, job.state)
    assert job.plugin.resume(root, job.state) is None


class Plain:
    """An object that loads only where code of the checkpoint may run."""


def resuming_heeds_weights_only(root: str) -> None:
    """What loading refuses by default comes back by ``resume(weights_only=False)``."""
    job = Job("ddp")
    job.state["extra"] = Plain()
    job.save(f"{root}/c")
    job.state["extra"] = None
    with pytest.raises(UnsafeCheckpointError):
        job.plugin.resume(root, job.state)
    assert job.plugin.resume(root, job.state, weights_only=False) is not None
    assert isinstance(job.state["extra"], Plain)


def what_is_no_state_fails_all(root: str) -> None:
    """A state that is no dict on one rank, or a missing path, is an error on every rank."""
    job = Job("ddp")
    job.save(f"{root}/c")
    given: Any = job.state
    error: type[Exception] = CheckpointError
    if dist.get_rank() == 1:
        given, error = [1], InvalidTypeError
    for call in (
        lambda: job.fabric.save(f"{root}/d", given),
        lambda: job.fabric.load(f"{root}/c", given),
        lambda: job.plugin.resume(root, given),
    ):
        with pytest.raises(error, match="The state is a list; a dict is wanted"):
            call()
    with pytest.raises(CheckpointError, match="missing does not exist"):
        job.fabric.load(f"{root}/missing", job.state)
    job.save(f"{root}/d")
    assert verify_checkpoint(f"{root}/d").valid


class Own:
    """What each rank wants back as its own: the buffers of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, buffer in self.module.named_buffers():
            buffer.copy_(state[name])


def what_is_registered_is_each_ranks_own(root: str) -> None:
    """Buffers that ranks hold unlike are rank 0's after a resume, and their own if registered."""
    for registered in (False, True):
        job = Job("2x1")
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean.fill_(dist.get_rank() + 1)
        if registered:
            job.plugin.register(own=Own(norm))
        job.state |= {"norm": norm, "history": [dist.get_rank() + 1]}
        job.save(f"{root}/{registered}/c")
        norm.running_mean.zero_()
        assert job.plugin.resume(f"{root}/{registered}", job.state) is not None
        assert job.state["history"] == [1]
        assert norm.running_mean.tolist() == [dist.get_rank() + 1 if registered else 1] * 2


def loaders_are_asked_by_name(root: str) -> None:
    """A loader without a position in the checkpoint is an error; weights alone restore none."""
    data = f"{root}/data"
    with barriers():
        if dist.get_rank() == 0:
            os.makedirs(data)
            for number in range(8):
                Path(f"{data}/{number}.txt").write_text(str(number))
    job = Job("ddp")
    loader = loader_of(Loop(f"file://{data}", ""))
    job.state["loader"] = job.fabric.setup_dataloaders(loader)
    next(iter(job.state["loader"]))
    job.save(f"{root}/c")
    torch.manual_seed(1)
    again = loader_of(Loop(f"file://{data}", ""))
    job.fabric.load(f"{root}/c", {"model": job.model})
    assert torch.initial_seed() == 1
    job.plugin.register(other=again)
    with pytest.raises(StateError, match="no position of the loader 'other'; it has 'loader'"):
        job.fabric.load(f"{root}/c", {**job.state, "loader": again})
    job.fabric.load(f"{root}/c", {**job.state, "loader": again}, strict=False)
    assert again.state_dict() == loader.state_dict()
    assert again.state_dict()["rank"] == dist.get_rank()


def shards_stay_shards(root: str) -> None:
    """Loaded weights and moments are the module's own DTensors, and half of each on each rank."""
    job = Job("2x1")
    job.save(f"{root}/c")
    job.fabric.load(f"{root}/c", job.state)
    weight = job.model.state_dict()["0.weight"]
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (5, FEATURES)
    moment = next(iter(job.optimizer.optimizer.state.values()))["exp_avg"]
    assert isinstance(moment, DTensor)


def attaching_late(root: str) -> None:
    """After the launch, and after the set-up, attaching works; ranks of one layer share files."""
    for kind, share in (("ddp", None), ("1x2", (0, 1))):
        job = Job(kind, attach=False)
        job.plugin.attach(job.fabric)
        job.save(f"{root}/{kind}")
        assert data_rank() == (share or (dist.get_rank(), 2))
        saved, other = job.all(), Job(kind, seed=4)
        other.fabric.load(f"{root}/{kind}", other.state)
        assert_same(other.all(), saved)
    Job("ddp")
    assert data_rank() == (dist.get_rank(), 2)


def what_ranks_hold_unlike_is_rank_zeros(root: str) -> None:
    """A weight that was frozen when DDP wrapped it is rank 0's, wherever ranks hold another."""
    fabric = fabric_of("ddp", 2)
    plugin = AirCheckpointIO().attach(fabric)
    fabric.launch()
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    module[0].weight.requires_grad = False
    model = fabric.setup_module(module)
    module[0].weight.requires_grad = True
    with torch.no_grad():
        module[0].weight.fill_(dist.get_rank())
        module[1].running_mean.fill_(dist.get_rank())
    fabric.save(f"{root}/c", {"model": model})
    plugin.wait()
    fabric.load(f"{root}/c", {"model": model})
    assert module[0].weight.sum() == 0
    assert module[1].running_mean.sum() == 0


CHECKS: list[Callable[[str], None]] = [
    checkpoints_move_between_strategies,
    every_rank_writes,
    without_attach_rank_zero_writes,
    filters_and_strictness,
    values_come_back,
    raw_weights,
    a_rank_that_stays_away_is_named,
    a_failed_save_is_told_to_all,
    a_rank_that_cannot_load_fails_all,
    a_state_that_one_rank_refuses_fails_all,
    what_rank_zero_cannot_choose_fails_all,
    resuming_heeds_weights_only,
    what_is_no_state_fails_all,
    what_is_registered_is_each_ranks_own,
    loaders_are_asked_by_name,
    shards_stay_shards,
    attaching_late,
    what_ranks_hold_unlike_is_rank_zeros,
]


def run_all(root: str) -> None:
    """Run in a rank: each check in a directory of its own."""
    torch.set_num_threads(1)
    for check in CHECKS:
        os.makedirs(f"{root}/{check.__name__}", exist_ok=True)
        print("check", check.__name__, flush=True)
        check(f"{root}/{check.__name__}")
        dist.barrier()
