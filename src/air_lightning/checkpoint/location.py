"""Where a storage reader or writer of DCP points to."""

import os
from typing import Any

from air_lightning.errors import (
    InvalidArgumentError,
    InvalidPathError,
    UnsafeCheckpointError,
)
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import Storage, open_storage


class OnVolume:
    """A path and its storage, opened at first use: an unopened one pickles and forks."""

    path: str

    def place(self, path: str | os.PathLike[str], options: dict[str, Any] | None) -> None:
        """Point to ``path``; torch's constructor, which makes a ``Path`` of it, comes before."""
        self.path = paths.normalize(path, allow_local=True)
        self._storage_options = options
        self._opened: Storage | None = None

    def move(self, path: str | os.PathLike[str]) -> bool:
        """Go to another path; says whether it is another."""
        before = self.path
        self.place(path, self._storage_options)
        return self.path != before

    @property
    def _storage(self) -> Storage:
        if self._opened is None:
            self._opened = open_storage(
                self.path, allow_local=True, storage_options=self._storage_options
            )
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def checkpoint_id(self) -> str:
        """The path as users see it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether this is a path that can be written to and read from."""
        try:
            paths.normalize(checkpoint_id, allow_local=True)
        except (InvalidPathError, TypeError):
            return False
        return True


def refuse_link_out(path: str, name: str) -> None:
    """Refuse to read a file of a checkpoint that is a link to somewhere else.

    Raises:
        UnsafeCheckpointError: Names the file and where it leads.
    """
    directory = paths.local_dir(path)
    if directory is None or ("/" not in name and not os.path.islink(f"{directory}/{name}")):
        return
    real, home = os.path.realpath(f"{directory}/{name}"), os.path.realpath(directory)
    if not real.startswith(f"{home}/"):
        raise UnsafeCheckpointError(
            f"{path}/{name} is a link that leads out of the checkpoint, to {real}; nothing of it "
            "was read. If you put it there yourself, copy the checkpoint with cp -rL."
        )


def require_count(name: str, value: object, *, least: int, optional: bool = False) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Raises:
        InvalidArgumentError: Names the argument and the value.
    """
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = f"a whole number, {least} or more" + (", or None" if optional else "")
        raise InvalidArgumentError(f"{name}={value!r} was given; wanted {wanted}.")
