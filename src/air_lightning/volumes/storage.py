"""The one door to bytes on volumes: ``open_storage(path)`` gives a Storage, whatever the path.

* :mod:`~air_lightning.volumes.base`: what a Storage can do
* :mod:`~air_lightning.volumes.local`: volumes, ``file://`` and local paths
* :mod:`~air_lightning.volumes.remote`: every other URL, by fsspec
* :mod:`~air_lightning.volumes.transfer`: how a file is downloaded, in both
* :mod:`~air_lightning.volumes.retry`: transient errors, in both
"""

import os
from typing import Any

from air_lightning.volumes import path as volume_path
from air_lightning.volumes.base import Entry, FileInfo, Storage
from air_lightning.volumes.local import LocalStorage
from air_lightning.volumes.retry import Retry

__all__ = ["Entry", "FileInfo", "Retry", "Storage", "open_storage"]


def open_storage(
    path: str | os.PathLike[str],
    *,
    allow_local: bool = False,
    storage_options: dict[str, Any] | None = None,
    retry: Retry | None = None,
) -> Storage:
    """Open a directory of a volume, an object store or this machine.

    Args:
        path: A volume path, an fsspec URL or, if ``allow_local``, a local path. It need not exist.
        allow_local: Whether local paths are welcome.
        storage_options: Passed to fsspec; volumes and local paths need none.
        retry: How long to try on transient errors; by default a minute.

    Raises:
        InvalidPathError: The path is none of these, or no installed package knows its scheme.
        VolumeNotMountedError: A volume path, and no volumes on this machine.
    """
    root = volume_path.normalize(path, allow_local=allow_local)
    if volume_path.local_dir(root) is not None:
        return LocalStorage(root, retry=retry)
    # Otherwise every use of a volume would pay for the import of fsspec.
    from air_lightning.volumes.remote import FsspecStorage

    return FsspecStorage(root, storage_options=storage_options, retry=retry)
