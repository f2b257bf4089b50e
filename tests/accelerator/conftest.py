"""Fixtures of the tests on the simulated accelerator."""

import pytest


@pytest.fixture
def kernels(request, monkeypatch):
    """Let the simulated accelerator have kernels, as with Triton; with ``--triton``, its interpreter runs them."""
    if not request.config.getoption("--triton"):
        from tests.simulated_device.triton import ReferenceKernels, install_triton

        install_triton(ReferenceKernels, monkeypatch.setattr)
