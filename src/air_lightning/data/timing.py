"""How long training waits for data, and what its workers do, sent to the active MLflow run.

The promise: metrics never open a run, never slow a step and never stop training::

    training thread   WaitTimer.add            four numbers are added up
                      every 10 s, end of pass  the counters are read (counters.py), the active run
                                               is looked up (it is thread-local), and what they
                                               come to is put into a queue
    one daemon thread MlflowClient.log_batch   started at the first totals, so after the workers
                                               were forked; a failure costs one warning and ends it

MLflow is looked for in ``sys.modules``: a process that never imported it has no active run.
"""

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from air_lightning.data.stream import current_rank
from air_lightning.volumes.threads import NO_THREAD, start_thread

logger = logging.getLogger("air_lightning")

INTERVAL_S = 10.0
_QUEUE_SIZE = 64
_EXIT_WAIT_S = 2.0
_FORK_WAIT_S = 0.05


class Report(NamedTuple):
    """Metrics on their way to a run."""

    tracking_uri: str
    run_id: str
    metrics: dict[str, float]
    step: int
    timestamp_ms: int


class WaitTimer:
    """Adds up the durations of ``next()`` and reports them now and then.

    Metrics are named ``air/rank<r>/...``; their step is the number of seconds since the run began.

    * ``data_wait_ms_mean``, ``_max``, ``_sum`` and ``_count`` cover the batches since the report
      before, and ``download_mb_per_s`` the time since then.
    * The totals, by their names (:data:`~air_lightning.data.counters.NAMES`), cover this process
      since it began. They are left out as long as all are 0: for other data than volumes.

    Args:
        interval_s: Seconds between reports.
        totals: Reads the totals; None for waits alone.

    Attributes:
        batches: How many were counted.
        wait_s: Seconds that they took in all.
    """

    def __init__(
        self, interval_s: float = INTERVAL_S, totals: Callable[[], dict[str, float]] | None = None
    ) -> None:
        self._interval_s = interval_s
        self._totals = totals
        self.batches = 0
        self.wait_s = 0.0
        self._began: float | None = None  # of the interval; None between passes
        self._bytes_before = 0.0
        self._clear()

    def _clear(self) -> None:
        self._count, self._sum, self._max = 0, 0.0, 0.0

    def begin_pass(self) -> None:
        """Begin an interval, before the workers are told to begin; not after half a pass."""
        if self._began is None:
            self._began = time.perf_counter()
            self._bytes_before = self._totals()["bytes_downloaded"] if self._totals else 0.0

    def add(self, began: float, ended: float) -> None:
        """Count one ``next()``, between two readings of ``time.perf_counter()``."""
        waited = ended - began
        self.batches += 1
        self.wait_s += waited
        self._count += 1
        self._sum += waited
        self._max = max(self._max, waited)
        if self._began is None:
            self._began = began
        if ended - self._began >= self._interval_s:
            self._report(ended)

    def end_pass(self) -> None:
        """Report what is left at the end of a pass."""
        self._report(time.perf_counter())
        self._began = None

    def _report(self, now: float) -> None:
        if self._count == 0:
            return
        metrics = self._metrics(now)
        self._clear()
        self._began = now
        try:
            active = _active_run()
            if active is not None:
                uri, run_id, began_ms = active
                stamp = int(time.time() * 1000)
                # Not batches: those of training and of validation, and those before and after a
                # resume into the same run, would be counted by different clocks.
                step = max(0, stamp - began_ms) // 1000
                _reporter().put(Report(uri, run_id, metrics, step, stamp))
        except Exception as error:  # noqa: BLE001 - see give_up
            # A broken tracking set-up is no reason to stop training.
            _reporter().give_up(error)

    def _metrics(self, now: float) -> dict[str, float]:
        metrics = {
            "data_wait_ms_mean": 1000 * self._sum / self._count,
            "data_wait_ms_max": 1000 * self._max,
            "data_wait_ms_sum": 1000 * self._sum,
            "data_wait_ms_count": float(self._count),
            **self._counted(now),
        }
        return {f"air/rank{current_rank()[0]}/{name}": value for name, value in metrics.items()}

    def _counted(self, now: float) -> dict[str, float]:
        totals = self._totals() if self._totals else {}
        if not any(totals.values()):
            return {}
        megabytes = (totals["bytes_downloaded"] - self._bytes_before) / 1e6
        self._bytes_before = totals["bytes_downloaded"]
        seconds = now - (self._began or 0.0)
        return {**totals, "download_mb_per_s": megabytes / seconds if seconds > 0 else 0.0}


def _active_run() -> tuple[str, str, int] | None:
    """(tracking URI, run id, start in ms) of this thread's active run, if there is one."""
    mlflow: Any = sys.modules.get("mlflow")
    active_run = getattr(mlflow, "active_run", None)
    run = active_run() if active_run is not None else None
    if run is None:
        return None
    return mlflow.get_tracking_uri(), run.info.run_id, int(run.info.start_time)


class _Reporter:
    """The queue and the one thread of this process that talks to MLflow."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.sending = threading.Lock()
        self.slow = False  # whether a fork has waited for the report that is being sent, in vain
        self._reports: queue.Queue[Report] = queue.Queue(_QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._dead = False

    def put(self, report: Report) -> None:
        """Hand a report over; it is dropped if the thread is far behind or has given up."""
        if self._dead:
            return
        with contextlib.suppress(queue.Full):
            self._reports.put_nowait(report)
        if self._thread is None:
            self._thread = start_thread(self._run, "air-mlflow-timing")
            if self._thread is None:  # whoever drains would wait for nobody
                self.give_up(RuntimeError(NO_THREAD))
            else:
                atexit.register(self.drain, _EXIT_WAIT_S)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything was sent, at most so long; whether it was."""
        deadline = time.monotonic() + timeout_s
        with self._reports.all_tasks_done:
            while self._reports.unfinished_tasks and not self._dead and self.pid == os.getpid():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._reports.all_tasks_done.wait(left)
        return not self._dead

    def give_up(self, error: Exception) -> None:
        """Warn once, and report no more in this process."""
        if not self._dead:
            self._dead = True
            with self._reports.all_tasks_done:
                # Whoever drains would otherwise wait for reports that nobody takes any more.
                self._reports.all_tasks_done.notify_all()
            logger.warning(
                "Metrics of data loading are no longer logged to MLflow, and training goes on: "
                "%s: %s",
                type(error).__name__,
                error,
            )

    def _run(self) -> None:
        while not self._dead:
            report = self._reports.get()
            try:
                with self.sending:
                    _send(report)
            except Exception as error:  # noqa: BLE001 - see give_up
                self.give_up(error)
            finally:
                self.slow = False
                self._reports.task_done()


def _send(report: Report) -> None:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    metrics = [
        Metric(key, value, report.timestamp_ms, report.step)
        for key, value in report.metrics.items()
    ]
    MlflowClient(tracking_uri=report.tracking_uri).log_batch(report.run_id, metrics=metrics)


_current: _Reporter | None = None


def _reporter() -> _Reporter:
    global _current  # noqa: PLW0603 - one per process
    if _current is None or _current.pid != os.getpid():
        # A fork copies the object, not its thread.
        _current = _Reporter()
    return _current


def drain(timeout_s: float) -> bool:
    """Wait until this process's timings were sent, at most so long; whether they were."""
    return _current is None or _current.drain(timeout_s)


@contextlib.contextmanager
def sending_paused(*, when: bool = True) -> Iterator[None]:
    """Keep the sending thread still while workers are forked.

    A lock that it holds at that moment, of a logger or a database, would stay locked in the worker
    for ever. Waits a moment at most, and once per report: a server that does not answer must not
    hold up training.
    """
    reporter = _current
    if not when or reporter is None or reporter.pid != os.getpid():
        yield
        return
    held = reporter.sending.acquire(timeout=0 if reporter.slow else _FORK_WAIT_S)
    reporter.slow = not held
    try:
        yield
    finally:
        if held:
            reporter.sending.release()
