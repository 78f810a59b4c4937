"""What was logged in the epoch so far: each rank's part of its means, and the module's own metrics.

Lightning saves none of it: an epoch that was interrupted would log, and give to schedulers and
callbacks, the mean of its rest alone. Here they are in each rank's blob, as plain values::

    callback   what callbacks, loggers and the progress bar were last told
    results    of each name that was logged in this epoch: how, and what it has come to
    modules    the states of the LightningModule's torchmetrics, those for validation included

A metric whose state is none of tensors and lists of them is left out, as by Lightning.
"""

import builtins
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric, MetricCollection

_TOLD = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_HOW = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_VALUES = ("value", "cumulated_batch_size")
_log = logging.getLogger("air_lightning")


def capture(trainer: Any) -> dict[str, Any]:
    """What this rank has logged, in values that nothing changes any more."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    return {
        "told": {name: _plain(getattr(connector, name)) for name in _TOLD},
        "results": {
            key: _of_result(metric)
            for key, metric in results.items()
            # A process group cannot be saved; what it reduces begins anew.
            if not metric.has_reset and metric.meta.sync.group is None
        },
        "modules": {
            name: state
            for name, metric in _metrics(trainer)
            if metric._update_count and (state := _of_metric(metric)) is not None
        },
    }


def restore(trainer: Any, saved: Mapping[str, Any], *, within_epoch: bool) -> None:
    """Put it back; what was logged in an epoch that is over is not wanted any more."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    for name in _TOLD:
        setattr(connector, name, dict(saved["told"][name]))
    modules = dict(_metrics(trainer))
    # Lightning begins what was logged anew after an epoch; other metrics are the module's affair.
    over = set() if within_epoch else {x["metric_attribute"] for x in saved["results"].values()}
    for name in (modules.keys() & saved["modules"].keys()) - over:
        _put_back(modules[name], saved["modules"][name])
    if not within_epoch:
        return
    for key, told in saved["results"].items():
        metric = _result(told, modules, trainer.strategy.reduce)
        if metric is not None:
            results[key] = metric.to(trainer.strategy.root_device)
    if saved["results"]:
        _drop_what_differs(results)
        # As between batches. Else Lightning takes the next one for the epoch's first, and begins
        # its means anew.
        connector._first_loop_iter = False


def _drop_what_differs(results: Any) -> None:
    """Forget what is logged in another way now: the module was changed before the resume.

    Lightning would take it for one name that is logged in two ways, and raise.
    """
    log = results.log

    def log_anew(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        try:
            log(fx, name, *args, **kwargs)
        except MisconfigurationException:
            known = [key for key, metric in results.items() if metric.meta.name == name]
            if not known or "log" not in vars(results):
                raise
            del results.log
            _log.warning("%r is logged in another way than before: its mean begins anew.", name)
            for key in known:
                del results[key]
            log(fx, name, *args, **kwargs)

    results.log = log_anew


def _metrics(trainer: Any) -> Iterator[tuple[str, Any]]:
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, MetricCollection):
            # Only the first of those that are alike is updated; this gives the others its state.
            module.values(copy_state=False)
        if isinstance(module, Metric):
            yield name, module


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _of_result(metric: Any) -> dict[str, Any]:
    how = {name: getattr(metric.meta, name) for name in _HOW}
    last = metric._forward_cache
    values = {name: getattr(metric, name) for name in _VALUES if hasattr(metric, name)}
    sync, reduce_fx = metric.meta.sync, metric.meta.reduce_fx
    return {
        **how,
        "reduce_fx": [reduce_fx is getattr(torch, reduce_fx.__name__), reduce_fx.__name__],
        "sync": [sync.should, sync.rank_zero_only],
        "last": last.detach().clone() if isinstance(last, torch.Tensor) else None,
        "values": _plain(values) if metric.is_tensor else None,
    }


def _result(told: Mapping[str, Any], modules: Mapping[str, Any], reduce: Any) -> Any:
    """The metric as Lightning would have it; None where the module has no such one any more."""
    is_torchs, name = told["reduce_fx"]
    # As it was given: Lightning takes the other one for another way of logging, an error.
    reduce_fx = getattr(torch if is_torchs else builtins, name)
    meta = _Metadata(**{name: told[name] for name in _HOW}, reduce_fx=reduce_fx)
    should, rank_zero_only = told["sync"]
    meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only)
    metric = _ResultMetric(meta, is_tensor=told["values"] is not None)
    if told["values"] is None:
        if told["metric_attribute"] not in modules:
            return None
        metric.value = modules[told["metric_attribute"]]
    else:
        for name, value in told["values"].items():
            setattr(metric, name, value)
    metric._forward_cache = told["last"]
    metric._update_count = 1
    return metric


def _of_metric(metric: Any) -> dict[str, Any] | None:
    states = {name: getattr(metric, name) for name in metric._defaults}
    copies: dict[str, Any] = {}
    for name, value in states.items():
        if isinstance(value, torch.Tensor):
            copies[name] = value.detach().clone()
        elif isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
            copies[name] = list(value)  # only ever appended to
        else:
            return None
    return {"states": copies, "updates": metric._update_count}


def _put_back(metric: Any, saved: Mapping[str, Any]) -> None:
    if saved["states"].keys() != metric._defaults.keys():
        return
    for name, value in saved["states"].items():
        there = [x.to(metric.device) for x in value] if isinstance(value, list) else value
        setattr(metric, name, there if isinstance(there, list) else there.to(metric.device))
    metric._update_count, metric._computed = saved["updates"], None
