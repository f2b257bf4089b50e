"""A training run small enough for a test, and what a subscriber says of it."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.exporter import Exporter
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.testing.recording import RecordingBackend

__all__ = ["Value", "run", "small_model", "train"]

Batch = tuple[Tensor, Tensor]


class Value(NamedTuple):
    """One value of a series.

    Parameters
    ----------
    kind : such as ``"weights_norm2"``
    name : module, with the parameter's or output's own name where it needs one; ``None`` for the whole network
    step : number of the optimizer step
    value : a float, or a histogram
    """

    kind: str
    name: str | None
    step: int
    value: Any


def small_model() -> nn.Module:
    """Return a network of the layers ``first``, ``relu`` and ``last`` from 4 inputs to 3 classes, the same at every call.

    No random number of anyone else's is used up.

    Examples
    --------
    >>> [name for name, _ in small_model().named_children()]
    ['first', 'relu', 'last']
    """
    first, last = nn.utils.skip_init(nn.Linear, 4, 8), nn.utils.skip_init(nn.Linear, 8, 3)
    model = nn.Sequential(OrderedDict(first=first, relu=nn.ReLU(), last=last))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def _small_batch() -> Batch:
    """Return inputs (8, 4) and labels (8,) for the small model."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(
    model: nn.Module,
    subscribers: Sequence[Subscriber] = (),
    steps: int = 3,
    batch: Batch | None = None,
    bus: MessageBus | None = None,
) -> dict[str, Any]:
    """Train `model` on one batch with momentum and cross-entropy, and return everything the training consists of.

    Subscribers are registered on `bus`, by default a new one, in their order; an error of theirs is raised.
    Without subscribers nobody looks.
    """
    inputs, labels = batch if batch is not None else _small_batch()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = None
    if subscribers:
        exporter = Exporter(message_bus=bus or MessageBus("testing"), on_error="raise")
    losses = []
    try:
        if exporter is not None:
            exporter.add_modules(model)
            exporter.set_loss(loss_function)
            for subscriber in subscribers:
                exporter.message_bus.register_subscriber(subscriber)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_function(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    finally:
        if exporter is not None:
            exporter.close()
    return {
        "losses": losses,
        "model": model.state_dict(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
    }


def run(
    *subscribers: Subscriber, model: nn.Module | None = None, steps: int = 3, batch: Batch | None = None
) -> list[Value]:
    """Train for some steps and return the values that subscribers show, in order.

    Whatever backend they name, their values are kept in memory and no file is written.
    An error of theirs is raised.

    Parameters
    ----------
    *subscribers : Subscriber
        Made without ``message_bus``; one that takes another's results comes after it.
    model : nn.Module, optional
        `small_model` by default.
    steps : int
        How many optimizer steps.
    batch : pair of Tensor, optional
        Inputs of the model, and labels for cross-entropy with its output; (8, 4) and 3 classes by default.

    Examples
    --------
    >>> from ikkuna.export.subscriber import NormSubscriber
    >>> values = run(NormSubscriber("weights", p=0))
    >>> values[0]
    Value(kind='weights_norm0', name='first', step=0, value=32.0)
    >>> len(values)                   # two layers, three steps
    6
    """
    recording = RecordingBackend()
    for subscriber in subscribers:
        subscriber.backends = (recording,)
    train(model if model is not None else small_model(), subscribers, steps, batch)
    return [Value(series.kind, series.name, step, value) for series, value, step in recording.values]
