"""The ways to train that the matrix of interruptions goes through."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics import MeanMetric, MetricCollection

from air_lightning import DataLoader, UCVolumeDataset
from integration.matrix import BATCHES, IN_AN_EPOCH, Case, Moment
from integration.training import Data, Model, Sharded, WithoutLength


class Observed(Sharded):
    """Logs in all the ways that there are: by step and epoch, and a metric of its own."""

    shows = False  # whether in the progress bar

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.alike = MetricCollection({"one": MeanMetric(), "other": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = Model.training_step(self, batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.alike.update(loss.detach() * 2)
        self.log_dict(self.alike, on_step=False, on_epoch=True)
        self.log("both", loss, self.shows, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True)
        return loss


class Shown(Observed):
    """Logs one of them in another way."""

    shows = True


class Plateau(Observed):
    """Learning rates follow what was logged, by epoch and by step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        plans = [
            {"scheduler": kind(optimizer, factor=0.9, patience=0), "monitor": "both_epoch"},
            {
                "scheduler": kind(optimizer, factor=0.95, patience=0),
                "monitor": "both_step",
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
    """Keeps a state of its own beside the weights; rank 0's is what all get back."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {"sum": 0.0, "seen": torch.zeros(2)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.own["sum"] += 0.1 * batch_idx
        self.own["seen"] = self.own["seen"] + batch[1].shape[0]
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


class Planned(Sharded):
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
    # Not at the top: Lightning before 2.6 has none.
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return [EMAWeightAveraging(decay=0.9)]


class AsksEarly(Callback):
    """Asks for the number of steps as early as it is known."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        assert trainer.estimated_stepping_batches == 3 * BATCHES


END, START, BATCH = "on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start"
DONE = "on_train_batch_end"
LAST = BATCHES - 1
FEW: tuple[Moment, ...] = ((BATCH, 0), (DONE, 2), (BATCH, 3), (DONE, LAST), (END, LAST))
# Of epochs that a limit, or the shortest of several loaders, ends after three batches.
SHORT: tuple[Moment, ...] = ((DONE, 1), (DONE, 2), (END, 2), (START, 2), (BATCH, 3), (DONE, 3))
BETWEEN_STEPS: tuple[Moment, ...] = ((DONE, 0), (DONE, 1), *FEW)
WITHIN: tuple[Moment, ...] = (
    (DONE, 1),
    ("on_validation_start", 1),
    ("on_validation_batch_start", 1),
    ("on_validation_batch_end", 1),
    ("on_validation_end", 1),
    (BATCH, 2),
)
VALIDATED: tuple[Moment, ...] = (
    (DONE, LAST),
    ("on_validation_batch_end", LAST),
    ("on_validation_end", LAST),
    (END, LAST),
    (START, LAST),
    (DONE, 3 * BATCHES - 1),
    ("on_validation_batch_end", 3 * BATCHES - 1),
)
IN_THE_SECOND: tuple[Moment, ...] = ((DONE, BATCHES + 1), ("on_validation_end", 2 * BATCHES - 1))
BY_STEPS: tuple[Moment, ...] = (
    (DONE, 3),
    ("on_validation_end", 3),
    (DONE, 7),
    ("on_validation_batch_end", 7),
)

HALVES = {"val_check_interval": 2}
TWOS = {"accumulate_grad_batches": 2}
STEPS = {"max_steps": 13, "max_epochs": -1}

CASES = {
    case.name: case
    for case in (
        Case("epochs"),
        Case("steps", STEPS, (*IN_AN_EPOCH, (DONE, 12))),
        Case("no length", has_length=False),
        Case("no length, steps", STEPS, (*FEW, (DONE, 12)), has_length=False),
        Case("metrics", model=Observed),
        Case("plateau", model=Plateau),
        Case("validation", {}, VALIDATED, validate=True),
        Case("validation, no length", {}, VALIDATED, validate=True, has_length=False),
        Case("validation within", HALVES, WITHIN, validate=True, model=Observed),
        Case("validation within, no length", HALVES, WITHIN, validate=True, has_length=False),
        Case(
            "validation by steps",
            {"val_check_interval": 4, "check_val_every_n_epoch": None},
            BY_STEPS,
            validate=True,
        ),
        Case(
            "validation of every other epoch",
            {"check_val_every_n_epoch": 2},
            ((DONE, LAST), (END, LAST), (DONE, 2 * BATCHES - 1)),
            validate=True,
        ),
        Case("accumulated", TWOS, BETWEEN_STEPS),
        Case("accumulated, no length", TWOS, BETWEEN_STEPS, has_length=False),
        Case(
            "accumulated, validation within",
            {"accumulate_grad_batches": 3, **HALVES},
            WITHIN,
            validate=True,
        ),
        Case("accumulated, fp16", {**TWOS, "precision": "16-mixed"}, BETWEEN_STEPS),
        Case("manual", model=Manual),
        Case("own state", {}, FEW, model=Stateful),
        Case("planned", model=Planned),
        Case("planned, steps", STEPS, FEW, model=Planned),
        Case("planned, both limits", {"max_steps": 13}, FEW, model=Planned),
        Case("steps asked for at setup", {}, FEW, callbacks=lambda: [AsksEarly()]),
        Case("bf16", {"precision": "bf16-mixed"}, FEW),
        Case("fp16", {"precision": "16-mixed"}, FEW),
        Case("averages", {}, VALIDATED, callbacks=averages, validate=True),
        Case("reloaded", {"reload_dataloaders_every_n_epochs": 1}),
        Case("reloaded every other epoch", {"reload_dataloaders_every_n_epochs": 2}),
        Case(
            "reloaded, validation",
            {"reload_dataloaders_every_n_epochs": 1},
            IN_THE_SECOND,
            validate=True,
        ),
        Case(
            "reloaded every other epoch, validation",
            {"reload_dataloaders_every_n_epochs": 2},
            IN_THE_SECOND,
            validate=True,
        ),
        Case("limit", {"limit_train_batches": 3}, SHORT),
        Case("limit as a part", {"limit_train_batches": 0.6}, SHORT),
        Case("limit, no length", {"limit_train_batches": 3}, SHORT, has_length=False),
        Case("overfit", {"overfit_batches": 3}, SHORT),
        Case("cycle", model=Both, data=Pair),
        Case("cycle, no length", {}, FEW[:3], model=Both, data=Pair, has_length=False),
        Case("longest", model=Both, data=Longest),
        Case("longest, no length", model=Both, data=Longest, has_length=False),
        Case("shortest", {}, SHORT, model=Both, data=Shortest),
        Case("shortest, no length", {}, SHORT, model=Both, data=Shortest, has_length=False),
    )
}
