"""A batch on its way out of a worker: what is small lies in the message itself.

torch sends each tensor as a descriptor of shared memory, which the receiver fetches through a
socket and a handshake of its own: half a millisecond of CPU for a few labels. So::

    dumps    the storages of small tensors go as bytes, until a message is full; all else as torch
             sends it: what is large, what lies in shared memory already, other devices
    loads    the tensors come as they were: those that shared a storage share one again

A message that is not larger than what a pipe takes in one piece is there or not there, also when
its worker is killed. That is why a message is full so soon.
"""

import ctypes
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from typing_extensions import override

from air_lightning.errors import InvalidTypeError

MAX_BYTES = 2048
"""Of tensors in one message: half of the 4096 that Linux writes in one piece."""


class _Packer(ForkingPickler):
    """Pickles what ``ForkingPickler`` does, small storages by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._left = MAX_BYTES

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.UntypedStorage or obj.device.type != "cpu" or obj.is_shared():
            return NotImplemented
        size = obj.nbytes()
        if not 0 < size <= self._left:
            return NotImplemented
        self._left -= size
        return _storage, (ctypes.string_at(obj.data_ptr(), size),)


def dumps(batch: Any) -> bytes:
    """A batch, to be opened in another process of this loader.

    Raises:
        InvalidTypeError: It cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Packer(file).dump(batch)
    except OSError:  # of descriptors, or of shared memory
        raise
    except Exception as error:
        raise InvalidTypeError(
            f"A batch of type {type(batch).__name__} cannot be sent from its worker to the "
            f"training process ({type(error).__name__}: {error}). Wanted are tensors, arrays and "
            "what else pickle takes: have the dataset or collate_fn return such, or use "
            "num_workers=0."
        ) from error
    return file.getvalue()


def loads(parcel: bytes) -> Any:
    """The batch, in the process that gets it: shared memory can be fetched once."""
    return pickle.loads(parcel)


def _storage(data: bytes) -> torch.UntypedStorage:
    return torch.UntypedStorage.from_buffer(data, dtype=torch.uint8)
