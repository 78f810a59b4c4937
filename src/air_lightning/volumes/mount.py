"""Telling a file that is missing from a mount that is missing.

A FUSE mount whose server died answers ENOTCONN, which is retried like any trouble of the moment.
One that was unmounted (to be mounted again) leaves an empty directory: every file below it is
FileNotFoundError, and a run would take the whole volume for deleted, a checkpoint for never made.
"""

import errno
import os
import re
from collections.abc import Callable
from typing import TextIO, TypeVar

_T = TypeVar("_T")

_MOUNTS = "/proc/self/mountinfo"
_LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "overlay"})


class MountGuard:
    """Remembers which mount a directory lies on, and notices when that is gone.

    Args:
        directory: An absolute path on this machine.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._point: str | None = None

    def run(self, action: Callable[[], _T]) -> _T:
        """Perform an action; where a file is missing since the mount is, say so.

        Raises:
            OSError: ENOTCONN, which is transient: the mount is gone.
        """
        if self._point is None:
            self._point = _mount_point(self._directory)
        try:
            return self._checked(action)
        except FileNotFoundError:
            if not self._may_go:
                raise
        # It may have been away when it was asked, and be back when it was looked for.
        return self._checked(action)

    def _checked(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except FileNotFoundError as error:
            self.check(error)
            raise

    def check(self, cause: BaseException | None = None) -> None:
        """Raise ENOTCONN if the mount is gone. Asks the kernel, never the mount: it may hang."""
        if self._may_go and self._point not in _mount_points():
            raise OSError(errno.ENOTCONN, f"{self._point} is no longer mounted") from cause

    @property
    def _may_go(self) -> bool:
        return self._point not in (None, "", "/")


def is_local_disk(directory: str) -> bool:
    """Whether a directory lies on a disk of this machine, as far as one can know.

    Args:
        directory: An absolute path on this machine.
    """
    return file_system_type(directory) in _LOCAL_DISKS


def file_system_type(directory: str) -> str:
    """The type of the file system that a directory lies on; empty where the system does not tell.

    Args:
        directory: An absolute path on this machine.
    """
    try:
        device = os.stat(directory).st_dev
        with _mounts() as mounts:
            types = dict(_device_and_type(line) for line in mounts)
    except OSError:
        return ""
    return types.get(f"{os.major(device)}:{os.minor(device)}", "")


def _mount_point(directory: str) -> str:
    """The mount point that a directory lies on; empty where the system does not tell."""
    points = _mount_points()
    path = os.path.realpath(directory)
    while path not in points:
        if path == "/":
            return ""
        path = os.path.dirname(path)
    return path


def _mount_points() -> set[str]:
    try:
        with _mounts() as mounts:
            return {_unescaped(line.split(" ", 5)[4]) for line in mounts}
    except OSError:
        return {"/"}  # no Linux, or no /proc: then a missing file is a missing file


def _mounts() -> TextIO:
    return open(_MOUNTS, encoding="utf-8", errors="surrogateescape")


def _device_and_type(line: str) -> tuple[str, str]:
    # By device and not by path: a mount that a later one hides is still listed.
    # proc_pid_mountinfo(5): optional fields in the middle end with a dash.
    before, _, after = line.partition(" - ")
    return before.split(" ", 3)[2], after.partition(" ")[0]


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
