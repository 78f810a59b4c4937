"""What clients of object stores say of an object: whether it is a file, its size and time."""

import contextlib
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from air_lightning.volumes.base import UNKNOWN_SIZE

_MTIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def is_marker(path: str, info: Mapping[str, Any]) -> bool:
    """Whether a key stands for a folder, as consoles of object stores write them: no file."""
    return path.endswith("/") or info.get("type") == "directory"


def is_hidden(name: str) -> bool:
    """Whether a segment starts with a dot; thus no name with '..' leaves this module either."""
    return not name or any(segment.startswith(".") for segment in name.split("/"))


def is_nameless(name: str) -> bool:
    """Whether a segment is empty: on local disk ``a//b`` would be ``a/b``, which is another key."""
    return "//" in name or name.startswith("/")


def size_of(info: Mapping[str, Any]) -> int:
    """Bytes, or ``UNKNOWN_SIZE`` where the client does not tell."""
    size = info.get("size")
    return UNKNOWN_SIZE if size is None else int(size)


def mtime_of(info: Mapping[str, Any]) -> float:
    """Seconds since 1970, under whatever name and in whatever form; 0.0 where it is not told."""
    when = next((info[key] for key in _MTIME_KEYS if info.get(key) is not None), 0.0)
    if isinstance(when, datetime):
        return when.timestamp()
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
        return 0.0
    return float(when) if math.isfinite(when) else 0.0
