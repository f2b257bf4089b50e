"""Spectral norms of weights that train, against singular values in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import SpectralNormSubscriber
from ikkuna.numerics import spectrum
from tests.metrics.running import trained, watched


def norms(before, name, read=lambda w: w.flatten(1)):
    return [np.linalg.norm(read(step[name]).double().numpy(), 2) for step in before]


def test_small_matrices_are_exact_while_they_train():
    model = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 7))
    found, before = trained([lambda **o: SpectralNormSubscriber(**o)], model, 5)
    for name in ("0", "1"):
        assert found["weights_spectral_norm", name] == pytest.approx(norms(before, f"{name}.weight"), rel=1e-4)
        assert max(found["weights_power_residual", name]) < 0.05


def test_a_warm_iteration_follows_a_slowly_moving_matrix_with_a_residual():
    model = nn.Linear(200, 150, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found, before = trained(
        [lambda **o: SpectralNormSubscriber(iterations=1, **o)], model, 20, optimizer, lambda step: torch.ones(1, 200)
    )
    errors = np.array(found["weights_spectral_norm", "linear"]) / norms(before, "weight") - 1
    assert errors.max() < 1e-6
    assert abs(errors[-1]) < 5e-3
    residual = found["weights_power_residual", "linear"][-1]
    sigma = found["weights_spectral_norm", "linear"][-1]
    values = torch.linalg.svdvals(before[-1]["weight"].double())
    assert (values - sigma).abs().min() <= residual * (1 + residual / 2) * sigma * 1.001


def test_a_new_shape_starts_afresh():
    big, small = torch.randn(30, 20), torch.randn(5, 20)
    found = watched(lambda **o: SpectralNormSubscriber("activations", **o), big, small, small.double(), big)
    expected = [np.linalg.norm(x.double().numpy(), 2) for x in (big, small, small, big)]
    assert found["activations_spectral_norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.zeros(3, 4), 0.0),
        (torch.tensor([3.0, 4.0]), 5.0),
        (torch.diag(torch.tensor([1.0, -7.0, 2.0])).bfloat16(), 7.0),
        (torch.eye(6).half(), 1.0),
        (torch.outer(torch.ones(5), torch.full((3,), 2.0)), math.sqrt(5) * math.sqrt(12)),
        (torch.full((3, 3), math.nan), math.nan),
        (torch.tensor([[1.0, math.inf], [0.0, 1.0]]), math.nan),
        (torch.zeros(0, 4), math.nan),
        (torch.tensor(-2.0), 2.0),
    ],
)
def test_known_norms(x, expected):
    found = watched(lambda **o: SpectralNormSubscriber("activations", **o), x, x)
    assert found["activations_spectral_norm"] == pytest.approx([expected] * 2, rel=1e-5, nan_ok=True)


@pytest.mark.fault(48)
def test_a_broken_matrix_does_not_spoil_what_comes_after():
    x = torch.randn(10, 8)
    broken = x.clone()
    broken[0, 0] = math.nan
    found = watched(lambda **o: SpectralNormSubscriber("activations", **o), x, broken, x)["activations_spectral_norm"]
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(np.linalg.norm(x.double().numpy(), 2), rel=1e-4)


def circular(weight, size):
    """Return the matrix of a circular convolution, column by column."""
    pixels = torch.eye(weight.shape[1] * size * size, dtype=torch.float64).view(-1, weight.shape[1], size, size)
    padded = nn.functional.pad(pixels, (1, 1, 1, 1), mode="circular")
    return nn.functional.conv2d(padded, weight.double()).flatten(1).T


def test_convolutions_as_matrix_and_as_operator():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 2))

    def batch(step):
        return torch.ones(1, 2, 4, 4)

    found, before = trained([lambda **o: SpectralNormSubscriber(**o)], model, 2, batch=batch)
    assert found["weights_spectral_norm", "0"] == pytest.approx(norms(before, "0.weight"), rel=1e-3)
    make = [lambda **o: SpectralNormSubscriber(conv="operator", input_size=4, **o)]
    found, before = trained(make, model, 2, batch=batch)
    expected = norms(before, "0.weight", lambda w: circular(w, 4))
    assert found["weights_spectral_norm", "0"] == pytest.approx(expected, rel=1e-9)
    assert found["weights_power_residual", "0"] == [0.0, 0.0]
    assert found["weights_spectral_norm", "2"] == pytest.approx(norms(before, "2.weight"), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations >= 1, got 0"),
        ({"conv": "fft"}, "conv='matrix' or conv='operator', got 'fft'"),
        ({"conv": "operator"}, "needs input_size with conv='operator'"),
        ({"input_size": 8}, "needs input_size with conv='operator', and only with it"),
        ({"conv": "operator", "input_size": (8, 0)}, "input_size >= 1, got 0"),
        ({"conv": "operator", "input_size": 8, "groups": 0}, "groups >= 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SpectralNormSubscriber(**options)


def test_the_search_from_scratch_is_made_once_and_old_starts_are_dropped(monkeypatch):
    searches = []
    search = spectrum._golub_kahan
    monkeypatch.setattr(spectrum, "_golub_kahan", lambda w: searches.append(w.shape) or search(w))
    made = []
    big, small = torch.randn(9, 8), torch.randn(5, 4)
    watched(lambda **o: made.append(SpectralNormSubscriber("activations", **o)) or made[0], big, big, big, small, small)
    assert searches == [(9, 8), (5, 4)]
    assert len(made[0]._starts) == 1
