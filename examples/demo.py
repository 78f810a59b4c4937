"""The driver behind ``make demo``: train, kill, resume, and prove that nothing was lost.

1. Write scikit-learn's 1,797 handwritten digits as PNG files into class folders below
   ``/Volumes/demo/digits/images``, which ``AIR_VOLUMES_ROOT`` maps into the work directory.
2. Run ``digits.py`` (two ranks, two workers each, a checkpoint every few steps) to its end.
3. Run it again, into other checkpoints: SIGKILL the whole process group in the middle of an
   epoch; start it again; SIGKILL it while a save is in flight; start it again, to its end.
4. Compare both runs step by step (``demo_report.py``), print a table and draw the losses.

Before each kill the process group is frozen (SIGSTOP) and the checkpoint directories are looked
at, so that the kill certainly comes where it is meant to; if they are not in the state wanted,
the group goes on (SIGCONT) and the next occasion is awaited.

Works offline. Exit code 0 when every verdict holds, 1 otherwise.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from demo_report import Plan, RunLog, StartLog, draw, report
from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
IMAGES = "/Volumes/demo/digits/images"
CHECKPOINTS = "/Volumes/demo/digits/checkpoints"
MARKER = ".air-lightning-demo"
# 1,408 files over 2 ranks of 2 workers are 352 each: 22 full batches of 16, none padded.
PLAN = Plan(train_files=1408, val_files=389, epochs=8, ranks=2, batch_size=16, save_every=22)
START_TIMEOUT_S = 600.0
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


class DemoError(Exception):
    """The demo could not be carried out; says what was seen."""


def prepare_work_dir(work: str) -> None:
    """Empties the work directory, if it is one that this demo made."""
    if os.path.isdir(work) and os.listdir(work) and not os.path.exists(f"{work}/{MARKER}"):
        raise DemoError(f"{work} is not empty and not of this demo; give another --work.")
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    with open(f"{work}/{MARKER}", "w", encoding="utf-8"):
        pass


def write_images(volumes: str) -> None:
    """Writes every digit as ``{train,val}/<class>/<number>.png``, 8x8 pixels of gray."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    for place, number in enumerate(order):
        part = "train" if place < PLAN.train_files else "val"
        folder = f"{volumes}{IMAGES.removeprefix('/Volumes')}/{part}/{digits.target[number]}"
        os.makedirs(folder, exist_ok=True)
        pixels = np.minimum(digits.images[number] * 16, 255).astype(np.uint8)
        Image.fromarray(pixels).save(f"{folder}/{number:04d}.png")


def create_tracking_runs(work: str) -> tuple[str, dict[str, str]]:
    """Makes a local MLflow store with one run per training run; its address and the run ids."""
    from mlflow import MlflowClient

    address = f"sqlite:///{work}/mlflow.db"
    client = MlflowClient(address)
    experiment = client.create_experiment("digits", artifact_location=f"file://{work}/artifacts")
    names = ("uninterrupted", "interrupted")
    return address, {n: client.create_run(experiment, run_name=n).info.run_id for n in names}


class Start:
    """One start of the training script, in a process group of its own.

    Its output goes to ``output.txt`` through a pipe that every process of the group holds: the
    pipe's end means that all of them are gone.
    """

    def __init__(self, name: str, work: str, run: str, environment: dict[str, str]) -> None:
        self.name = name
        self.logs = f"{work}/logs/{name.replace(' ', '-')}"
        self.log = StartLog(self.logs)
        self.checkpoints = f"{work}/volumes{CHECKPOINTS.removeprefix('/Volumes')}/{run}"
        os.makedirs(self.logs)
        command = [sys.executable, f"{HERE}/digits.py", "--data", IMAGES]
        command += ["--checkpoints", f"{CHECKPOINTS}/{run}", "--log", self.logs]
        command += ["--epochs", str(PLAN.epochs), "--batch-size", str(PLAN.batch_size)]
        command += ["--save-every", str(PLAN.save_every)]
        self.torn_before = set(self.unpublished())
        self.process = subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        with open(f"{self.logs}/output.txt", "wb") as out:
            for line in self.process.stdout:
                out.write(line)
                out.flush()

    def output(self) -> str:
        with open(f"{self.logs}/output.txt", encoding="utf-8", errors="replace") as out:
            return out.read()

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def end(self) -> int:
        """Waits until every process of the group is gone; the exit code of the first."""
        code = self.process.wait()
        self._reader.join(timeout=60)
        if self._reader.is_alive():
            raise DemoError(f"{self.name}: a process was left running after the run's end.")
        return code

    def published(self, step: int) -> bool:
        return os.path.exists(f"{self.checkpoints}/step={step}.ckpt/.metadata")

    def unpublished(self) -> list[str]:
        """The checkpoint directories that have no ``.metadata``, so are not checkpoints."""
        if not os.path.isdir(self.checkpoints):
            return []
        return sorted(
            entry.name
            for entry in os.scandir(self.checkpoints)
            if entry.is_dir() and not os.path.exists(f"{entry.path}/.metadata")
        )


Occasion = Callable[[Start], str | None]


def between_saves(start: Start) -> str | None:
    """Says where, when the run is in the middle of an epoch and no save is in flight."""
    step = start.log.last_step()
    epoch, done = divmod(step, PLAN.steps_per_epoch)
    since_save = step % PLAN.save_every
    # In the second half: what it goes on from is then a save of mid-epoch, too.
    if epoch < 2 or done < PLAN.save_every or not 3 <= since_save <= PLAN.save_every - 2:
        return None
    if not start.published(step - since_save) or start.unpublished():
        return None
    return f"step {step}, in epoch {epoch}, no save in flight"


def while_saving(start: Start) -> str | None:
    """Says which, when a save of epoch 5 or later has begun and is not published."""
    step = start.log.last_step()
    torn = [name for name in start.unpublished() if name not in start.torn_before]
    if not torn or step < 5 * PLAN.steps_per_epoch + 5:
        return None
    return f"step {step}, save {torn[-1]} in flight"


def follow(start: Start, occasion: Occasion | None) -> str | None:
    """Shows progress until the run ends, or kills it at the occasion and says where that was.

    On a terminal by a bar; in a log, which redraws would fill, by one line at the end.
    """
    killed, redraw = None, 0.0
    deadline = time.monotonic() + START_TIMEOUT_S
    quiet = not sys.stderr.isatty()
    title = f"{start.name:<15}"
    with tqdm(total=PLAN.steps, desc=title, unit="step", file=sys.stderr, disable=quiet) as bar:
        while start.process.poll() is None and killed is None:
            start.log.read()
            if time.monotonic() > redraw:
                redraw = time.monotonic() + 0.25
                bar.n = start.log.last_step()
                bar.refresh()
            if occasion is not None and occasion(start) is not None:
                killed = kill_frozen(start, occasion)
            if time.monotonic() > deadline:
                start.signal(signal.SIGKILL)
                raise DemoError(f"{start.name} hung for {START_TIMEOUT_S:.0f} s: {start.output()}")
            time.sleep(0.002)
        start.log.read()
        bar.n = start.log.last_step()
        bar.set_postfix_str("" if killed is None else f"SIGKILL at {killed}")
    if quiet:
        end = "" if killed is None else f", SIGKILL at {killed}"
        print(f"{title} {bar.n} of {PLAN.steps} steps{end}", file=sys.stderr, flush=True)
    if killed is None:
        expect_a_good_end(start, occasion)
    return killed


def expect_a_good_end(start: Start, occasion: Occasion | None) -> None:
    if start.end() != 0:
        raise DemoError(f"{start.name} failed with {start.process.returncode}:\n{start.output()}")
    if occasion is not None:
        raise DemoError(f"{start.name} came to its end before there was an occasion to kill it.")


def kill_frozen(start: Start, occasion: Occasion) -> str | None:
    """Freezes the group and kills it if the occasion is still there, else lets it go on."""
    start.signal(signal.SIGSTOP)
    time.sleep(0.05)  # a system call that was under way may still complete
    start.log.read()
    where = occasion(start)
    if where is None:
        start.signal(signal.SIGCONT)
        return None
    start.signal(signal.SIGKILL)
    start.end()
    start.log.read()
    return where


def newest_valid(run: str) -> str | None:
    """What the library itself would resume from, asked between the starts."""
    from air_lightning import find_latest_valid

    return find_latest_valid(f"{CHECKPOINTS}/{run}")


@contextmanager
def environment(work: str, tracking: str) -> Iterator[dict[str, str]]:
    """The environment of the training processes; their temporary files go with it.

    A killed process removes nothing, so each file it may leave is below a directory that is
    removed here.
    """
    with tempfile.TemporaryDirectory(prefix="air-demo-") as temporary:
        yield {
            **os.environ,
            "AIR_VOLUMES_ROOT": f"{work}/volumes",
            "TMPDIR": temporary,
            "MLFLOW_TRACKING_URI": tracking,
            "PYTHONUNBUFFERED": "1",
        }


def run_all(work: str) -> tuple[RunLog, RunLog, dict[str, str], str]:
    """Both runs: the uninterrupted one, and the one that is killed twice."""
    tracking, run_ids = create_tracking_runs(work)
    os.environ["AIR_VOLUMES_ROOT"] = f"{work}/volumes"
    with environment(work, tracking) as env:

        def begin(name: str, run: str) -> Start:
            return Start(name, work, run, {**env, "MLFLOW_RUN_ID": run_ids[run]})

        whole = begin("uninterrupted", "uninterrupted")
        follow(whole, None)
        starts, killed, expected = [], [], []
        for number, occasion in enumerate((between_saves, while_saving, None), 1):
            expected.append(newest_valid("interrupted"))
            start = begin(f"start {number} of 3", "interrupted")
            starts.append(start.log)
            killed.append(follow(start, occasion))
    runs = RunLog([whole.log], [None], [None]), RunLog(starts, killed, expected)
    return *runs, run_ids, tracking


def track(tracking: str, run_ids: dict[str, str], plot: str, accuracy: float) -> None:
    """Puts the outcome into the MLflow run of the interrupted training."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking)
    client.log_metric(run_ids["interrupted"], "held_out_accuracy", accuracy)
    client.log_artifact(run_ids["interrupted"], plot)


def beside_python(program: str) -> str:
    """How to call a program of this Python's environment, which need not be on PATH."""
    folder = os.path.dirname(os.path.abspath(sys.executable))
    below = os.path.relpath(folder)
    return os.path.join(folder if below.startswith(os.pardir) else below, program)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = os.path.join(os.path.dirname(HERE), ".demo")
    parser.add_argument("--work", default=default, help="work directory, emptied at the start")
    work = os.path.abspath(parser.parse_args().work)
    began = time.monotonic()
    os.environ.update(QUIET)
    try:
        prepare_work_dir(work)
        write_images(f"{work}/volumes")
        whole, interrupted, run_ids, tracking = run_all(work)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    verdicts = report(PLAN, whole, interrupted, f"{work}/volumes{IMAGES.removeprefix('/Volumes')}")
    plot = f"{work}/loss.png"
    draw(PLAN, whole, interrupted, plot)
    accuracy = interrupted.accuracy()
    track(tracking, run_ids, plot, accuracy)
    with open(f"{work}/verdicts.json", "w", encoding="utf-8") as out:
        json.dump({name: passed for name, passed, _ in verdicts}, out, indent=1)
    browse = f"{beside_python('mlflow')} ui --backend-store-uri {tracking}"
    print(f"\nplot    {plot}\nmlflow  {browse}")
    print(f"took    {time.monotonic() - began:.0f} s")
    return 0 if all(passed for _, passed, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
