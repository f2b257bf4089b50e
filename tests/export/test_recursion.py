"""The share of Python's recursion limit that the hooks take."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber

LEVELS = 8


class Nested(nn.Module):
    """A chain in which each layer is called by the layer before it."""

    def __init__(self, depth):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x):
        x = self.layer(x)
        return x if self.inner is None else self.inner(x)


def train(depth, watch):
    """Train two steps; return the number of errors of the monitor."""
    model = Nested(depth)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Exporter(message_bus=MessageBus()) as exporter:
        if watch:
            exporter.add_modules(model)
            for kind in ("activations", "layer_gradients", "weights"):
                exporter.message_bus.register_subscriber(NormSubscriber(kind, backend="null"))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return exporter.health().errors


def deepest():
    """Return the greatest depth at which an unwatched model trains."""
    low, high = 1, 330
    while low < high:
        middle = (low + high + 1) // 2
        try:
            train(middle, watch=False)
            low = middle
        except RecursionError:
            high = middle - 1
    return low


@pytest.mark.fault(327)
def test_hooks_cost_few_levels_of_nested_modules():
    assert train(deepest() - LEVELS, watch=True) == 0
