"""The migration pages' code, run as it stands; of peers that are not installed, compiled."""

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from PIL import Image
from torch.utils.data import Dataset

from air_lightning import AirCheckpointIO, find_latest_valid
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("elsewhere"),
]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("migration/*.md"))
PEERS = ("litdata", "streaming", "torchdata")
FILES = 64


def snippets(page: Path) -> Iterator[tuple[int, str]]:
    """Each fenced block of Python, and the line that it begins at."""
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match[1]


def missing_peer(code: str) -> bool:
    """Whether it imports, or uses what was imported of, a peer that is not installed here."""
    peers = [name for name in PEERS if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE)]
    return any(importlib.util.find_spec(name) is None for name in peers)


def execute(page: Path, names: dict[str, Any]) -> int:
    """Run a page's code in order; returns how many blocks were compiled only."""
    compiled = 0
    for line, code in snippets(page):
        # Errors are then told with the line of the page.
        block = compile("\n" * line + code, str(page), "exec")
        if missing_peer(code):
            compiled += 1
        else:
            exec(block, names)
    return compiled


def write_images() -> None:
    """The digits of the quickstart, on the volume and copied beside; and samples made of them."""
    volume = Path(os.environ["AIR_VOLUMES_ROOT"]) / "main/vision"
    pixels = np.random.default_rng(0).integers(0, 256, (FILES, 8, 8), dtype=np.uint8)
    (volume / "samples/train").mkdir(parents=True)
    for number, image in enumerate(pixels):
        folder = volume / "digits/train" / str(number % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:04}.png")
        sample = {"pixels": torch.from_numpy(image)[None] / 255, "label": number % 10}
        torch.save(sample, volume / f"samples/train/{number:08}.pt")
    shutil.copytree(volume / "digits/train", "images/train")


def run_page(page: Path) -> None:
    """The quickstart gives the model and ``decode``; its ``__main__`` block is not run."""
    write_images()
    names: dict[str, Any] = {"__name__": "page"}
    execute(DOCS / "quickstart.md", names)
    compiled = execute(page, names)
    installed = page.stem in ("async-checkpoint-io", "stateful-dataloader")
    assert not (installed and compiled), "a peer that the tests need is not installed"
    CHECKS[page.stem](names)


def check_async(names: dict[str, Any]) -> None:
    """The second run went on from the first one's newest file, and the model came back."""
    assert names["trainer"].global_step == 3 * FILES // 4
    assert os.path.isfile("checkpoints/step=32.ckpt")
    assert os.path.isdir("checkpoints/step=48.ckpt")
    assert not os.path.exists("checkpoints/step=16.ckpt/.metadata")
    assert names["model"].layers[1].weight.shape == (10, 64)


def check_stateful(names: dict[str, Any]) -> None:
    """Both leave the same number of samples; the Trainers saved."""
    assert sum(len(labels) for _, labels in names["left"]) == FILES - 3 * 4
    for directory in ("checkpoints", "kept"):
        assert str(find_latest_valid(directory)).endswith("step=15.ckpt")


def check_loaders(names: dict[str, Any]) -> None:
    """The loader of samples gives each once, and the Trainer saved."""
    seen = Counter(tuple(pixels.flatten().tolist()) for pixels, _ in names["loader"].dataset)
    assert len(seen) == FILES
    assert set(seen.values()) == {1}
    assert str(find_latest_valid("checkpoints")).endswith("step=15.ckpt")
    assert names["trainer"].global_step == FILES // 4


CHECKS = {
    "async-checkpoint-io": check_async,
    "stateful-dataloader": check_stateful,
    "litdata": check_loaders,
    "mosaicml-streaming": check_loaders,
}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_pages_code_runs_as_it_stands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block runs in the order of the page, and leaves what the page says."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path / "volumes"))
    log = tmp_path / "log"
    assert run_ranks(run_page, page, log=log) == [0], log.read_text()[-4000:]


def test_every_page_is_checked_and_in_the_navigation() -> None:
    """No page of the folder is without a check here, or without a place in the menu."""
    assert {page.stem for page in PAGES} == CHECKS.keys()
    menu = (DOCS.parent / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"migration/{page.name}" in menu
        assert "python" in page.read_text()


class Numbers(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
        self.batches.append(batch[:, 0].tolist())


def keep_stateful() -> None:
    """Two ranks, torchdata's loader; from the middle of the epoch the rest is the same."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    names: dict[str, Any] = {"__name__": "page"}
    execute(DOCS / "quickstart.md", names)

    class Model(names["MyModel"]):  # type: ignore[misc]
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layers(batch).pow(2).mean()

        def train_dataloader(self) -> Any:
            sampler = StatefulDistributedSampler(Numbers(), seed=1)
            sampler.set_epoch(self.trainer.current_epoch)
            return StatefulDataLoader(Numbers(), batch_size=3, sampler=sampler, num_workers=2)

    def fit(**options: Any) -> list[list[float]]:
        seen, save = Seen(), ModelCheckpoint("c", "{step}", save_top_k=-1, every_n_train_steps=2)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=2,
            use_distributed_sampler=False,
            plugins=[AirCheckpointIO()],
            callbacks=[seen, save],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), **options)
        return seen.batches

    whole = fit()
    assert len(whole) == 8
    assert len({n for batch in whole[:4] for n in batch}) == 12
    assert fit(ckpt_path="c/step=2.ckpt") == whole[2:]
    assert fit(ckpt_path="c/step=6.ckpt") == whole[6:]


def test_torchdatas_loader_keeps_each_ranks_state(tmp_path: Path) -> None:
    """Two ranks with the plugin resume torchdata's loader in mid-epoch, each with its own rest."""
    log = tmp_path / "log"
    status = run_ranks(keep_stateful, world_size=2, log=log)
    assert status == [0, 0], log.read_text()[-4000:]
