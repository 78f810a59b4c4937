"""Classes beyond torch's own list whose pickles run nothing: paths, NumPy numbers and arrays.

Hyper-parameters hold them all the time. Lightning's own checkpoint brings them back; with
``weights_only=True`` alone a run that saved for days would be refused at its resume.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_CODES = "?bhilqBHILQefdgFDGSU"  # numbers, bytes and str: not objects, which hold pickles


def harmless_names() -> frozenset[str]:
    """Return the names under which pickles refer to these classes and functions."""
    return frozenset(_name(item) for item in _harmless())


@contextlib.contextmanager
def harmless_allowed() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` build these too, while the context is open."""
    with torch.serialization.safe_globals(_harmless()):
        yield


def _harmless() -> list[Any]:
    paths: list[Any] = [pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())]
    dtypes: set[Any] = {type(np.dtype(code)) for code in _CODES}
    functions = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    return [*paths, np.ndarray, np.dtype, *functions, *sorted(dtypes, key=_name)]


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"
