"""A log of every step, one JSON line each: what ``demo.py`` compares two runs by.

Each rank appends to a file of its own, ``rank<r>.jsonl``; a line is in the file when the step's
callback returns, so a SIGKILL loses no line of a finished step. Kinds of line:

``start``  the global step and the checkpoint that the run goes on from
``step``   step, epoch, the batch's file names, the loss (hexadecimal), seconds waited for data
``save``   seconds for which a save stopped the training thread
``val``    the held-out files of a batch and whether each was recognised
"""

import json
import os
import time
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from typing_extensions import override


class DataWait(Profiler):
    """Measures how long the Trainer waited for its last training batch, in ``last`` (seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0
        self._began = 0.0

    @override
    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._began = time.perf_counter()

    @override
    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.last = time.perf_counter() - self._began


class StepLog(Callback):
    """Writes the lines above into *directory*, and at the end the final weights and moments."""

    def __init__(self, directory: str, wait: DataWait) -> None:
        self._directory = directory
        self._wait = wait
        self._file: Any = None
        self._saves = 0

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, f"rank{trainer.global_rank}.jsonl")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open while training lasts
        resumed = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        self._write("start", step=trainer.global_step, resumed_from=resumed)

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write_saves(trainer)
        self._write(
            "step",
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            files=list(batch[2]),
            loss=float(outputs["loss"]).hex(),
            wait_s=self._wait.last,
        )

    def _write_saves(self, trainer: Any) -> None:
        saves = trainer.strategy.checkpoint_io.stats
        for record in saves[self._saves :]:
            self._write("save", stall_s=record.stall_s)
        self._saves = len(saves)

    @override
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        hits = outputs["hits"].tolist()
        self._write("val", epoch=trainer.current_epoch, files=list(batch[2]), hits=hits)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write_saves(trainer)
        state = {
            "model": pl_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
        }
        torch.save(state, os.path.join(self._directory, f"final-rank{trainer.global_rank}.pt"))
