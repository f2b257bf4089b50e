"""Runs in which a metric evaluates a model several times, with changes in between."""

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves


class Fixed(nn.Module):
    """Returns given tensors, one for each layer; the input selects their rows."""

    def __init__(self, *tensors):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in tensors)
        self.weight = nn.Parameter(torch.ones(1))  # something to train
        self.tensors = list(tensors)

    def forward(self, index):
        return [layer(x[index.flatten().long()]) for layer, x in zip(self.layers, self.tensors, strict=True)]


def rows(n):
    """Return the probe set for a `Fixed` model: the numbers of its rows."""
    return torch.arange(float(n))


def evaluated(make, model, *changes, batch=None, on_error="raise"):
    """Return (kind, module) → values of the evaluations of a model: one after registration, and one after each change."""
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error=on_error) as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(make(backend=recording))
        for change in changes:
            change(model)
            session = exporter._session
            session.cycle.apply(session.context.tracker.forward_begins(0))
            session.context.tracker.forward_ends(0)
            exporter.step()
        assert on_error != "raise" or not exporter.health().errors
    return curves(recording)


def unchanged(model):
    """Change nothing."""


def with_tensors(*tensors):
    """Return a change of what a `Fixed` model returns."""

    def change(model):
        model.tensors = list(tensors)

    return change
