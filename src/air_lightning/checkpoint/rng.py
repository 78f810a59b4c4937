"""Capture and restore random number generators, so that a resumed run draws the same numbers.

Covered are the global generators of Python, NumPy and torch (the CPU and every CUDA device).
A state holds JSON types and byte tensors only, so that it loads with ``weights_only=True``.
Restoring checks the version first, and everything is read before anything is changed: a state
that does not fit leaves all generators as they were.
"""

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from air_lightning.errors import StateError

_VERSION = 1
_KEYS = ("python", "numpy", "torch", "cuda")
_log = logging.getLogger("air_lightning")


def capture_rng_state() -> dict[str, Any]:
    """Return the state of the global generators of this process.

    CUDA is asked only if this process has used it: asking would create a context on it.

    Returns:
        ``{"version": 1, "python": [...], "numpy": {...}, "torch": uint8 tensor, "cuda": [...]}``,
        with one uint8 tensor for each CUDA device.
    """
    version, words, gauss = random.getstate()
    return {
        "version": _VERSION,
        "python": [version, list(words), gauss],
        "numpy": _to_json(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators into the state that :func:`capture_rng_state` returned.

    With another number of CUDA devices, those that exist are restored, and a warning is logged.

    Args:
        state: What :func:`capture_rng_state` returned, here or in another process.

    Raises:
        StateError: The state is of another version, incomplete, or no generator takes it.
    """
    _check(state)
    before = capture_rng_state()
    try:
        _apply(state)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        _apply(before)
        raise StateError(
            f"The RNG state was refused by a generator ({error}). A dict that "
            "capture_rng_state() returned is wanted; nothing was restored."
        ) from error


def _check(state: Mapping[str, Any]) -> None:
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != _VERSION:
        given = repr(version) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(
            f"The RNG state has version {given}; this release reads version {_VERSION}. Pass a "
            "dict that capture_rng_state() returned, or install the release that wrote it."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise StateError(
            f"The RNG state has no {', '.join(missing)}; {', '.join(_KEYS)} are wanted. Pass a "
            "dict that capture_rng_state() returned, unchanged."
        )


def _apply(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(_from_json(state["numpy"]))
    torch.set_rng_state(state["torch"])
    _apply_cuda(state["cuda"])


def _apply_cuda(states: list[torch.Tensor]) -> None:
    count = torch.cuda.device_count() if states else 0
    if count != len(states):
        _log.warning(
            "The RNG state has %d CUDA devices and this process sees %d: the first %d are "
            "restored, so random numbers drawn on others differ from those of the saved run.",
            len(states),
            count,
            min(count, len(states)),
        )
    for device, device_state in enumerate(states[:count]):
        torch.cuda.set_rng_state(device_state, device)


def _to_json(value: Any) -> Any:
    """Replace arrays by lists with their type: ``weights_only=True`` refuses NumPy's pickles."""
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"dtype", "values"}:
        return np.asarray(value["values"], dtype=value["dtype"])
    return {key: _from_json(item) for key, item in value.items()}
