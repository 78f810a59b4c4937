"""Generators: what is drawn after a restore is what was drawn after the capture."""

import io
import random

import numpy as np
import pytest
import torch

from air_lightning.checkpoint.rng import capture_rng_state, restore_rng_state
from air_lightning.errors import StateError


@pytest.fixture(autouse=True)
def _generators_put_back():
    before = capture_rng_state()
    yield
    restore_rng_state(before)


def _draw():
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_draws_after_restore_equal_draws_after_capture():
    """Python, NumPy and torch go on from the captured point, a kept second Gaussian included."""
    random.gauss(0, 1)
    np.random.standard_normal()
    state = capture_rng_state()
    expected = _draw()
    _draw()
    restore_rng_state(state)
    assert _draw() == expected


def test_state_survives_a_file_loaded_with_weights_only():
    """A captured state loads with weights_only=True and restores the same draws."""
    state = capture_rng_state()
    expected = _draw()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    restore_rng_state(torch.load(file, weights_only=True))
    assert _draw() == expected


def test_capture_draws_nothing():
    """Taking a state does not move any generator."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = _draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    capture_rng_state()
    assert _draw() == expected


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": None}, None, [1]])
def test_unknown_version_is_refused(state):
    """A state of another version, or no state at all, is an error that names the version wanted."""
    with pytest.raises(StateError, match="reads version 1"):
        restore_rng_state(state)


def test_incomplete_state_is_refused():
    """A state without one of its generators is an error that names it."""
    state = capture_rng_state()
    del state["numpy"]
    with pytest.raises(StateError, match="has no numpy"):
        restore_rng_state(state)


def test_state_that_a_generator_refuses_changes_nothing():
    """If torch refuses its part, Python and NumPy are as before, too."""
    state = capture_rng_state()
    _draw()
    before = capture_rng_state()
    expected = _draw()
    restore_rng_state(before)
    state["torch"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(StateError, match="nothing was restored"):
        restore_rng_state(state)
    assert _draw() == expected


def test_other_number_of_cuda_devices_warns(caplog):
    """States of devices that do not exist here are left out, with a warning giving both numbers."""
    state = capture_rng_state()
    count = torch.cuda.device_count()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (count + 2)
    if count:
        state["cuda"][:count] = torch.cuda.get_rng_state_all()
    restore_rng_state(state)
    assert f"{count + 2} CUDA devices and this process sees {count}" in caplog.text
