"""A second name for a checkpoint that was saved last, made once that is published."""

import os
from collections.abc import Callable
from typing import Any

from air_lightning.checkpoint import attempt
from air_lightning.checkpoint.catalog import remove_checkpoint
from air_lightning.checkpoint.clone import can_clone, clone
from air_lightning.volumes import path as volume_path

Action = Callable[[], None]


class SecondNames:
    """Makes second names where the file system has links; remembers where it has none."""

    def __init__(self) -> None:
        self._clones: dict[str, bool] = {}

    def clone(self, path: Any, name: Any) -> Action | None:
        """What lets a second directory share the files of the first; None where nothing can."""
        source = volume_path.normalize(path, allow_local=True)
        target = volume_path.normalize(name, allow_local=True)
        parent = volume_path.parent(target)
        if volume_path.parent(source) != parent or target.startswith("/Volumes/"):
            return None  # a volume has no links, and is not asked for them
        if parent not in self._clones:
            self._clones[parent] = can_clone(target)
        if not self._clones[parent]:
            return None

        def make() -> None:
            written = attempt.choose(target, None)
            clone(attempt.newest(source, None), written)
            attempt.settle(written, None)

        return make


def link(path: Any, link: Any) -> Action | None:
    """What makes a symbolic link lead to a checkpoint; None where links are not asked for."""
    target = volume_path.normalize(path, allow_local=True)
    name = volume_path.normalize(link, allow_local=True)
    local, there = volume_path.local_dir(target), volume_path.local_dir(name)
    if local is None or there is None or name.startswith("/Volumes/"):
        return None

    def make() -> None:
        remove_checkpoint(name)
        os.symlink(os.path.relpath(local, os.path.dirname(there)), there)

    return make
