"""Rounding to eight bits against torch's own casts, and errors against float64."""

import math

import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import QuantizationSubscriber
from ikkuna.numerics.precision import quantization_errors, quantize
from tests.metrics.running import watched

DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cast(x, name):
    """Round by torch; a float64 tensor would be rounded to float32 first."""
    if name == "int8":
        return torch.round(x).clamp(-127, 127)
    return x.float().to(DTYPES[name][0]).to(x.dtype)


def relative_error(x, name, axis=None):
    x = x.double()
    amax = x.abs().max() if axis is None else x.abs().amax([i for i in range(x.ndim) if i != axis], keepdim=True)
    scale = torch.where(amax > 0, amax, 1.0) / (127.0 if name == "int8" else DTYPES[name][1])
    return ((cast(x / scale, name) * scale - x).norm() / x.norm()).item()


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_that_of_the_cast(name):
    dtype, largest = DTYPES[name]
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [numbers, ties, ties * (1 + 1e-6), ties * (1 - 1e-6), random(1000) * largest / 5, random(1000) * 1e-3]
    )
    x = x[x.abs() <= largest]
    assert torch.equal(quantize(x, name), x.to(dtype).float())


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_errors_are_those_of_scaled_casts(name, axis):
    x = random(4, 6, 5) * 10.0 ** torch.arange(6)[:, None]
    one, each, total = quantization_errors(x, name, axis)
    assert (one / total).sqrt().item() == pytest.approx(relative_error(x, name), rel=1e-3)
    assert (each / total).sqrt().item() == pytest.approx(relative_error(x, name, axis), rel=1e-3)
    assert total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


def test_zeros_have_no_error_and_a_nan_makes_everything_nan():
    assert quantization_errors(torch.zeros(2, 3), "e4m3").tolist() == [0, 0, 0]
    for bad in (math.nan, math.inf):
        assert not quantization_errors(torch.tensor([[1.0, bad]]), "e4m3").isfinite().any()


def test_the_metric_merges_calls():
    calls = [random(3, 4), 5 * random(2, 4, seed=1)]
    found = watched(lambda **more: QuantizationSubscriber("activations", "int8", **more), calls)
    sums = sum(quantization_errors(x, "int8") for x in calls)
    assert found["activations_amax"] == [max(x.abs().max().item() for x in calls)]
    assert found["activations_int8_error"] == [pytest.approx((sums[0] / sums[2]).sqrt().item())]
    assert found["activations_int8_channel_error"] == [pytest.approx((sums[1] / sums[2]).sqrt().item())]


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="formats e4m3, e5m2, int8, got 'fp16'"):
        QuantizationSubscriber("weights", "fp16")
    with pytest.raises(ConfigError, match="got 'fp4'"):
        quantize(torch.ones(2), "fp4")
    with pytest.raises(ConfigError, match=r"channel_axis of \(2,\), got 1"):
        quantization_errors(torch.ones(2), "int8", 1)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float32, (1e-44, 1e-40, 1e-37, 5e37)), (torch.float64, (1e-150, 1e150))]
)
def test_the_relative_error_holds_as_long_as_squares_are_numbers(dtype, scales, name):
    for scale in scales:
        x = (random(8, 32).double() * scale).to(dtype)
        x[0], x[1, 1:] = 0.0, 0.0
        one, each, total = quantization_errors(x, name)
        unit = x.double() / x.double().abs().max()
        expected = [math.sqrt(float(value / unit.square().sum())) for value in quantization_errors(unit, name)[:2]]
        assert [math.sqrt(value / total) for value in (one, each)] == pytest.approx(expected, rel=1e-3)
