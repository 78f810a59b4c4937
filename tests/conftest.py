"""What all tests share: a volume to work on, and the police that catches what a test leaves behind.

The police checks every test: environment, threads and the working directory are as they were.
``pytest -n`` runs tests in processes side by side. Each has a working directory and a place for
temporary files of its own, so that none sees, or clears away, what another is using.
"""

import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_GRACE_S = 60.0  # threads that were told to end: a busy machine may not let them run for long
# Threads that libraries keep for the life of the process, by name.
_LASTING = (
    "fsspecIO",
    "MLflow",
    "mlflow",
    "asyncio",
    "Tqdm",
    "tqdm",
    "pymp",
    "QueueFeeder",
    "moto",
)

# What pytest sets to name the phase a test is in, Lightning with a torch that knows CUDA, and torch
# when it imports more of itself.
_NOT_OF_TESTS = (
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
)

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # one of the processes of ``pytest -n``

# No verdict by the clock: how long an example takes, or its making, is up to the machine. Nor by
# chance: each run has the same examples; ``pytest --hypothesis-profile search`` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("air", settings.get_profile("search"), derandomize=True)
settings.load_profile("air")


def pytest_configure(config: pytest.Config) -> None:
    """Give a process of ``pytest -n`` a place of its own for temporary files."""
    if _WORKER:
        # Short: a socket's path may have 107 letters, and some lie deep below this directory.
        directory = tempfile.mkdtemp(prefix=f"air-{_WORKER}-")
        # After the directory of multiprocessing that lies in it, whose priority is -100.
        Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=-200)
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{config.rootpath}/.hypothesis")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, the longest tests begin first: otherwise one would run alone at the end."""
    if _WORKER:
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[bool, float]:
    limit = item.get_closest_marker("timeout")
    return item.get_closest_marker("slow") is None, -limit.args[0] if limit else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which parts did not run, where all have to."""
    if _missed(terminalreporter):
        terminalreporter.write_line("AIR_REQUIRE_ALL is set, and the skipped tests did not run.")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``AIR_REQUIRE_ALL``, as in CI, a skipped test fails the run."""
    if not _WORKER and _missed(session.config.pluginmanager.get_plugin("terminalreporter")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _missed(reporter: pytest.TerminalReporter) -> bool:
    return bool(os.environ.get("AIR_REQUIRE_ALL")) and bool(reporter.stats.get("skipped"))


def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight.

    The police collects after every test, and half a million objects of torch, Lightning and MLflow
    made that a third of a second each time: more than most tests take.
    """
    if torch := sys.modules.get("torch"):
        # The first optimizer of a process imports more, and sets TORCHINDUCTOR_CACHE_DIR.
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).step()
    gc.collect()
    gc.freeze()
    if _WORKER:
        directory = f"{tempfile.gettempdir()}/cwd"
        os.mkdir(directory)
        os.chdir(directory)


class Volume:
    """A volume on local disk.

    Attributes:
        path: Its path as users write it.
        directory: Where it lies.
    """

    path = "/Volumes/main/default/data"

    def __init__(self, root: Path) -> None:
        self.directory = root / "main" / "default" / "data"
        self.directory.mkdir(parents=True)

    def write(self, count: int, *, size: int = 8, folders: int = 3) -> list[str]:
        """Write ``count`` files, ``<folder>/<number>.txt``, each beginning with its number.

        Returns:
            Their relative paths, sorted.
        """
        names = [f"part{number % folders}/{number:04}.txt" for number in range(count)]
        for name in names:
            self.put(name, Path(name).stem.encode().ljust(size, b"."))
        return sorted(names)

    def put(self, name: str, data: bytes) -> Path:
        """Write one file."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    """An empty volume, ``AIR_VOLUMES_ROOT`` standing in for ``/Volumes``."""
    root = tmp_path / "volumes"
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(root))
    return Volume(root)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of the test's own: Lightning's default directories are below it."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Each test draws the same numbers in every run, whatever ran before it in its process."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    """A test that leaves threads, environment, or files where it was started behind fails."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    directory, names = os.getcwd(), set(os.listdir())
    yield
    _restore_loader_classes()
    os.chdir(directory)
    left = {name for name in set(os.listdir()) - names if name[0] != "."}
    assert not left, f"left in the working directory: {sorted(left)}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in _NOT_OF_TESTS
    }
    for name in changed:
        os.environ.pop(name)
        if name in environment:
            os.environ[name] = environment[name]
    assert not changed, f"environment variables left changed: {sorted(changed)}"
    _check_threads(threads)


def _restore_loader_classes() -> None:
    """Undo what Lightning leaves of its methods in all loader classes where a data hook raises.

    It notes every attribute that is set from then on, and tests that pickle a loader would fail.
    """
    if "torch.utils.data" not in sys.modules:
        return
    classes = [sys.modules["torch.utils.data"].DataLoader]
    for cls in classes:
        classes += cls.__subclasses__()
        for name in ("__setattr__", "__delattr__", "__init__"):
            if f"__old{name}" in vars(cls):
                setattr(cls, name, getattr(cls, f"__old{name}"))
                delattr(cls, f"__old{name}")


def _check_threads(before: set[threading.Thread]) -> None:
    gc.collect()  # an iterator that was left alone ends its threads when it is collected
    deadline = time.monotonic() + _GRACE_S
    while True:
        left = [
            thread
            for thread in set(threading.enumerate()) - before
            if not any(name in thread.name for name in _LASTING)
        ]
        if not left:
            # Objects of what the test imported would be looked at after each test from now on.
            gc.freeze()
            return
        if time.monotonic() > deadline:
            pytest.fail(f"threads left running: {[thread.name for thread in left]}")
        for thread in left:
            thread.join(0.05)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on a local disk: the temporary one may be in memory."""
    from air_lightning.volumes.mount import file_system_type

    places = [tmp_path_factory.mktemp("disk"), Path(__file__).parent]
    found = [
        place for place in places if file_system_type(str(place)) in {"ext4", "xfs", "overlay"}
    ]
    if not found:
        pytest.skip(f"no local disk at {places}")
    made = found[0] / f".on-disk-{os.getpid()}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def no_threads() -> Iterator[None]:
    """The machine has no thread left: none with so large a stack."""
    before = threading.stack_size(1 << 46)
    with pytest.raises(RuntimeError):
        threading.Thread(target=print).start()
    yield
    threading.stack_size(before)
