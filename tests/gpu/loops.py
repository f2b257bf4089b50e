"""Training runs of the small models on any device, with or without an exporter."""

import threading
import warnings
from contextlib import contextmanager, nullcontext

import torch

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    HistogramSubscriber,
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    PercentileSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, PARAMETER_KINDS
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop

KINDS = (*FORWARD_KINDS, *PARAMETER_KINDS)
STATISTICS = (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber)
HISTOGRAMS = (PercentileSubscriber, HistogramSubscriber)
STEPS = 4


class DeviceLoop(Loop):
    """A training run whose weights and batches are those of the CPU, on another device."""

    def __init__(self, name, device):
        super().__init__(CASES[name])
        self.model.to(device)
        self.optimizer = CASES[name].optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.batches = [[x.to(device) for x in Loop.batch(self)] for _ in range(6 * STEPS + 3)]  # moved beforehand

    def batch(self):
        return self.batches.pop(0)


def subscribers(backend, classes=STATISTICS, kinds=KINDS):
    return [make(kind, backend=backend, **_options(make)) for kind in kinds for make in classes]


def _options(make):
    return {"exact": True, "subsample": 1} if make in HISTOGRAMS else {}


def watched(loop, made, on_error="raise"):
    """Return an open exporter of a loop, whose errors are raised by default."""
    exporter = Exporter(message_bus=MessageBus("gpu"), on_error=on_error)
    exporter.add_modules(loop.model)
    exporter.set_loss(loop.loss)
    for subscriber in made:
        exporter.message_bus.register_subscriber(subscriber)
    return exporter


def published(name, device, classes=STATISTICS, kinds=KINDS, around=nullcontext):
    """Return the values that are published in a training run, by kind, series and step."""
    backend, loop = RecordingBackend(), DeviceLoop(name, device)
    exporter = watched(loop, subscribers(backend, classes, kinds))
    with around():
        loop.run(STEPS)
    exporter.close()
    health = exporter.health()
    assert (health.errors, health.dropped, health.skipped) == (0, 0, 0)
    return {(series.kind, series.name, step): value for series, value, step in backend.values}


@contextmanager
def waits_of_training():
    """Yield a list of the synchronisations that torch finds in this thread; the thread of ikkuna is meant to wait."""
    found, mine, before = [], threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def show(message, *args, **kwargs):
        if threading.get_ident() == mine and "called a synchronizing" in str(
            message
        ):  # torch also says that this is a prototype
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
