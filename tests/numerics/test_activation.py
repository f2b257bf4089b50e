"""Dead, dormant and saturated units against hand-made layers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.layers import (
    count_saturated,
    dead_share,
    dormant_scores,
    dormant_share,
    saturation_threshold,
    unit_counters,
)

LAYER = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(width=32))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(LAYER)
@settings(deadline=None, max_examples=80)
def test_counters_are_those_of_numpy(x):
    got = unit_counters(torch.from_numpy(x)).numpy()
    finite = np.isfinite(x)
    clean = np.where(finite, x, 0).astype(np.float64)
    assert (got[0] == ((clean > 0) & finite).sum(0)).all()
    assert (got[1] == finite.sum(0)).all()
    assert np.allclose(got[2], abs(clean).sum(0), rtol=1e-6)


@given(LAYER)
@settings(deadline=None, max_examples=30)
def test_counters_of_halves_add_up(x):
    x = torch.from_numpy(x)
    parts = sum(unit_counters(row[None]) for row in x)
    assert torch.allclose(unit_counters(x), parts)


def test_channels_are_found_in_each_layout():
    x = random(2, 3, 4, 5)
    assert unit_counters(x).shape == (3, 3)
    assert unit_counters(x[0]).shape == (3, 5)
    assert unit_counters(x[0, 0]).shape == (3, 5)
    assert unit_counters(x, channel_axis=-1).shape == (3, 5)
    assert torch.equal(unit_counters(x), unit_counters(x.to(memory_format=torch.channels_last)))
    assert torch.equal(unit_counters(x), unit_counters(x.movedim(1, -1), channel_axis=-1))


def test_a_layer_with_a_low_bias_is_dead():
    layer = torch.nn.Linear(5, 7)
    torch.nn.init.constant_(layer.bias, -1e3)
    counters = unit_counters(layer(random(100, 5)).relu())
    assert dead_share(counters).item() == 1
    assert dormant_share(counters).item() == 1


def test_units_below_one_percent_are_dead():
    x = torch.zeros(1000, 4)
    x[:5, 1] = x[:20, 2] = x[:, 3] = 1.0
    assert dead_share(unit_counters(x)).item() == 0.5
    assert dead_share(unit_counters(x), inactivity=0).item() == 0.25


def test_dormant_scores_are_relative_to_the_layer():
    x = random(500, 6).abs() * torch.tensor([1.0, 1.0, 0.01, 2.0, 0.0, 1.0])
    scores = dormant_scores(unit_counters(x))
    assert scores.mean().item() == pytest.approx(1)
    assert torch.allclose(scores, dormant_scores(unit_counters(1e4 * x)), rtol=1e-5)
    assert dormant_share(unit_counters(x)).item() == pytest.approx(2 / 6)
    assert dormant_share(unit_counters(x), tau=0).item() == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "x", [torch.empty(0, 3), torch.empty(3, 0), torch.tensor(1.0), torch.empty(2, 2, device="meta")]
)
def test_without_units_shares_are_nan(x):
    counters = unit_counters(x)
    assert math.isnan(dead_share(counters).item())
    assert math.isnan(dormant_share(counters).item())


def test_a_unit_of_nan_is_left_out():
    x = torch.ones(4, 3)
    x[:, 0] = math.nan
    x[0, 1] = math.inf
    counters = unit_counters(x)
    assert counters[1].tolist() == [0, 3, 4]
    assert dead_share(counters).item() == 0
    assert dormant_scores(counters)[0].isnan()
    assert math.isnan(dead_share(unit_counters(x[:, :1])).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int32, torch.bool])
def test_dtypes(dtype):
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).to(dtype)
    assert unit_counters(x).tolist() == [[2, 0], [2, 2], [2, 0]]
    assert unit_counters(x.float().to_sparse()).tolist() == [[2, 0], [2, 2], [2, 0]]


@pytest.mark.parametrize(("function", "expected"), [("tanh", 8.7522), ("sigmoid", 16.1181)])
def test_thresholds_are_the_closed_forms(function, expected):
    assert saturation_threshold(function, 1e-7, of="input") == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("function", ["tanh", "sigmoid"])
@given(slope=st.floats(1e-4, 0.24), x=st.floats(-8, 8))
@settings(deadline=None, max_examples=60)
def test_an_element_is_saturated_where_the_derivative_is_small(function, slope, x):
    x = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    y = getattr(torch, function)(x)
    derivative = torch.autograd.grad(y, x)[0].item()
    if abs(derivative / slope - 1) > 1e-6:
        expected = [int(derivative < slope), 1]
        assert count_saturated(y, function, slope).tolist() == expected
        assert count_saturated(x, function, slope, of="input").tolist() == expected


def test_saturation_of_special_elements():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    assert count_saturated(x, "tanh", of="input").tolist() == [2, 3]
    assert count_saturated(torch.empty(0), "tanh").tolist() == [0, 0]
    assert count_saturated(torch.empty(2, device="meta"), "tanh").tolist() == [0, 0]
    assert count_saturated(torch.eye(2).to_sparse(), "sigmoid").tolist() == [4, 4]
    assert count_saturated(torch.ones(3, dtype=torch.bfloat16), "tanh").tolist() == [3, 3]


@pytest.mark.parametrize(
    "arguments", [("relu",), ("tanh", 0.0), ("tanh", 1.0), ("sigmoid", 0.25), ("tanh", 0.1, "both")]
)
def test_unsuitable_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"saturat"):
        saturation_threshold(*arguments)
