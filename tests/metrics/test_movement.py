"""Metrics of updates, successive gradients and distances, against what the weights themselves say."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.subscriber import (
    CosineSubscriber,
    DistanceFromInitSubscriber,
    EffectiveUpdateSubscriber,
    LossChangeBoundSubscriber,
    TrustRatioSubscriber,
)
from tests.metrics.running import trained


def model():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def flat(x):
    return x.double().numpy().ravel()


def cos(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def run(make, steps=5, network=None, optimizer=None):
    network = network or model()
    found, before = trained([make], network, steps, optimizer, batch)
    states = [*before, {name: p.detach() for name, p in network.named_parameters()}]
    return found, states


def test_the_trust_ratio_is_that_of_the_weight_after_the_step():
    found, states = run(TrustRatioSubscriber)
    for name in ("0", "2"):
        weights = [flat(state[f"{name}.weight"]) for state in states]
        expected = [np.linalg.norm(b) / np.linalg.norm(b - a) for a, b in itertools.pairwise(weights)]
        assert found["trust_ratio", name] == pytest.approx(expected, rel=1e-4)


def test_a_weight_that_does_not_move_has_no_trust_ratio():
    network = model()
    found, _ = run(TrustRatioSubscriber, 2, network, torch.optim.SGD(network.parameters(), lr=0.0))
    assert all(map(math.isnan, found["trust_ratio", "0"]))


def test_a_frozen_weight_has_no_update():
    network = model()
    network[0].weight.requires_grad_(False)
    made = []
    found, _ = run(lambda **o: made.append(TrustRatioSubscriber(**o)) or made[0], 3, network)
    assert {name for _, name in found} == {"2"}
    assert set(made[0]._before) == {"0"}


@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_updates_that_bfloat16_would_lose(lr):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    found, states = run(lambda **o: EffectiveUpdateSubscriber(torch.bfloat16, **o), 3, network, optimizer)
    for name in ("0", "2"):
        weights = [state[f"{name}.weight"] for state in states]
        for value, a, b in zip(found["effective_update_fraction", name], weights, weights[1:], strict=False):
            stored, update = a.bfloat16(), (b - a)
            moved = (stored.double() + update).bfloat16() != stored
            wanted = update != 0
            assert value == (moved & wanted).sum().item() / wanted.sum().item()


def test_updates_that_bfloat16_did_lose():
    network = model().bfloat16()
    optimizer = torch.optim.SGD(network.parameters(), lr=3e-2)
    before = [p.detach().clone() for p in network.parameters()]
    makers = [EffectiveUpdateSubscriber]
    found, _ = trained(makers, network, 1, optimizer, lambda step: batch(step).bfloat16())
    moved = (network[2].weight != before[2]).double().mean().item()
    assert found["effective_update_fraction", "2"] == [moved]
    assert 0 < moved < 1


@pytest.mark.parametrize("subsample", [1, 2])
def test_cosines_of_successive_updates(subsample):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    found, states = run(lambda **o: CosineSubscriber("weight_updates", subsample=subsample, **o), 6, network, optimizer)
    weights = [flat(state["0.weight"]) for state in states]
    updates = [b - a for a, b in itertools.pairwise(weights)][::subsample]
    expected = [cos(a, b) for a, b in itertools.pairwise(updates)]
    assert found["weight_updates_cosine", "0"] == pytest.approx(expected, abs=1e-4)


def test_a_constant_gradient_and_no_gradient():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.still, self.moving = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return (self.moving.weight.sum() + 0 * self.still.weight.sum()).reshape(1).exp().log()

    found, _ = trained([lambda **o: CosineSubscriber("weight_gradients", **o)], Constant(), 3)
    assert found["weight_gradients_cosine", "moving"] == pytest.approx([1.0, 1.0])
    assert all(map(math.isnan, found["weight_gradients_cosine", "still"]))


def test_distances_from_init():
    found, states = run(DistanceFromInitSubscriber)
    weights = [flat(state["2.weight"]) for state in states[:-1]]
    expected = [np.linalg.norm(w - weights[0]) for w in weights]
    assert found["weights_distance_from_init", "2"] == pytest.approx(expected, rel=1e-5)
    relative = [d / np.linalg.norm(weights[0]) for d in expected]
    assert found["weights_relative_distance", "2"] == pytest.approx(relative, rel=1e-5)


def test_what_begins_at_zero_has_no_relative_distance():
    network = model()
    nn.init.zeros_(network[2].bias)
    found, _ = run(lambda **o: DistanceFromInitSubscriber("biases", **o), 2, network)
    assert all(map(math.isnan, found["biases_relative_distance", "2"]))
    assert found["biases_distance_from_init", "2"][1] > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: CosineSubscriber("activations"),
            ConfigError,
            "CosineSubscriber needs a kind with one tensor .*; got 'activations'",
        ),
        (
            lambda: DistanceFromInitSubscriber("loss"),
            ConfigError,
            "DistanceFromInitSubscriber needs a kind with one tensor .*; got 'loss'",
        ),
        (lambda: EffectiveUpdateSubscriber("bf16"), ConfigTypeError, "floating torch.dtype, got 'bf16'"),
        (lambda: EffectiveUpdateSubscriber(torch.int8), ConfigTypeError, "floating torch.dtype, got torch.int8"),
        (lambda: DistanceFromInitSubscriber(publishes="a"), ConfigError, "publishes= needs 2 names"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Spectral(nn.Module):
    """A layer with complex weights, as in Fourier neural operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight).abs()


@pytest.mark.parametrize("metric", [CosineSubscriber, DistanceFromInitSubscriber])
def test_complex_weights_are_pairs_of_reals(metric):
    network = nn.Sequential(Spectral())
    optimizer = torch.optim.SGD(network.parameters(), lr=3.0)
    found, before = trained([partial(metric, "weights")], network, 4, optimizer, batch)
    weights = [flat(torch.view_as_real(state["0.weight"])) for state in before]
    cosines = [cos(a, b) for a, b in itertools.pairwise(weights)]
    distances = [np.linalg.norm(w - weights[0]) for w in weights]
    expected = {"weights_cosine": cosines, "weights_distance_from_init": distances}
    kind = metric("weights").publishes[0]
    assert found[kind, "0"] == pytest.approx(expected[kind], rel=1e-4)


def test_the_bound_of_complex_weights_is_that_of_pairs_of_reals():
    network, gradients = nn.Sequential(Spectral()), []
    optimizer = torch.optim.SGD(network.parameters(), lr=3.0)
    network[0].weight.register_hook(lambda gradient: gradients.append(flat(torch.view_as_real(gradient))))
    found, before = trained([LossChangeBoundSubscriber], network, 4, optimizer, batch)
    weights = [flat(torch.view_as_real(state["0.weight"])) for state in before]
    expected = [gradients[i + 1] @ (weights[i + 1] - weights[i]) for i in range(3)]
    (values,) = [values for (kind, _), values in found.items() if kind == "loss_change_bound"]
    assert values == pytest.approx(expected, rel=1e-4)
