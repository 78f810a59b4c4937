"""What metrics cost: a training loop with an active MLflow run against the same without one.

Each step asks a loader for a batch of cached files and then sleeps, as a step on a GPU leaves the
processor alone. MLflow keeps its runs in a local sqlite file. Rounds alternate between a loop with
an active run and one without, over the same loader and the same live workers.

Prints one JSON line. Per contender, medians over the rounds:

``step_ms``      milliseconds per step, ``next()`` and sleep together
``next_cpu_us``  microseconds of the training thread's processor time per ``next()``, which a busy
                 machine disturbs less

and ``overhead``, what the run adds per step as a share of the step that was asked for, from each of
the two; and ``counting_ns``, nanoseconds of one count.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import mlflow

import air_lightning
from air_lightning.data import timing
from air_lightning.data.counters import CACHE_HITS, count


def make_loader(folder: str, args: argparse.Namespace) -> Any:
    for number in range(args.steps * args.batch_size):
        with open(f"{folder}/{number:06}.bin", "wb") as file:
            file.write(os.urandom(1000))
    files = air_lightning.UCVolumeDataset(f"file://{folder}")
    return air_lightning.DataLoader(files, batch_size=args.batch_size, num_workers=args.workers)


def loop(loader: Any, args: argparse.Namespace) -> dict[str, float]:
    steps, cpu = 0, 0.0
    began = time.perf_counter()
    for _ in range(args.passes):
        batches = iter(loader)
        for _ in range(len(loader)):
            before = time.thread_time()
            next(batches)
            cpu += time.thread_time() - before
            time.sleep(args.step_ms / 1000)
            steps += 1
    seconds = time.perf_counter() - began
    return {"step_ms": 1000 * seconds / steps, "next_cpu_us": 1e6 * cpu / steps}


def with_run(loader: Any, args: argparse.Namespace) -> dict[str, float]:
    with mlflow.start_run():
        result = loop(loader, args)
        assert timing.drain(60), "MLflow did not take the metrics"
    return result


def counting_ns(times: int = 200_000) -> float:
    began = time.perf_counter()
    for _ in range(times):
        count(CACHE_HITS)
    return 1e9 * (time.perf_counter() - began) / times


def measure(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    loader = make_loader(folder, args)
    list(loader)  # warm
    results: dict[str, list[dict[str, float]]] = {"with_run": [], "without_run": []}
    for number in range(args.rounds):
        contenders = {"with_run": with_run, "without_run": loop}
        order = list(contenders) if number % 2 else list(reversed(contenders))
        for name in order:
            results[name].append(contenders[name](loader, args))
    return {
        name: {key: round(median(r[key] for r in rounds), 3) for key in rounds[0]}
        for name, rounds in results.items()
    }


def overhead(medians: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """What the run adds per step, as a share of the step that was asked for."""
    active, none = medians["with_run"], medians["without_run"]
    return {
        "wall": round((active["step_ms"] - none["step_ms"]) / args.step_ms, 5),
        "cpu": round((active["next_cpu_us"] - none["next_cpu_us"]) / 1000 / args.step_ms, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="batches per pass")
    parser.add_argument("--passes", type=int, default=2, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as work:
        mlflow.set_tracking_uri(f"sqlite:///{work}/mlflow.db")
        mlflow.set_experiment("metrics")
        os.mkdir(f"{work}/files")
        medians = measure(f"{work}/files", args)
    result = {"benchmark": "metrics", **vars(args), "contenders": medians}
    result |= {"overhead": overhead(medians, args), "counting_ns": round(counting_ns())}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
