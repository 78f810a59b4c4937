"""The ways to train that the matrix of interruptions goes through."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics import MeanMetric

from air_lightning import DataLoader, UCVolumeDataset
from integration.matrix import BATCHES, IN_AN_EPOCH, Case
from integration.training import Data, Model, Sharded, WithoutLength

EPOCH_END = ("on_train_epoch_end", BATCHES - 1)


class Observed(Sharded):
    """Logs in all the ways that there are: by step and epoch, and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = Model.training_step(self, batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True)
        return loss


class Plateau(Observed):
    """Learning rates follow what was logged, by epoch and by step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        plans = [
            {"scheduler": kind(optimizer, factor=0.9, patience=0), "monitor": "both_epoch"},
            {
                "scheduler": kind(optimizer, factor=0.95, patience=0),
                "monitor": "loss",
                "interval": "step",
                "frequency": 2,
            },
        ]
        return [optimizer], plans


class Manual(Sharded):
    """Two optimizers, stepped by hand; the second one at every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, second = self.optimizers()
        loss = Model.training_step(self, batch, batch_idx)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.layers[0].parameters(), lr=0.01)
        rest = [*self.layers[2].parameters(), *self.layers[3].parameters()]
        second = torch.optim.SGD(rest, lr=0.01, momentum=0.9)
        kind = torch.optim.lr_scheduler.StepLR
        return [first, second], [kind(first, 2, 0.9), kind(second, 3, 0.9)]


class Stateful(Sharded):
    """Keeps a state of its own beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {"sum": 0.0, "seen": torch.zeros(2)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.own["sum"] += loss.item()
        self.own["seen"] = self.own["seen"] + batch[1].shape[0]
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


class Cosine(Sharded):
    """Plans its learning rates over the whole of the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
        return [optimizer], [{"scheduler": plan, "interval": "step"}]


class Pair(Data):
    """Two train loaders: all of the files, and some of them."""

    mode = "max_size_cycle"

    def train_dataloader(self) -> Any:
        part = UCVolumeDataset(
            self.paths["train"], pattern="*[02468].txt", shuffle=True, seed=3, uneven="pad"
        )
        few = part.map(self.decode)
        options = {**self._loader_options, "batch_size": 2}
        loaders = {
            "a": DataLoader(self.train_dataset(), **options),
            "b": DataLoader(few if self.has_length else WithoutLength(few), **options),
        }
        return CombinedLoader(loaders, self.mode)


class Shortest(Pair):
    mode = "min_size"


class Longest(Pair):
    mode = "max_size"


class Both(Sharded):
    """Trains on the batches of two loaders, one of which may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = [Model.training_step(self, x, batch_idx) for x in batch.values() if x is not None]
        return torch.stack(losses).mean()


def averages() -> Sequence[Callback]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return [EMAWeightAveraging(decay=0.9)]


def steps_are_asked_for(trainer: Trainer) -> None:
    """As scripts do that build a model for so many steps."""

    class Early(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            assert trainer.estimated_stepping_batches

    trainer.callbacks.append(Early())


FEW = (IN_AN_EPOCH[1], IN_AN_EPOCH[3], IN_AN_EPOCH[4], *IN_AN_EPOCH[5:8])
VALIDATED = (
    ("on_train_batch_end", 1),
    ("on_validation_start", 1),
    ("on_validation_batch_start", 1),
    ("on_validation_batch_end", 1),
    ("on_validation_end", 1),
    ("on_train_batch_start", 2),
    ("on_train_batch_end", BATCHES - 1),
    ("on_validation_batch_end", BATCHES - 1),
    ("on_validation_end", BATCHES - 1),
    EPOCH_END,
    ("on_train_epoch_start", BATCHES - 1),
    ("on_train_batch_end", 3 * BATCHES - 1),
    ("on_validation_batch_end", 3 * BATCHES - 1),
)
HALVES = VALIDATED[:6]
WHOLES = VALIDATED[6:]
ALL = tuple(("on_train_batch_end", n) for n in range(3)) + FEW
CASES = [
    Case("max_epochs"),
    Case(
        "max_steps", {"max_steps": 13, "max_epochs": -1}, (*IN_AN_EPOCH, ("on_train_batch_end", 12))
    ),
    Case("no_length", has_length=False),
    Case("no_length_max_steps", {"max_steps": 15, "max_epochs": -1}, has_length=False),
    Case("observed", model=Observed),
    Case("plateau", model=Plateau),
    Case("val_epoch", {}, WHOLES, validate=True),
    Case("val_half", {"val_check_interval": 2}, HALVES, validate=True),
    Case("val_half_no_length", {"val_check_interval": 2}, HALVES, validate=True, has_length=False),
    Case("val_epoch_no_length", {}, WHOLES, validate=True, has_length=False),
    Case(
        "val_steps",
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        (
            ("on_validation_end", 3),
            ("on_train_batch_end", 3),
            ("on_validation_batch_end", 7),
            ("on_train_batch_end", 7),
        ),
        validate=True,
    ),
    Case(
        "val_2nd_epoch",
        {"check_val_every_n_epoch": 2},
        (EPOCH_END, ("on_train_batch_end", 4), ("on_train_batch_end", 9), ("on_validation_end", 9)),
        validate=True,
    ),
    Case("accumulate", {"accumulate_grad_batches": 2}, ALL),
    Case("accumulate_no_length", {"accumulate_grad_batches": 2}, ALL, has_length=False),
    Case(
        "accumulate_validate",
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
        HALVES,
        validate=True,
    ),
    Case("manual", model=Manual),
    Case("stateful", model=Stateful),
    Case("cosine", model=Cosine),
    Case("cosine_max_steps", {"max_steps": 13, "max_epochs": -1}, model=Cosine),
    Case("cosine_steps", {"max_steps": 13}, model=Cosine),
    Case("asked_early", before_fit=steps_are_asked_for),
    Case("bf16", {"precision": "bf16-mixed"}, FEW),
    Case("fp16", {"precision": "16-mixed"}, FEW),
    Case("ema", {}, WHOLES, callbacks=averages, validate=True),
    Case("reload", {"reload_dataloaders_every_n_epochs": 1}),
    Case("reload2", {"reload_dataloaders_every_n_epochs": 2}),
    Case(
        "limit",
        {"limit_train_batches": 3},
        tuple(
            (h, {4: 2, 5: 3, 9: 5}.get(n, n))
            for h, n in IN_AN_EPOCH
            if (h, n) not in (("on_train_batch_end", 2), ("on_train_batch_start", 3))
        ),
    ),
    Case(
        "limit_float",
        {"limit_train_batches": 0.6},
        (
            ("on_train_batch_end", 1),
            ("on_train_batch_end", 2),
            ("on_train_epoch_end", 2),
            ("on_train_batch_start", 3),
        ),
    ),
    Case(
        "limit_no_length",
        {"limit_train_batches": 3},
        (
            ("on_train_batch_end", 1),
            ("on_train_batch_end", 2),
            ("on_train_epoch_end", 2),
            ("on_train_batch_start", 3),
        ),
        has_length=False,
    ),
    Case(
        "overfit",
        {"overfit_batches": 3},
        (
            ("on_train_batch_end", 1),
            ("on_train_batch_end", 2),
            ("on_train_epoch_end", 2),
            ("on_train_epoch_start", 2),
            ("on_train_batch_start", 3),
            ("on_train_batch_end", 3),
        ),
    ),
    Case("pair_cycle", model=Both, data=Pair),
    Case("pair_cycle_no_length", model=Both, data=Pair, has_length=False),
    Case("pair_longest", model=Both, data=Longest),
    Case("pair_longest_no_length", model=Both, data=Longest, has_length=False),
    Case(
        "pair_shortest",
        {},
        (
            ("on_train_batch_start", 0),
            ("on_train_batch_end", 0),
            ("on_train_batch_end", 2),
            ("on_train_epoch_end", 2),
            ("on_train_batch_end", 3),
        ),
        model=Both,
        data=Shortest,
    ),
    Case(
        "pair_shortest_no_length",
        {},
        (
            ("on_train_batch_start", 0),
            ("on_train_batch_end", 0),
            ("on_train_batch_end", 2),
            ("on_train_epoch_end", 2),
            ("on_train_batch_end", 3),
        ),
        model=Both,
        data=Shortest,
        has_length=False,
    ),
]
