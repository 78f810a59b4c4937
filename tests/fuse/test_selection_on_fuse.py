"""Choosing the newest checkpoint on a real FUSE mount: few requests, and listings that lag."""

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from slow_mount import Mount, has_fuse, slow_mount
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from air_lightning import AirCheckpointIO, AirResume, cli, find_latest_valid
from air_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest
from air_lightning.errors import CheckpointError
from ranks import run_ranks

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not has_fuse() and not os.environ.get("AIR_REQUIRE_ALL"), reason="no FUSE on this machine"
    ),
]

NEWEST = 1000
VOLUME = "/Volumes/main/default/runs"


class Tiny(LightningModule):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(64, 1), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sharded(Tiny):
    """Its weight is spread over the ranks."""

    def configure_model(self) -> None:
        if not isinstance(self.layer.weight, DTensor):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


class Begun(Callback):
    """Notes the step at which training begins."""

    step: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step


def trainer_of(*callbacks: Callback, max_steps: int, **options: Any) -> Trainer:
    """A Trainer that saves through ours."""
    return Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"plugins": [AirCheckpointIO()], **options},
    )


def saved(directory: Path, *, steps: int) -> None:
    """A checkpoint of each step of a real run, ``step=<n>.ckpt``."""
    save = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer_of(save, max_steps=steps).fit(Tiny())


def make_like(directory: Path, name: str, step: int) -> None:
    """A directory that looks like a whole checkpoint of that step, of three small files."""
    path = directory / name
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"x")
    manifest = Manifest({"__0_0.distcp": FileRecord(1, None)}, global_step=step)
    (path / MANIFEST).write_bytes(manifest.to_bytes())
    (path / METADATA).write_bytes(b"m")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A mount whose root has ten thousand entries: 900 checkpoints, foreign things, and files."""
    base = tmp_path_factory.mktemp("crowded")
    root = base / "root"
    saved(root, steps=2)
    for step in range(3, 900):
        make_like(root, f"step={step}.ckpt", step)
    os.rename(root / "step=2.ckpt", root / "best.ckpt")  # no number, and the newest of the whole
    os.rename(root / "step=1.ckpt", root / f"step={NEWEST}.ckpt")
    document = json.loads((root / "best.ckpt" / MANIFEST).read_bytes())
    document["global_step"] = NEWEST + 1
    (root / "best.ckpt" / MANIFEST).write_text(json.dumps(document))
    document = json.loads((root / f"step={NEWEST}.ckpt" / MANIFEST).read_bytes())
    document["global_step"] = NEWEST
    (root / f"step={NEWEST}.ckpt" / MANIFEST).write_text(json.dumps(document))
    for name in ("step=\n7", "stép=9999", "-rf", "{step}", "lost+found", ".hidden"):
        (root / name).mkdir()
    (root / "images").mkdir()
    for number in range(10_000 - len(os.listdir(root))):
        (root / f"step={5000 + number}.ckpt").touch()
    for number in range(3000):
        (root / "images" / f"{number}.png").touch()
    with slow_mount(root, attr_timeout_s=1.0, flush=False) as mount:
        mount.fail("getattr", errno.EACCES, name="lost+found/")
        yield mount


def chosen_by_function(root: str) -> str | None:
    """By the catalogue."""
    return find_latest_valid(root)


def chosen_by_command(root: str) -> str | None:
    """By the command line."""
    assert cli.main(["latest", root]) == cli.DONE
    return None


def chosen_by_fit(root: str) -> str | None:
    """By AirResume."""
    return _fit(root, None)


def chosen_by_last(root: str) -> str | None:
    """By AirResume, asked for the last."""
    return _fit(root, "last")


def _fit(root: str, ckpt_path: str | None) -> str:
    save = ModelCheckpoint(root, every_n_train_steps=10_000, save_last=True)
    trainer = trainer_of(AirResume(), save, max_steps=2)
    trainer.fit(Tiny(), ckpt_path=ckpt_path)
    return str(trainer.ckpt_path)


@pytest.mark.parametrize(
    ("choose", "listings"),
    [
        (chosen_by_function, 1),
        (chosen_by_command, 1),
        (chosen_by_fit, 2),  # Lightning lists once to warn of a directory that is not empty
        (chosen_by_last, 3),  # and once for names that begin with "last"
    ],
)
def test_ten_thousand_entries_take_one_listing_and_few_requests(
    crowded: Mount,
    capsys: pytest.CaptureFixture[str],
    choose: Callable[[str], str | None],
    listings: int,
) -> None:
    """The newest of a crowded root is found by a look at what its name does not rule out."""
    mark = len(crowded.calls())
    found = choose(str(crowded)) or capsys.readouterr().out.strip()
    calls = crowded.calls()[mark:]
    assert found == f"{crowded}/best.ckpt"
    counts = Counter(operation for operation, _ in calls)
    assert sum(1 for call in calls if call == ["readdir", "/"]) == listings
    # A few checkpoints, seven names without a number or of other kinds, and eight of the files,
    # since Lightning's own checkpoints are files.
    touched = {path.split("/")[1] for _, path in calls} - {""}
    assert len(touched) <= 28
    # By path: how often the kernel asks again for what it was told is a matter of time.
    assert len({path for operation, path in calls if operation == "getattr"}) <= 60
    assert counts["open"] <= 28
    assert not any(path.startswith("/images/") and path.endswith(".png") for _, path in calls)


@dataclass(frozen=True)
class Case:
    """One start of two ranks, each with a mount of its own, and the step that both go on from."""

    prepare: Callable[[list[Mount]], None]
    step: int | None
    faults: bool = True  # whether the second rank asks for what its mount does not know
    sharded: bool = False
    given_to_first: str | None = None
    timeout_s: float = 150.0

    @property
    def name(self) -> str:
        return f"{self.prepare.__name__}-{self.sharded}"


def resumed(directory: str, case: Case, mounts: list[Mount]) -> None:
    """One rank: fits for a step, and writes down from which step, or why not."""
    rank = torch.distributed.get_rank()
    if rank == 0:
        for mount in mounts:
            mount.heal()
        case.prepare(mounts)
    torch.distributed.barrier()
    begun = Begun()
    trainer = trainer_of(
        AirResume(VOLUME),
        begun,
        max_steps=8,
        devices=2,
        strategy=ModelParallelStrategy() if case.sharded else "ddp",
        enable_checkpointing=False,
        plugins=[AirCheckpointIO(timeout_s=case.timeout_s)],
    )
    try:
        trainer.fit(Sharded() if case.sharded else Tiny(), ckpt_path=_given(case, rank))
        told: Any = begun.step
    except CheckpointError as error:
        told = str(error)
    document = {"told": told, "faults": mounts[rank].faults()}
    Path(f"{directory}/{case.name}-{rank}").write_text(json.dumps(document))
    torch.distributed.barrier()


def _given(case: Case, rank: int) -> str | None:
    """What Lightning makes of "last": nothing, on a rank whose listing does not tell of one."""
    return case.given_to_first if rank == 0 else None


def lag(mounts: list[Mount]) -> None:
    """The other rank does not know the newest for a while."""
    mounts[1].hide("step=3", times=25)


def lag_of_a_file(mounts: list[Mount]) -> None:
    """The other rank does not know one of its files for a while."""
    mounts[1].hide("step=3.ckpt/__0_0", times=8)


def lag_of_the_marker(mounts: list[Mount]) -> None:
    """The other rank does not know its marker for a while."""
    mounts[1].hide("step=3.ckpt/.metadata", times=8)


def unknown_to_the_first(mounts: list[Mount]) -> None:
    """The rank that chooses does not know the newest."""
    mounts[0].hide("step=3")


def deleted(mounts: list[Mount]) -> None:
    """The rank that chooses still lists one that was deleted."""
    mounts[0].haunt("/main/default/runs/step=4.ckpt")


def deleted_and_remembered(mounts: list[Mount]) -> None:
    """The rank that chooses still knows all of one that was deleted, but cannot open it."""
    mounts[0].fail("open", errno.ENOENT, name="step=3")


def never(mounts: list[Mount]) -> None:
    """The other rank never comes to know it."""
    mounts[1].hide("step=3")


def nothing(mounts: list[Mount]) -> None:
    """Both ranks know all there is."""


CASES = [
    Case(lag, 3),
    Case(lag, 3, sharded=True),
    Case(lag_of_a_file, 3),
    Case(lag_of_the_marker, 3),
    Case(unknown_to_the_first, 2, faults=False),
    Case(deleted, 3, faults=False),
    Case(deleted_and_remembered, 2, faults=False),
    Case(nothing, 1, faults=False, given_to_first=f"{VOLUME}/step=1.ckpt"),
    Case(never, None, timeout_s=16.0),
]


def all_cases(directory: str, mounts: list[Mount]) -> None:
    """One rank: every case in turn, through a mount of its own."""
    torch.distributed.init_process_group("gloo")
    os.environ["AIR_VOLUMES_ROOT"] = str(mounts[torch.distributed.get_rank()])
    for case in CASES:
        resumed(directory, case, mounts)


@pytest.mark.slow
def test_ranks_whose_listings_differ_agree_or_fail_together(tmp_path: Path) -> None:
    """One rank chooses; another waits until it sees that, and all fail where it never does."""
    source = tmp_path / "source"
    saved(source / "main" / "default" / "runs", steps=3)
    with ExitStack() as stack:
        mounts = [stack.enter_context(slow_mount(source)) for _ in range(2)]
        log = tmp_path / "log"
        statuses = run_ranks(all_cases, str(tmp_path), mounts, world_size=2, log=log)
        assert statuses == [0, 0], log.read_text()[-4000:]
    for case in CASES:
        found = [json.loads((tmp_path / f"{case.name}-{rank}").read_text()) for rank in (0, 1)]
        assert (found[1]["faults"] > 0) == case.faults, case.name
        if case.step is not None:
            assert [each["told"] for each in found] == [case.step, case.step], case.name
    assert f"{VOLUME}/step=3.ckpt failed on rank 1" in found[0]["told"]
    assert f"Rank 0 chose {VOLUME}/step=3.ckpt, and this rank has not seen it" in found[1]["told"]
