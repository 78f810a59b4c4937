"""The command line: what it prints, its exit codes, and how little it loads."""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from air_lightning import doctor
from air_lightning.checkpoint.dcp import UCVolumeWriter
from air_lightning.cli import main
from air_lightning.data.dataset import UCVolumeDataset
from conftest import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints, the newest of them without .metadata."""
    for step in (1, 2, 3):
        value = {"net": {"w": torch.ones(4, 5)}, "lr": [0.1]}
        writer = UCVolumeWriter(tmp_path / f"step_{step}", global_step=step, epoch=0)
        dcp.save(value, storage_writer=writer)
    os.remove(tmp_path / "step_3" / ".metadata")
    return tmp_path


def test_ls_shows_a_table_and_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each checkpoint is one line, newest first; --json gives the records."""
    assert main(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["STEP", "TIME", "(UTC)"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]
    assert "never completed" in lines[1]
    assert main(["ls", str(root), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(r["step"], r["valid"]) for r in records] == [(3, False), (2, True), (1, True)]


def test_latest_prints_the_path_or_exits_with_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path alone goes to stdout, for scripts; none gives exit code 1."""
    assert main(["latest", str(root)]) == 0
    assert capsys.readouterr().out == f"{root}/step_2\n"
    assert main(["latest", str(root / "missing")]) == 1
    assert capsys.readouterr().out == ""
    assert main(["latest", str(root / "missing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"path": None}


def test_verify_says_sound_or_why_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 for a sound checkpoint, 1 with the reason for another; --deep reads it."""
    assert main(["verify", str(root / "step_2"), "--deep"]) == 0
    assert "checksums" in capsys.readouterr().out
    assert main(["verify", str(root / "step_3")]) == 1
    assert "never completed" in capsys.readouterr().err
    assert main(["verify", str(root / "step_3"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False
    assert main(["verify", str(root / "step_2"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


def test_inspect_lists_entries_with_shapes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, world size, and each entry's kind, shape and stored size."""
    assert main(["inspect", str(root / "step_2")]) == 0
    out = capsys.readouterr().out
    assert "step: 2" in out
    assert "world size: 1" in out
    assert any(line.split()[:3] == ["net.w", "float32", "4x5"] for line in out.splitlines())
    assert main(["inspect", str(root / "step_2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tensors"], found["objects"]) == (1, 1)
    assert found["versions"]["torch"] == torch.__version__
    assert main(["inspect", str(root / "step_3")]) == 1


def test_prune_deletes_unless_dry(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run says what would go and leaves it; without, it goes."""
    assert main(["prune", str(root), "--keep-last", "1", "--dry-run"]) == 0
    assert "Would delete" in capsys.readouterr().out
    assert len(os.listdir(root)) == 3
    assert main(["prune", str(root), "--keep-last", "1", "--json"]) == 0
    assert [record["step"] for record in json.loads(capsys.readouterr().out)] == [1]
    assert sorted(os.listdir(root)) == ["step_2", "step_3"]
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert "Nothing to delete" in capsys.readouterr().err


def test_exit_codes_tell_usage_from_storage(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2: a path or number that cannot be; 3: storage that cannot be reached."""
    assert main(["ls", "/Volumes/a/b"]) == 2
    assert main(["prune", str(root), "--keep-last", "0"]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["prune", str(root)])
    assert caught.value.code == 2
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(root / "missing"))
    assert main(["ls", "/Volumes/a/b/c"]) == 3
    assert "AIR_VOLUMES_ROOT" in capsys.readouterr().err


def test_export_to_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names OUT as it was given, and what to do; exit code 3."""
    if not os.path.exists("/proc/self"):
        pytest.skip("needs /proc")
    value = {"state_dict": {"w": torch.ones(3)}}
    dcp.save(value, storage_writer=UCVolumeWriter(tmp_path / "c"))
    for name in ("x.ckpt", "x.safetensors"):
        assert main(["export", str(tmp_path / "c"), f"/proc/{name}"]) == 3
        error = capsys.readouterr().err
        assert error.startswith(f"air-lightning: /proc/{name} cannot be written (No such file")
        assert "Export to a place where" in error


@pytest.mark.parametrize("command", [["ls"], ["latest"], ["prune", "--keep-last=9", "--dry-run"]])
def test_listing_commands_load_no_torch(root: Path, command: list[str]) -> None:
    """ls, latest and prune start without torch, lightning and mlflow."""
    program = (
        "import sys; from air_lightning.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 50 * any(m in sys.modules for m in ('torch', 'lightning', 'mlflow')))"
    )
    arguments = [sys.executable, "-c", program, command[0], str(root), *command[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prune_says_why_a_torn_directory_stays(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn directory newer than any complete one is named with the reason it was kept."""
    assert main(["prune", str(root), "--keep-last", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert [record["step"] for record in json.loads(printed.out)] == [1]
    (line,) = printed.err.splitlines()
    assert line.startswith(f"Kept {root}/step_3: ")
    assert "may still be writing it" in line


def test_inspect_prints_a_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The time is a date, as in ls; --json keeps the number."""
    main(["inspect", str(root / "step_2")])
    assert re.search(r"^time \(UTC\): \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", _out(capsys), re.MULTILINE)
    main(["inspect", str(root / "step_2"), "--json"])
    assert isinstance(json.loads(_out(capsys))["time"], float)


def _out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error(root: Path) -> None:
    """A reader that goes away leaves no message, and the exit code stays."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys; from air_lightning.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", program, "verify", str(root / "step_3"), "--json"]
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert "never completed" in done.stderr
    assert "Broken" not in done.stderr


def test_a_missing_back_end_names_the_extra() -> None:
    """Without s3fs, an s3:// path gives exit code 3 and what to install."""
    program = (
        "import sys; sys.modules['s3fs'] = None; from air_lightning.cli import main;"
        "sys.exit(main(['ls', 's3://bucket/checkpoints']))"
    )
    arguments = [sys.executable, "-c", program]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "pip install 'air-lightning[s3]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_manifest_writes_a_list_that_a_dataset_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says how many files it lists, loads no torch, and exits with 1 where none is."""
    files = tmp_path / "files"
    files.mkdir()
    for name in ("a.png", "b.png", "c.txt"):
        (files / name).write_text(name)
    program = (
        "import sys; from air_lightning.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 50 * any(m in sys.modules for m in ('torch', 'lightning', 'mlflow')))"
    )
    out = str(tmp_path / "list")
    arguments = ["manifest", str(files), out, "--pattern", "*.png"]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"Wrote {out}: 2 files.\n")
    dataset = UCVolumeDataset(f"file://{files}", manifest=out)
    assert [os.path.basename(path) for path in dataset] == ["a.png", "b.png"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(_out(capsys)) == {"path": str(files), "manifest": out, "count": 2}
    assert main(["manifest", str(files), out, "--pattern", "*.jpg"]) == 1
    assert main(["manifest", str(files), out, "--pattern", "/"]) == 2


def test_export_writes_one_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path goes to stdout; what is there stays unless --force; what is none is named."""
    state = {"model": {"w": torch.ones(2)}}
    dcp.save(state, storage_writer=UCVolumeWriter(tmp_path / "one", global_step=1))
    out = f"{tmp_path}/one.ckpt"
    assert main(["export", f"{tmp_path}/one", out]) == 0
    assert _out(capsys) == f"Exported to {out}.\n"
    assert torch.load(out, weights_only=True)["state_dict"].keys() == {"w"}
    assert main(["export", f"{tmp_path}/one", out]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", f"{tmp_path}/one", out, "--force", "--json"]) == 0
    assert json.loads(_out(capsys)) == {"path": out}
    assert main(["export", f"{tmp_path}/one", f"{tmp_path}/one.zip"]) == 2
    assert main(["export", str(root / "step_3"), f"{tmp_path}/torn.ckpt"]) == 1
    assert main(["export", str(root / "step_2"), f"{tmp_path}/net.ckpt"]) == 1
    assert "weights" in capsys.readouterr().err
    assert not os.path.exists(f"{tmp_path}/net.ckpt")


def test_doctor_examines_machine_and_paths(
    volume: Volume, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each check; --write leaves nothing behind; a failed check gives exit code 1."""
    assert main(["doctor", volume.path, "memory://doctor", "--write"]) == 0
    lines = _out(capsys).splitlines()
    assert any(line.startswith("ok") and f"rename {volume.path}" in line for line in lines)
    assert any("plugin line" in line for line in lines)
    assert os.listdir(volume.directory) == []
    assert main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(_out(capsys))}
    # What pip knows may lack the build that torch tells, as in 2.14.1+cu130.
    assert torch.__version__.partition("+")[0] == checks["torch"]["found"].partition("+")[0]
    assert all(check["remedy"] or check["status"] == "ok" for check in checks.values())
    assert main(["doctor", "/Volumes/a/b"]) == 1
    assert "fail: list /Volumes/a/b: " in _out(capsys)


def test_doctor_names_what_is_wrong_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that is not there, a full disk and a missing path each have a remedy."""
    monkeypatch.setenv("AIR_VOLUMES_ROOT", str(tmp_path / "missing"))
    disk = os.statvfs(tempfile.gettempdir())
    nearly_all = disk.f_blocks * disk.f_frsize - 1
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", str(nearly_all))
    assert main(["doctor", str(tmp_path / "new"), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(_out(capsys))}
    assert checks["/Volumes"]["status"] == "fail"
    assert checks["cache disk"]["status"] == "warn"
    assert "TMPDIR" in checks["cache disk"]["remedy"]
    assert checks[f"list {tmp_path}/new"]["status"] == "warn"
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", "plenty")
    assert main(["doctor"]) == 1
    assert "plenty" in _out(capsys)


def test_doctor_asks_for_the_versions_that_the_package_asks_for() -> None:
    """The table of lower bounds is the one that pip goes by."""
    wanted = {}
    for text in requires("air-lightning") or ():
        if match := re.match(r"([\w-]+)(?:\[.*\])?.*>=([\d.]+)", text.partition(";")[0]):
            wanted.setdefault(match[1], tuple(map(int, match[2].split("."))))
    assert all(wanted[names[0]] == least for names, least in doctor.PACKAGES.items())


def test_doctor_loads_no_torch() -> None:
    """What the machine has is known without importing it."""
    program = (
        "import sys; from air_lightning.cli import main; main(['doctor']);"
        "sys.exit(50 * any(m in sys.modules for m in ('torch', 'lightning', 'mlflow', 'fsspec')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
