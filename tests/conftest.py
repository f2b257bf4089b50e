"""Fixtures of all tests: a new bus, a seed, and a check that no global hook is left."""

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from ikkuna.export.messages import MessageBus


@pytest.fixture
def bus() -> MessageBus:
    return MessageBus("test")


@pytest.fixture(autouse=True)
def leaves_no_global_hooks():
    torch.manual_seed(0)
    yield
    assert not torch_optimizer._global_optimizer_pre_hooks, "a test left an exporter open"
    assert not torch_optimizer._global_optimizer_post_hooks
