"""Moments of what lies around 0, from sums of powers, against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics.measure import measure
from ikkuna.numerics.powers import measure_around_zero
from ikkuna.numerics.statistics import closure
from tests.numerics.test_measure import check, random

FIELDS = closure(["m4", "min", "max", "l1", "sumsq"])


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_length_and_precision(n, dtype):
    x = random(n, seed=n).to(dtype)
    x = x - x.mean() if n > 1 else torch.zeros(1, dtype=torch.float64)
    record = measure_around_zero(x.to(torch.float64 if n == 1 else dtype), FIELDS)
    record.zeros = int((x == 0).sum())
    check(record, x)


@pytest.mark.parametrize("offset", [0.0, 0.05, 0.09])
def test_shape_is_right_to_a_millionth_as_far_from_zero_as_is_allowed(offset):
    x = random(1_000_000).exp().clamp(max=5)
    x = x - x.mean() + offset
    record = measure_around_zero(x, FIELDS)
    d = x.double().numpy() - x.double().mean().item()
    assert record.mean == pytest.approx(x.double().mean().item(), abs=1e-7)
    assert record.variance() == pytest.approx((d**2).mean(), rel=1e-7)
    assert record.skewness == pytest.approx((d**3).mean() / (d**2).mean() ** 1.5, rel=2e-7)
    assert record.kurtosis == pytest.approx((d**4).mean() / (d**2).mean() ** 2 - 3, rel=2e-7)


@pytest.mark.parametrize("value", [0.1, 0.7, 1.1])
def test_magnitudes_that_are_all_the_same_do_not_drift(value):
    x = torch.tensor([value, -value]).repeat(500_000)
    record = measure_around_zero(x, FIELDS)
    exact = float(x[0].double())
    for got, power in ((record.l1, 1), (record.sumsq, 2), (record.m4, 4)):
        assert got == pytest.approx(1_000_000 * exact**power, rel=1e-6)


NOT_SO = {
    "a mean": torch.full((70_000,), 3.0),
    "a mean at the end": torch.cat((random(65_536), torch.full((65_536,), 50.0))),
    "a nan": torch.tensor([math.nan, 1.0, -1.0]),
    "an infinity": torch.tensor([math.inf, -math.inf]),
    "powers above float32": torch.tensor([1e10, -1e10]),
    "powers below float32": torch.tensor([1e-12, -1e-12]),
    "another dtype": torch.tensor([1.0, -1.0], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", NOT_SO)
def test_what_is_measured_in_another_way(name):
    x = NOT_SO[name]
    with np.errstate(all="raise"):  # a user's setting, which is none of our business
        assert measure_around_zero(x, FIELDS) is None
        record = measure(x, FIELDS, compiled=False)
    record.zeros = 0
    check(record, x.double())


@pytest.mark.parametrize("fields", [("m2", "sumsq"), ("m4", "zeros")], ids=["moments of no shape", "a count of zeros"])
def test_fields_that_are_measured_in_another_way(fields):
    assert measure_around_zero(random(100), closure(fields)) is None


def test_what_nobody_asked_for_is_not_there():
    record = measure_around_zero(random(10_000), closure(["m3"]))
    assert record.m3 is not None
    assert (record.m4, record.min, record.max, record.l1, record.sumsq) == (None,) * 5
