"""Functions of the C library that Python does not offer yet."""

import ctypes
from collections.abc import Callable


def c_function(name: str) -> Callable[..., int] | None:
    """A function that returns an int and sets ``errno``.

    Args:
        name: Its name.

    Returns:
        The function; None without Linux, or with a C library that is too old for it.
    """
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
