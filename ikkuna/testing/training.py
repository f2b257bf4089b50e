"""A small training run, and the values that subscribers show in it."""

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
    kind : str
        The kind, such as ``"weights_norm2"``.
    name : str or None
        The module, with the parameter's or output's own name if needed; ``None`` for the whole network.
    step : int
        Number of the optimizer step.
    value : Any
        A float, or a histogram.
    """

    kind: str
    name: str | None
    step: int
    value: Any


def small_model() -> nn.Module:
    """Return a network with the layers ``first``, ``relu`` and ``last``, from 4 inputs to 3 classes, the same at every call.

    Global random generators are not used.

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
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") / 2)
    return model


def _small_batch() -> Batch:
    """Return inputs (8, 4) and labels (8,) for the small model."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 4, generator=generator, device="cpu")
    return inputs, torch.randint(0, 3, (8,), generator=generator, device="cpu")


def train(
    model: nn.Module,
    subscribers: Sequence[Subscriber] = (),
    steps: int = 3,
    batch: Batch | None = None,
    bus: MessageBus | None = None,
) -> dict[str, Any]:
    """Train `model` on one batch with momentum and cross-entropy; return losses, weights, gradients and optimizer state.

    The subscribers are registered in order on `bus`, by default a new one; their errors are raised.
    Without subscribers no exporter is created.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    inputs, labels = (x.to(device) for x in (batch if batch is not None else _small_batch()))
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
    """Train for some steps and return the values that the subscribers show, in order.

    The values are kept in memory instead of the subscribers' own backends; no file is written.
    Errors of subscribers are raised.

    Parameters
    ----------
    *subscribers : Subscriber
        Created without ``message_bus``; a subscriber of results comes after their publisher.
    model : nn.Module, optional
        `small_model` by default.
    steps : int
        Number of optimizer steps.
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
