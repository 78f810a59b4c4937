"""Python's, NumPy's and torch's global generators: seeded, borrowed, and put back.

The promise: what makes items draws from them as if nothing else had, and nothing else notices.
"""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy.random as np_random  # else it is imported at its first use: once in each worker
import torch


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator with an unsigned 64-bit number."""
    random.seed(seed)
    # Both are the same generator: without a third word NumPy would draw what Python draws.
    np_random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    # Not torch.manual_seed: per batch, it would queue a seeding of CUDA, stack trace included.
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def borrowed_generators() -> Iterator[None]:
    """Give the process's generators back as they were.

    Without workers, items are made between training steps: their draws would otherwise change
    dropout and initialisation, and those would change the augmentations.
    """
    give_back = _taken()
    try:
        yield
    finally:
        give_back()


@contextlib.contextmanager
def without_trace() -> Iterator[None]:
    """Give the process's generators back as they were if the block fails.

    What a try that failed has drawn would change all draws after it, and a resumed run may try
    other files.
    """
    give_back = _taken()
    try:
        yield
    except BaseException:
        give_back()
        raise


def _taken() -> Callable[[], None]:
    """The generators as they are now: a function that puts them back."""
    python, numpy, torch_cpu = random.getstate(), np_random.get_state(), torch.get_rng_state()

    def give_back() -> None:
        random.setstate(python)
        np_random.set_state(numpy)
        torch.set_rng_state(torch_cpu)

    return give_back
