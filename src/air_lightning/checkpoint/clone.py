"""A second name for a checkpoint that is whole already, without writing its bytes twice.

Hard links, where the file system has them (local disks; volumes do not): the copy stays when the
first one is deleted. The files of a checkpoint are never changed in place, so that both names may
share them. ``.metadata`` is linked last: until then the copy is no checkpoint.
"""

import contextlib
import os
import secrets

from air_lightning.checkpoint.manifest import METADATA, is_ours, retire
from air_lightning.volumes import path as paths
from air_lightning.volumes.storage import open_storage


def can_clone(target: str) -> bool:
    """Whether a file beside ``target`` can be linked."""
    local = paths.local_dir(target)
    if local is None:
        return False
    probe = f"{os.path.dirname(local)}/.link-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.makedirs(os.path.dirname(local), exist_ok=True)
        with open(probe, "xb"):
            pass
        os.link(probe, f"{probe}.2")
    except OSError:
        return False
    finally:
        for name in (probe, f"{probe}.2"):
            with contextlib.suppress(OSError):
                os.unlink(name)
    return True


def clone(source: str, target: str) -> None:
    """Make ``target`` a checkpoint of the same files as ``source``.

    Args:
        source: A complete checkpoint on this machine's file systems.
        target: A directory beside it; what it holds of an earlier checkpoint goes.

    Raises:
        OSError: A file cannot be linked; ``target`` is then no checkpoint.
    """
    here, there = paths.local_dir(source), paths.local_dir(target)
    assert here is not None
    assert there is not None
    os.makedirs(there, exist_ok=True)
    retire(open_storage(target, allow_local=True))
    ours = [name for name in os.listdir(here) if is_ours(name)]
    names = sorted(ours, key=lambda name: (name == METADATA, name))
    for name in names:
        os.link(f"{here}/{name}", f"{there}/{name}")
