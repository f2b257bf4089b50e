"""A fault planted somewhere in some network is told by the metric meant for it, and by no other."""

import itertools
import math
import random
import statistics
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    DeadUnitsSubscriber,
    EffectiveUpdateSubscriber,
    NonFiniteSubscriber,
    SpectralNormSubscriber,
    TrustRatioSubscriber,
)
from ikkuna.testing import RecordingBackend
from tests import seeds
from tests.metrics.running import curves

CLASSES, BATCH, STEPS, RATE = 5, 64, 3, 1e-3


def network(draw):
    """Return a network of some kind, depth and widths, with the shape of its inputs."""
    is_conv, depth = draw.random() < 0.5, draw.randint(5, 8)
    widths = [draw.randint(6, 12) if is_conv else draw.randint(24, 64) for _ in range(depth + 1)]
    layers = OrderedDict()
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        layers[f"layer{i}"] = nn.Conv2d(before, after, 3, padding=1) if is_conv else nn.Linear(before, after)
        layers[f"relu{i}"] = nn.ReLU()
    layers["flat"] = nn.Flatten()
    layers["head"] = nn.Linear(widths[-1] * (16 if is_conv else 1), CLASSES)
    return nn.Sequential(layers), (widths[0], 4, 4) if is_conv else (widths[0],)


def hidden(model):
    return [name for name, _ in model.named_children() if name.startswith("layer")]


# -- faults: each returns the learning rate ---------------------------------------------------------------------------


def nothing(model, name):
    return RATE


def dead_layer(model, name):
    nn.init.constant_(model.get_submodule(name).bias, -1e3)
    return RATE


def exploding_layer(model, name):
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(100)
    return RATE


def nan_weight(model, name):
    with torch.no_grad():
        model.get_submodule(name).weight.view(-1)[0] = math.nan
    return RATE


def large_rate(model, name):
    return 100 * RATE


def narrow_weights(model, name):
    model.to(torch.bfloat16)
    return 1e-5


# -- alarms: each returns the layers it is about ----------------------------------------------------------------------


def last(found, kind):
    return {name: values[-1] for (k, name), values in found.items() if k == kind}


def dead_units(found):
    """Layers after a dead layer receive a constant, and may be dead by chance; the first dead one is the cause."""
    dead = [name for name, share in last(found, "activations_dead").items() if share > 0.9]
    return {name.replace("relu", "layer") for name in dead[:1]}


def spectral_norm(found):
    norms = last(found, "weights_spectral_norm")
    return {name for name, norm in norms.items() if norm > 10 * statistics.median(norms.values())}


def non_finite(found):
    return set(last(found, "nonfinite_producer"))


def trust_ratio(found):
    known = {name: ratio for name, ratio in last(found, "trust_ratio").items() if not math.isnan(ratio)}
    return {"every layer"} if known and statistics.median(known.values()) < 10 else set()


def effective_update(found):
    """A layer whose gradient is 0 has nothing to lose, so the one that moves most has to tell."""
    return {"every layer"} if 0 < max(last(found, "effective_update_fraction").values()) < 0.1 else set()


MEANT = {
    nothing: None,
    dead_layer: dead_units,
    exploding_layer: spectral_norm,
    nan_weight: non_finite,
    large_rate: trust_ratio,
    narrow_weights: effective_update,
}
ALARMS = (dead_units, spectral_norm, non_finite, trust_ratio, effective_update)


def watched(model, shape, rate):
    recording = RecordingBackend()
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=rate), nn.CrossEntropyLoss()
    dtype = next(model.parameters()).dtype
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        for make in (
            lambda **o: DeadUnitsSubscriber(modules="relu*", **o),
            SpectralNormSubscriber,
            NonFiniteSubscriber,
            TrustRatioSubscriber,
            EffectiveUpdateSubscriber,
        ):
            exporter.message_bus.register_subscriber(make(backend=recording))
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(model(torch.randn(BATCH, *shape).to(dtype)).float(), torch.randint(CLASSES, (BATCH,))).backward()
            optimizer.step()
    return curves(recording)


@pytest.mark.parametrize("seed", seeds.drawn(4))
@pytest.mark.parametrize("fault", MEANT)
def test_a_fault_is_found_by_the_metric_meant_for_it_and_by_no_other(fault, seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model, shape = network(draw)
    name = draw.choice(hidden(model)[:-2])  # behind a dead layer there are some that still learn
    found = watched(model, shape, fault(model, name))
    expected = {name} if fault in (dead_layer, exploding_layer, nan_weight) else {"every layer"}
    told = {alarm.__name__: alarm(found) for alarm in ALARMS}
    assert {metric: layers for metric, layers in told.items() if layers} == (
        {MEANT[fault].__name__: expected} if MEANT[fault] else {}
    )
