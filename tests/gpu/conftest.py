"""The CUDA device of these tests, and deterministic algorithms on it."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, and is deterministic only with it


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def deterministic():
    """Let equal computations give equal bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def full_precision():
    """Multiply matrices in single precision, as the CPU does."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
