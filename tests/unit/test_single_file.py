"""Lightning's own files in a directory of checkpoints: the newest is found, and nothing is run."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from air_lightning.checkpoint.catalog import list_root
from air_lightning.checkpoint.single_file import SingleFile, newest_file
from conftest import Volume


class Touch:
    """A pickle that makes a file when it is loaded in the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Odd:
    """An object with items, a state, and a class that no other program knows."""

    def __init__(self) -> None:
        self.items = {"global_step": 999}


def newest_in(roots: list[str]) -> SingleFile | None:
    """The newest of several directories."""
    return newest_file({root: list_root(root, None) for root in roots})


def put(path: Path, step: int, **more: Any) -> Path:
    """A file like one of Lightning's."""
    weights = {"w": torch.nn.Parameter(torch.ones(1000))}
    content = {"epoch": 0, "global_step": step, "state_dict": weights, "optimizer_states": []}
    torch.save({**content, **more}, path)
    return path


def test_the_latest_step_is_found_within(tmp_path: Path) -> None:
    """The step that the file holds counts, in whichever directory; not its name, not its time."""
    (tmp_path / "other").mkdir()
    newest = put(tmp_path / "other" / "a.ckpt", 30)
    os.utime(newest, (1, 1))
    put(tmp_path / "step=99.ckpt", 7)
    roots = [str(tmp_path), str(tmp_path / "other"), str(tmp_path / "missing")]
    assert newest_in(roots) == (30, str(newest))


def test_what_cannot_be_resumed_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files cut short are named in the log; weights alone, other programs' and hidden ones not."""
    whole = put(tmp_path / "whole.ckpt", 1)
    for name, cut in zip("abcd", (0, 10, 1000, whole.stat().st_size - 1), strict=True):
        (tmp_path / f"cut{name}.ckpt").write_bytes(whole.read_bytes()[:cut])
    put(tmp_path / "parameters.pt", 8)
    put(tmp_path / ".hidden.ckpt", 9)
    torch.save({"global_step": 10, "state_dict": {}}, tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({"global_step": "x", "optimizer_states": []}, tmp_path / "text.ckpt")
    (tmp_path / "directory.ckpt").mkdir()
    with caplog.at_level(logging.WARNING):
        assert newest_in([str(tmp_path)]) == (1, str(whole))
    told = sorted(record.args[0] for record in caplog.records)
    assert [os.path.basename(name)[:3] for name in told] == ["cut"] * 4


@pytest.mark.parametrize(("offset", "value"), [(6, 255), (42, 255)], ids=["version", "offset"])
def test_an_altered_file_is_passed_over(tmp_path: Path, offset: int, value: int) -> None:
    """A file whose zip directory claims what nobody can read ends no search."""
    whole = put(tmp_path / "step=1.ckpt", 1)
    altered = bytearray(put(tmp_path / "step=2.ckpt", 2).read_bytes())
    altered[altered.index(b"PK\x01\x02") + offset] = value
    (tmp_path / "step=2.ckpt").write_bytes(altered)
    assert newest_in([str(tmp_path)]) == (1, str(whole))


def test_a_file_without_checksums_counts(tmp_path: Path) -> None:
    """A file that torch was told to write without true checksums is found."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = put(tmp_path / "a.ckpt", 5)
    finally:
        torch.serialization.set_crc32_options(before)
    assert newest_in([str(tmp_path)]) == (5, str(path))


def test_nothing_in_it_is_run(tmp_path: Path) -> None:
    """Objects of any class are stepped over, also those that ordinary loading would run."""
    path = put(tmp_path / "a.ckpt", 5, hyper_parameters={"x": Touch(tmp_path / "ran"), "y": Odd()})
    assert newest_in([str(tmp_path)]) == (5, str(path))
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists()


def test_volumes_and_urls_are_searched(volume: Volume, tmp_path: Path) -> None:
    """A volume path comes back as one, a URL as one."""
    put(volume.directory / "a.ckpt", 4)
    assert newest_in([volume.path]) == (4, f"{volume.path}/a.ckpt")
    url = f"file://{volume.directory}"
    assert newest_in([url]) == (4, f"{url}/a.ckpt")


def test_few_of_many_are_read(tmp_path: Path) -> None:
    """Names that told the truth are believed, and files that are none of Lightning's given up."""
    opened: list[str] = []
    watching = [False]  # an audit hook stays for the life of the process

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching[0] and event == "open" and str(args[0]).endswith(".ckpt"):
            opened.append(str(args[0]))

    for step in range(50):
        put(tmp_path / f"step={step}.ckpt", step)
    last = put(tmp_path / "last.ckpt", 40)
    sys.addaudithook(hook)
    watching[0] = True
    assert newest_in([str(tmp_path)]) == (49, str(tmp_path / "step=49.ckpt"))
    watching[0] = False
    assert len(opened) == 2
    opened.clear()
    for step in range(50, 200):
        (tmp_path / f"step={step}.ckpt").touch()
    watching[0] = True
    assert newest_in([str(tmp_path)]) == (40, str(last))
    watching[0] = False
    assert len(opened) == 9
