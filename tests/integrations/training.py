"""A small training whose values go to a tracking service."""

import math

import numpy as np
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber
from ikkuna.store.names import Series
from ikkuna.store.values import Matrix


def train(backend, log_dir, steps=3, state=None, **options):
    """Train; return the state after the last step and the health after the end."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus("tracked"), log_dir=log_dir, config={"lr": 0.1}, **options) as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=backend))
        exporter.message_bus.register_subscriber(HistogramSubscriber("weights", subsample=1, backend=backend))
        if state is not None:
            exporter.load_state_dict(state)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).square().sum().backward()
            optimizer.step()
        state = exporter.state_dict()
        exporter.message_bus.run.flush(60)
        exporter.message_bus.run.close(60)
    return state, exporter.health()


def add_everything(backend, directory, tags=1000):
    """Add 1,000 tags, NaN, infinities, a matrix and a text, in two steps."""
    backend.open(directory)
    for step in range(2):
        for number in range(tags):
            backend.add_scalar(Series("weights_norm2", f"layer.{number}"), number + step / 2, step)
        for name, value in (("nan", math.nan), ("inf", math.inf), ("minus", -math.inf)):
            backend.add_scalar(Series(name), value, step)
        backend.add_matrix(Series("similarity"), Matrix(("a",), ("b", "c"), np.array([[float(step), math.nan]])), step)
        backend.add_text("Page", "a <b> & c", step)
        backend.commit(step)
    assert backend.flush(120)
    assert backend.close(120)
    assert backend.dropped == 0
