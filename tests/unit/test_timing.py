"""Metrics of data loading: what reaches MLflow, and what a broken MLflow costs."""

import logging
import math
import subprocess
import sys
import threading
import time

import pytest

from air_lightning.data import counters, timing
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from ranks import run_ranks

LIMIT_S = 150  # ends a hang


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow on a fresh sqlite store, away from where its older versions would make ``mlruns``."""
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # set_tracking_uri writes it, too
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(store)
    mlflow.search_experiments()  # makes the tables, for which older versions set up all logging
    yield mlflow
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


def history(mlflow, run_id, name):
    """A metric as the store has it."""
    return mlflow.MlflowClient().get_metric_history(run_id, name)


def loader_of(*args, **options):
    """A loader that reports at the end of a pass only, however long a busy machine takes for it."""
    loader = DataLoader(*args, **options)
    loader._timer._interval_s = math.inf
    return loader


def waits(*milliseconds, interval_s=timing.INTERVAL_S):
    """A timer that has seen these waits, one after the other."""
    timer = timing.WaitTimer(interval_s)
    clock = 0.0
    for wait in milliseconds:
        timer.add(clock, clock + wait / 1000)
        clock += wait / 1000
    return timer


def test_a_loaders_waits_reach_the_active_run(mlflow):
    """Each finished pass logs mean, max, sum and count, at the age of the run in seconds."""
    loader = loader_of(range(10), batch_size=2, num_workers=1)
    with mlflow.start_run() as run:
        for _ in range(2):
            list(loader)
        assert timing.drain(LIMIT_S)
        counts = history(mlflow, run.info.run_id, "air/rank0/data_wait_ms_count")
        assert [metric.value for metric in counts] == [5.0, 5.0]
        began = run.info.start_time
        assert all(metric.step == (metric.timestamp - began) // 1000 for metric in counts)
        values = {
            kind: history(mlflow, run.info.run_id, f"air/rank0/data_wait_ms_{kind}")[0].value
            for kind in ("mean", "max", "sum")
        }
    assert 0 < values["mean"] <= values["max"] <= values["sum"]
    assert values["sum"] == pytest.approx(5 * values["mean"])


def test_a_pass_that_is_broken_off_is_reported(mlflow):
    """What was waited for before a break reaches the run; the loader tells it without MLflow."""
    loader = loader_of(range(10), batch_size=2, num_workers=0)
    with mlflow.start_run() as run:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        assert timing.drain(LIMIT_S)
        (count,) = history(mlflow, run.info.run_id, "air/rank0/data_wait_ms_count")
        assert count.value == 3
    statistics = loader.statistics()
    assert statistics["batches"] == 3
    assert statistics["data_wait_s"] > 0


def test_waits_are_aggregated_between_reports(mlflow):
    """Within the interval nothing is sent; when it is over, one report covers all batches."""
    with mlflow.start_run() as run:
        waits(10, 30, 20, 50, 1, interval_s=0.1)
        assert timing.drain(LIMIT_S)
        metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    prefix = "air/rank0/data_wait_ms"
    assert metrics == {
        f"{prefix}_mean": pytest.approx(27.5),
        f"{prefix}_max": pytest.approx(50),
        f"{prefix}_sum": pytest.approx(110),
        f"{prefix}_count": 4,
    }


def test_without_a_thread_for_it_nothing_is_reported_or_waited_for(mlflow, tmp_path):
    """Where no thread can be started training goes on, with a warning, and nobody waits."""
    log = tmp_path / "log"
    assert run_ranks(_report_without_threads, mlflow, log=log) == [0], log.read_text()
    assert "can't start new threads" in log.read_text()


def _report_without_threads(mlflow):
    logging.basicConfig(force=True)  # to the log of this process
    threading.stack_size(1 << 46)  # more than any machine has
    with mlflow.start_run():
        waits(1, 2).end_pass()
        assert not timing.drain(1e6)  # at once: the limit of this run is the bound


def test_no_run_is_ever_opened(mlflow):
    """Without an active run nothing is logged, and none is opened."""
    waits(1, 2).end_pass()
    timing.drain(LIMIT_S)
    assert mlflow.active_run() is None
    assert mlflow.search_runs(search_all_experiments=True, output_format="list") == []


def test_a_run_of_another_thread_is_not_ours(mlflow):
    """The run is that of the thread that trains, as MLflow's own logging would have it."""
    with mlflow.start_run() as run:
        seen = []  # older MLflow has one active run for all threads

        def other():
            seen.append(mlflow.active_run())
            waits(1).end_pass()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        timing.drain(LIMIT_S)
        metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
        assert bool(metrics) == (seen != [None])


def test_a_dead_server_costs_one_warning(mlflow, caplog, monkeypatch):
    """A tracking server that refuses costs one warning in all; next() does not raise."""
    monkeypatch.setattr(timing, "_current", None)
    store = mlflow.get_tracking_uri()
    with mlflow.start_run():
        mlflow.set_tracking_uri("http://127.0.0.1:9")
        with caplog.at_level(logging.WARNING, logger="air_lightning"):
            for _ in range(3):
                assert len(list(DataLoader(range(4), num_workers=0))) == 4
            assert not timing.drain(LIMIT_S)
            waits(1).end_pass()
        mlflow.set_tracking_uri(store)
    assert len([r for r in caplog.records if r.name == "air_lightning"]) == 1
    assert "training goes on" in caplog.text


class Watched:
    """A lock that notes how long it is waited for at most."""

    def __init__(self, lock):
        self.lock, self.limits = lock, []

    def acquire(self, timeout):
        self.limits.append(timeout)
        return self.lock.acquire(timeout=timeout)


def test_a_server_that_does_not_answer_delays_no_pass(mlflow, monkeypatch):
    """While a report hangs passes go on; one fork waits a moment for it, later ones not at all."""
    answered = threading.Event()
    monkeypatch.setattr(timing, "_current", None)
    monkeypatch.setattr(timing, "_send", lambda report: answered.wait())
    with mlflow.start_run():
        waits(1).end_pass()
        while not timing._current.sending.locked():
            time.sleep(0.01)
        sending = timing._current.sending = Watched(timing._current.sending)
        for _ in range(3):
            assert len(list(DataLoader(range(4), num_workers=0))) == 4
        for _ in range(5):
            with timing.sending_paused():
                pass
        assert sending.lock.locked()
        timing._current.sending = sending.lock
        answered.set()
        assert timing.drain(LIMIT_S)
    assert 0 < sending.limits[0] < 0.5
    assert sending.limits[1:] == [0] * 4


def test_the_sending_thread_starts_after_the_first_workers(mlflow):
    """No thread of ours runs before the first report, so the first workers fork without one."""
    script = """
import threading, mlflow, sys
from air_lightning.data import timing
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
mlflow.set_tracking_uri(sys.argv[1])
ours = lambda: [t.name for t in threading.enumerate() if t.name == "air-mlflow-timing"]
with mlflow.start_run():
    loader = DataLoader(range(4), num_workers=1)
    loader._timer._interval_s = 1e9  # no report before the pass ends
    iterator = iter(loader)
    next(iterator)
    assert ours() == []
    list(iterator)
    assert len(ours()) == 1
    assert timing.drain(150)
    with timing.sending_paused():
        assert timing._current.sending.locked()
print(mlflow.last_active_run().info.run_id)
"""
    run_id = subprocess.run(
        [sys.executable, "-c", script, mlflow.get_tracking_uri()],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()[-1]
    assert history(mlflow, run_id, "air/rank0/data_wait_ms_count")[0].value == 4


def test_mlflow_is_not_imported_for_those_who_do_not_use_it():
    """Iterating in a process without MLflow neither imports it nor starts a thread."""
    script = """
import sys, threading
from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
for _ in range(2):
    list(DataLoader(range(4), num_workers=0))
assert not any(name.split(".")[0] == "mlflow" for name in sys.modules)
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_pass_that_stops_at_the_loaders_length_reports(mlflow, volume):
    """A loop that takes len(loader) batches and no StopIteration, as Lightning's, reports too."""
    volume.write(6)
    loader = loader_of(UCVolumeDataset(volume.path), batch_size=2, num_workers=0)
    with mlflow.start_run() as run:
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        assert timing.drain(LIMIT_S)
        (count,) = history(mlflow, run.info.run_id, "air/rank0/data_wait_ms_count")
    assert count.value == 3


def decoded(path):
    """The length of a file that is not bad."""
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith(b"bad"):
        raise ValueError("bad")
    return len(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_workers_did_reaches_the_active_run(mlflow, volume, workers):
    """A cold pass and a warm one, one file of which is bad: totals, and the download rate."""
    volume.write(12, size=1000)
    volume.put("part0/0003.txt", b"bad".ljust(1000))
    files = UCVolumeDataset(volume.path, on_error="skip").map(decoded)
    loader = loader_of(files, batch_size=2, num_workers=workers)
    before = counters.rank_totals()
    with mlflow.start_run() as run:
        began = time.perf_counter()
        for _ in range(2):
            assert sum(int(sizes.sum()) for sizes in loader) == 12_000
        seconds = time.perf_counter() - began
        assert timing.drain(LIMIT_S)

        def values(name):
            return [m.value for m in history(mlflow, run.info.run_id, f"air/rank0/{name}")]

        totals = {name: [value - before[name] for value in values(name)] for name in counters.NAMES}
        rates = values("download_mb_per_s")
    assert totals["files_downloaded"] == [12, 12]
    assert totals["bytes_downloaded"] == [12_000, 12_000]
    assert totals["files_skipped"] == [1, 2]
    assert totals["retries"] == totals["evictions"] == totals["reads_through"] == [0, 0]
    # Files that were put in place of the bad one are looked up once more.
    cold, warm = totals["cache_hits"]
    assert cold >= 1
    assert warm - cold >= 12
    assert rates[0] >= 0.012 / seconds
    assert rates[1] == 0


def test_the_rate_is_of_the_time_since_the_last_report(mlflow):
    """Megabytes by the wall time of the interval, whatever part of it was waited."""
    total = dict.fromkeys(counters.NAMES, 0)
    timer = timing.WaitTimer(1.0, lambda: dict(total))
    with mlflow.start_run() as run:
        for second, megabytes in ((0.25, 3), (2.25, 9), (4.25, 9)):
            total["bytes_downloaded"] = megabytes * 10**6
            timer.add(second, second + 0.01)
        assert timing.drain(LIMIT_S)
        rates = history(mlflow, run.info.run_id, "air/rank0/download_mb_per_s")
    assert sorted(m.value for m in rates) == [0, pytest.approx(9 / 2.01)]
