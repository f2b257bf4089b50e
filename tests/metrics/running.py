"""Runs that pass chosen tensors to a metric through an exporter."""

from collections import defaultdict

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.testing import RecordingBackend


class Passing(nn.Module):
    """Calls a module once with each tensor it is given: these are its activations."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, *tensors):
        return [self.layer(tensor) for tensor in tensors]


def curves(recording):
    """Return (kind, module) → values in the order of their steps."""
    found = defaultdict(list)
    for series, value, _ in recording.values:
        found[series.kind, series.name].append(value)
    return dict(found)


def watched(make, *steps):
    """Return kind → values that `make(backend=...)` shows for activations.

    A step is a tensor, or a list with one tensor for each call.
    """
    recording, bus = RecordingBackend(), MessageBus()
    model = Passing()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(make(backend=recording))
        for step in steps:
            model(*step) if isinstance(step, list) else model(step)
            exporter.step()
        assert not exporter.health().errors
    assert {name for _, name in curves(recording)} <= {"layer"}
    return {kind: values for (kind, _), values in curves(recording).items()}


def trained(makers, model, steps=3, optimizer=None, batch=None, loss=None):
    """Train `model` under subscribers; return (kind, module) → values, and the weights before each step."""
    recording, bus = RecordingBackend(), MessageBus()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    before = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        if loss is not None:
            exporter.set_loss(loss)
        for make in makers:
            bus.register_subscriber(make(backend=recording))
        for step in range(steps):
            before.append({name: value.detach().clone() for name, value in model.named_parameters()})
            optimizer.zero_grad()
            model(torch.ones(2, 3) if batch is None else batch(step)).square().mean().backward()
            optimizer.step()
    return curves(recording), before
