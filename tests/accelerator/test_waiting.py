"""Nothing waits for a device: with every installed subscriber at once, on sampled steps and others."""

import math
from functools import cache

import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import SpeedSubscriber
from ikkuna.testing import RecordingBackend
from tests.gpu.loops import DeviceLoop
from tests.simulated_device import recorded
from tests.subscribers import EVERY_SUBSCRIBER

pytestmark = pytest.mark.simulated

LOOPS = (
    "mlp",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "conv-bn-dropout",
            "mlp-accumulated",
            "attention",
            "spectral-norm",
            "checkpointed",
            "mlp-lbfgs",
        )
    ),
)
STEPS = 3
OF_THE_PROCESS = SpeedSubscriber().publishes
"""Time and memory."""


@pytest.fixture(autouse=True)
def host_by_default():
    """Data sets and data loaders are made on the host, as on a machine with a GPU."""
    torch.set_default_device("cpu")
    yield
    torch.set_default_device("sim")


def rarely(make, backend):
    """Return a subscriber that samples only the first step."""
    try:
        subscriber = make(backend=backend, subsample=1000)
    except ConfigError:  # its maker sets every= already, which is the same
        subscriber = make(backend=backend, every=1000)
    subscriber.subscription = subscriber.subscription.sampled(first=1)  # some sample the first steps as well
    return subscriber


def always(make, backend):
    return make(backend=backend)


@cache
def values_on_host(name):
    return Run(name, "cpu", always).values()


class Run:
    """A training run, with the log of each step, and the values if there are subscribers."""

    def __init__(self, name, device, make=None):
        self.logs, self.backend = [], RecordingBackend()
        loop = DeviceLoop(name, device)
        if make is None:
            self._train(loop)
            return
        with Exporter(message_bus=MessageBus("test"), on_error="raise") as exporter:
            exporter.add_modules(loop.model)
            exporter.set_loss(loop.loss)
            for maker in EVERY_SUBSCRIBER.values():
                exporter.message_bus.register_subscriber(make(maker, self.backend))
            self._train(loop)
        health = exporter.health()
        assert (health.errors, health.disabled, health.dropped) == (0, (), 0)

    def _train(self, loop):
        for _ in range(STEPS):
            with recorded() as log:
                loop.run(1)
            self.logs.append(log)

    def values(self):
        return {(series.kind, series.name, step): value for series, value, step in self.backend.values}


@pytest.mark.parametrize("name", LOOPS)
def test_no_step_waits_and_the_values_are_those_of_the_host(name):
    on_device = Run(name, "sim", always)
    alone = Run(name, "sim")  # an optimizer such as LBFGS waits itself
    assert [len(log.waits) for log in on_device.logs] == [len(log.waits) for log in alone.logs]
    found, expected = on_device.values(), values_on_host(name)
    assert found.keys() == expected.keys()
    wrong = {key: (found[key], value) for key, value in expected.items() if not close(key, found[key], value)}
    assert not wrong


def close(key, found, expected):
    if key[0] in OF_THE_PROCESS or not isinstance(expected, float):
        return type(found) is type(expected)
    # a skewness of 0.01 is the sum of numbers near 1, which the host's kernels compute in float32
    tolerance = 1e-5 if key[0].endswith(("skewness", "kurtosis")) else 1e-7
    return math.isclose(found, expected, rel_tol=1e-5, abs_tol=tolerance) or (
        math.isnan(found) and math.isnan(expected)
    )


@pytest.mark.parametrize("name", LOOPS)
def test_steps_that_no_subscriber_samples_add_nothing(name):
    alone, watched = Run(name, "sim").logs, Run(name, "sim", rarely).logs
    for before, after in zip(alone[2:], watched[2:], strict=True):
        added = [entry for entry in after if entry.kind != "query" and not entry.beside]
        assert added == before
