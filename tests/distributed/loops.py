"""The training that every strategy runs, and the values published in it."""

import contextlib
import hashlib

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, PARAMETER_KINDS

STEPS = 3
BATCH = 12


class Network(nn.Module):
    """Two blocks with a normalisation in between; with 4 ranks the last layer has an empty shard."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.relu = nn.ReLU()
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        return self.last(x + self.block(x))


class Positional(Network):
    """The network, with an embedding that does not depend on the data."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(1, 8)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x) + self.positions(torch.zeros(1, dtype=torch.long))))
        return self.last(x + self.block(x))


def positional():
    torch.manual_seed(1)
    return Positional()


def network():
    torch.manual_seed(1)
    return Network()


def data(steps=STEPS, batch=BATCH):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps, batch, 6, generator=generator)
    return inputs, torch.randint(3, (steps, batch), generator=generator)


def every_metric(kinds=(*FORWARD_KINDS, *PARAMETER_KINDS)):
    """Return subscribers of every kind, and a list of what they publish."""
    names = ("Norm", "Mean", "Variance", "MinMax", "Sparsity", "Percentile")
    made = [_make(name, kind) for kind in kinds for name in names]
    return [*made, installed.TrainAccuracySubscriber(backend="null"), _make("Mean", "loss")]


def _make(name, kind):
    exact = {"exact": True} if name == "Percentile" else {}
    return getattr(installed, f"{name}Subscriber")(kind, backend="null", **exact)


@contextlib.contextmanager
def watching(model, loss, subscribers, bus=None, **options):
    """Register `subscribers`; yield the exporter and the dictionary of published values, (kind, series, step) → value."""
    bus = bus or MessageBus("test")
    published = {}

    def note(message):
        published[message.kind, message.series_name, message.global_step] = message.data

    with Exporter(message_bus=bus, **{"on_error": "raise", **options}) as exporter:
        exporter.add_modules(model)
        if loss is not None:
            exporter.set_loss(loss)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        names = list(dict.fromkeys(name for s in subscribers for name in s.publishes))
        if names:
            bus.register_subscriber(CallbackSubscriber(names, note, tag=None))
        yield exporter, published


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model, loss, optimizer, inputs, labels):
    """Train; return the losses."""
    losses = []
    for x, y in zip(inputs, labels, strict=True):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def steps_by_hand(model, loss, exporter, inputs, labels):
    """Train without an optimizer of torch."""
    for x, y in zip(inputs, labels, strict=True):
        loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        exporter.step()
        model.zero_grad()


def published_of(model, inputs, labels, subscribers=None, optimizer=sgd, train=steps):
    """Return the values published in a training on these batches."""
    loss = nn.CrossEntropyLoss()
    with watching(model, loss, subscribers or every_metric()) as (_, published):
        train(model, loss, optimizer(model), inputs, labels)
    return published


def local(inputs, labels, rank, size):
    """Return this rank's equal part of every batch."""
    n = inputs.shape[1] // size
    part = slice(rank * n, (rank + 1) * n)
    return inputs[:, part], labels[:, part]


def fingerprint(*tensors):
    """Return a hash of the bits of tensors and of the random state."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
