"""Fixtures of the tests on the simulated accelerator."""

import pytest
import torch

from ikkuna.numerics.elements import has_float64
from tests.simulated_device import features


@pytest.fixture
def without_float64(monkeypatch):
    """Let the simulated accelerator have no float64, as ``mps``."""
    has_float64.cache_clear()
    monkeypatch.setattr(features, "has_float64", False)
    yield
    has_float64.cache_clear()


@pytest.fixture
def like_mps(without_float64, monkeypatch):
    """Let it have no streams and events either."""
    for name in ("Event", "Stream", "stream", "current_stream", "default_stream"):
        monkeypatch.delattr(torch.sim, name)


@pytest.fixture
def kernels(request, monkeypatch):
    """Let the simulated accelerator have kernels, as with Triton; with ``--triton``, its interpreter runs them."""
    if not request.config.getoption("--triton"):
        from tests.simulated_device.triton import ReferenceKernels, install_triton

        install_triton(ReferenceKernels, monkeypatch.setattr)
