"""Details of the numpy statistics, against float64; test_measure.py has the tests that all implementations pass."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics.statistics import FIELDS, host, needed_fields
from ikkuna.numerics.statistics.record import record_of
from tests.numerics.test_measure import check, random


def measure_eagerly(x, fields):
    return record_of(host.measure_eagerly(x, fields), fields)


ALL = needed_fields(field for field in FIELDS if "codes" not in field)


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_every_length_and_precision(n, dtype, mean):
    x = random(n, seed=n).to(dtype) + mean
    check(measure_eagerly(x, ALL), x)


@pytest.mark.parametrize("offset", [0.0, 0.05, 0.09, 0.11, 2.0, 100.0])
def test_skewness_and_kurtosis_are_exact_to_a_millionth_for_any_mean(offset):
    x = random(1_000_000).exp().clamp(max=5)
    x = x - x.mean() + offset
    record = measure_eagerly(x, ALL)
    d = x.double().numpy() - x.double().mean().item()
    assert record.mean == pytest.approx(x.double().mean().item(), rel=1e-6, abs=1e-7)
    assert record.variance() == pytest.approx((d**2).mean(), rel=1e-6)
    assert record.skewness == pytest.approx((d**3).mean() / (d**2).mean() ** 1.5, rel=1e-6)
    assert record.kurtosis == pytest.approx((d**4).mean() / (d**2).mean() ** 2 - 3, rel=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.7, 1.1])
def test_sums_of_equal_magnitudes_do_not_drift(value):
    record = measure_eagerly(torch.tensor([value, -value]).repeat(500_000), ALL)
    exact = float(torch.tensor(value).double())
    for got, power in ((record.l1, 1), (record.sumsq, 2), (record.m4, 4)):
        assert got == pytest.approx(1_000_000 * exact**power, rel=1e-6)


UNUSUAL = {
    "a mean at the end": torch.cat((random(65_536), torch.full((65_536,), 50.0))),
    "a nan": torch.tensor([math.nan, 1.0, -1.0]),
    "a nan in the last piece": torch.cat((random(70_000), torch.tensor([math.nan]))),
    "infinities": torch.tensor([math.inf, -math.inf]),
    "powers above float32": torch.tensor([1e10, -1e10]),
    "squares above float32": torch.tensor([3e38, -3e38, 1.0]),
    "powers below float32": torch.tensor([1e-12, -1e-12]),
    "squares below float32": torch.tensor([1e-30, -3e-30]),
    "subnormal numbers": torch.tensor([1e-42, -3e-42, 0.0]),
    "zeros": torch.zeros(70_000),
    "another dtype": random(70_000).bfloat16(),
    "steps": torch.arange(200_000.0)[::2],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_numbers(name):
    with np.errstate(all="raise"):  # a setting of the user
        record = measure_eagerly(UNUSUAL[name], ALL)
    check(record, UNUSUAL[name].double())


def test_squares_that_exceed_float64_are_infinite():
    record = measure_eagerly(torch.tensor([1e200, -1e200], dtype=torch.float64), ALL)
    assert (record.sumsq, record.l1, record.nans, record.infs) == (math.inf, 2e200, 0, 0)


@pytest.mark.parametrize("asked", [("m3",), ("sumsq",), ("zeros",), ("min",), ("mean", "l1")], ids=" ".join)
@pytest.mark.parametrize("n", [100, 200_000])
def test_fields_that_were_not_requested_are_none(asked, n):
    fields = needed_fields(asked)
    record = measure_eagerly(random(n), fields)
    names = {"mean": "center"}
    known = {field for field in ALL if getattr(record, names.get(field, field)) is not None}
    assert known - {"min", "max"} == fields - {"min", "max"}
