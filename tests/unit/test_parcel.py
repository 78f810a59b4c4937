"""How batches leave a worker: what is small in the message itself, everything as it was."""

import pickle
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from air_lightning.data import parcel
from air_lightning.data.loader import DataLoader
from air_lightning.data.worker import Delivered, Standing
from air_lightning.errors import InvalidTypeError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

DTYPES = (torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.complex64)
LARGE = parcel.MAX_BYTES + 1


class Given(IterableDataset):
    """Yields what it is given; its state is how many it has yielded."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.at = items, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]


def through_a_worker(items: list[Any]) -> list[Any]:
    loader = DataLoader(Given(items), batch_size=None, num_workers=1, collate_fn=lambda item: item)
    return list(loader)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_kind_of_tensor_comes_out_of_a_worker_as_it_was():
    """Bit for bit, with its type, shape and strides, whether it is small or large."""
    small = [torch.arange(7).to(dtype) for dtype in DTYPES]
    odd = [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12).view(3, 4).t(),
        torch.arange(9)[2:7:2],
        torch.zeros(1).expand(5),
        torch.tensor([float("nan"), -0.0]),
        torch.arange(LARGE, dtype=torch.float64),
    ]
    for sent, came in zip(small + odd, through_a_worker(small + odd), strict=True):
        assert (came.dtype, came.shape, came.stride()) == (sent.dtype, sent.shape, sent.stride())
        assert torch.equal(bits_of(came), bits_of(sent))


def test_what_is_no_plain_tensor_comes_out_of_a_worker_as_before():
    """A leaf that wants a gradient, a parameter, a sparse tensor, arrays, text and bytes."""
    leaf = torch.ones(3, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    item = {"leaf": leaf, "sparse": sparse, "array": np.arange(5), "text": "a", "bytes": b"b"}
    (came,) = through_a_worker([item])
    assert came["leaf"].requires_grad
    assert torch.equal(came["leaf"], leaf)
    assert torch.equal(came["sparse"].to_dense(), torch.eye(3))
    assert (came["array"] == np.arange(5)).all()
    assert (came["text"], came["bytes"]) == ("a", b"b")


def test_tensors_of_one_batch_that_share_memory_still_do():
    """A change through one of them is seen through the others, and by nobody else."""
    base = torch.arange(12)
    ((whole, square, part, again),) = through_a_worker([[base, base.view(3, 4), base[4:6], base]])
    whole[5] = -1
    assert (int(square[1, 1]), int(part[1]), int(base[5])) == (-1, -1, 5)
    assert again is whole


def test_small_tensors_need_no_shared_memory_and_others_stay_there():
    """No descriptor is fetched for a few labels; what a worker shares itself stays shared."""
    shared = torch.arange(4).share_memory_()
    ((small, large, own),) = through_a_worker(
        [[torch.arange(4), torch.zeros(LARGE, dtype=torch.uint8), shared]]
    )
    assert [tensor.is_shared() for tensor in (small, large, own)] == [False, True, True]
    own[0] = 7
    assert int(shared[0]) == 7


@given(sizes=st.lists(st.integers(1, LARGE), max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_message_takes_no_more_than_its_share_of_tensors(sizes):
    """However many small tensors a batch has: the rest goes by shared memory."""
    batch = [torch.full((size,), 3, dtype=torch.uint8) for size in sizes]
    came = parcel.loads(parcel.dumps(batch))
    resource_sharer.stop()  # the thread that hands descriptors out
    assert all(torch.equal(a, b) for a, b in zip(batch, came, strict=True))
    assert sum(tensor.nbytes for tensor in came if not tensor.is_shared()) <= parcel.MAX_BYTES


def test_a_batch_of_labels_with_its_standing_is_written_to_a_pipe_in_one_piece():
    """So a worker that is killed leaves no half of one, which the loader would wait for."""
    state = {"version": 1, "files": {"count": 10**9, "fingerprint": "f" * 32}, "delivered": 10**9}
    labels = torch.zeros(parcel.MAX_BYTES, dtype=torch.uint8)
    assert len(pickle.dumps(Delivered(labels, 47, Standing(10**9, state)).packed())) < 4096


class Packer:
    """Sends what it was packed by."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (threading.current_thread().name,)


def test_a_batch_is_packed_by_the_thread_that_made_it():
    """Before the worker goes on: what it does with its buffers later changes no small batch."""
    assert through_a_worker([Packer()]) == ["MainThread"]


def test_a_batch_that_cannot_be_sent_is_an_error_and_the_next_one_comes():
    """Where it was packed in the queue's thread, the loader waited for it without end."""
    lost = torch.ones(2, requires_grad=True) * 2
    items = [lambda: 0, 1, {"a": lost}, 2]
    loader = DataLoader(Given(items), batch_size=None, num_workers=1, collate_fn=lambda item: item)
    batches = iter(loader)
    for wanted, kind, why in [(1, "function", "pickle"), (2, "dict", "non-leaf")]:
        with pytest.raises(InvalidTypeError, match=rf"type {kind} cannot be sent.*{why}"):
            next(batches)
        assert next(batches) == wanted
