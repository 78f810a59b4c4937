"""Listing a tree that changes while it is listed."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from air_lightning.volumes.crew import Crew, Step
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.walk import Walk


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("moment", [("list", "d/"), ("stat", "d/f"), ("stat", "d/link")])
def test_a_directory_that_becomes_a_file_while_it_is_listed_is_passed_over(tmp_path, moment, links):
    """Like one that vanished, whichever question it is that meets the file in its place."""
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "f").write_text("x")
    (tmp_path / "other").write_text("x")
    if links:
        (directory / "link").symlink_to(tmp_path)
    retry = Retry(budget_s=0.0)

    def call(operation: str, name: str, action: Callable[[], Any]) -> Any:
        if (operation, name) == moment and directory.is_dir():
            become_a_file(directory)
        return retry.call(operation, name, action)

    found = Walk(call, str(tmp_path), sizes=True).run(str(tmp_path)).names
    assert b"other" in found
    assert set(found) <= {b"other", b"d", b"d/f"}


class Moving(Crew):
    """A crew that has moved whenever it is looked at; after ten looks its step may end."""

    looks = 0

    def __init__(self, root: str, stall_s: float) -> None:
        self.go_on = threading.Event()
        super().__init__(root, stall_s)

    @property
    def progress(self) -> int:  # type: ignore[override]
        """A number that it never had before."""
        self.looks += 1
        if self.looks == 10:
            self.go_on.set()
        return self.looks

    @progress.setter
    def progress(self, value: int) -> None:
        pass


def test_a_listing_goes_on_for_as_long_as_it_moves():
    """However much longer than it would wait for the next move."""
    crew = Moving("/x", stall_s=0.02)
    crew.run([Step("", lambda: [] if crew.go_on.wait(150) else None)])
    assert crew.looks >= 10


def become_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("x")
