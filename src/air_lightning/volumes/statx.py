"""Size and time of an open file, without a round trip where the kernel knows both.

A read through a FUSE mount makes the kernel forget the access time, and ``fstat`` asks for that,
too: the mount is asked once more for each file that was read. Linux's ``statx`` asks for no more
than it is told to.
"""

import ctypes
import os
import struct

from air_lightning.volumes.libc import c_function

_AT_EMPTY_PATH = 0x1000
_MTIME_AND_SIZE = 0x0040 | 0x0200
_LAYOUT = struct.Struct("=40xQ64xqI")  # of struct statx: stx_size, stx_mtime
_BYTES = 256

_statx = c_function("statx")


def size_and_mtime(descriptor: int) -> tuple[int, float]:
    """Bytes and modification time (seconds since the epoch) of an open file.

    Raises:
        OSError: The file system does not say.
    """
    buffer = ctypes.create_string_buffer(_BYTES)
    if _statx is not None and not _statx(descriptor, b"", _AT_EMPTY_PATH, _MTIME_AND_SIZE, buffer):
        size, seconds, nanoseconds = _LAYOUT.unpack_from(buffer)
        return size, seconds + 1e-9 * nanoseconds
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime
