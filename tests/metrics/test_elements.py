"""Metrics of the elements of a tensor, against formulas in float64 numpy, seen through an exporter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import (
    HistogramSubscriber,
    MinMaxSubscriber,
    MomentsSubscriber,
    NonFiniteSubscriber,
    PercentileSubscriber,
    SparsitySubscriber,
    SumSubscriber,
)
from ikkuna.numerics.statistics.float_code import bin_edges
from tests.metrics.running import watched
from tests.metrics.strategies import numbers, tensors

FEW = settings(deadline=None, max_examples=60)


def values(make, *steps):
    """Return the values of a metric with one result."""
    [(_, found)] = watched(make, *steps).items()
    return found


def every(*tensors):
    return np.concatenate([numbers(x) for x in tensors])


@FEW
@given(tensors(), tensors())
def test_a_sum_is_that_of_all_calls(a, b):
    x = every(a, b)
    [found] = values(lambda **o: SumSubscriber("activations", **o), [a, b])
    [finite] = values(lambda **o: SumSubscriber("activations", finite_only=True, **o), [a, b])
    kept = x[np.isfinite(x)]
    error = 1e-6 * np.abs(kept).sum() + 1e-43
    assert finite == pytest.approx(math.fsum(kept), abs=error) if len(kept) else math.isnan(finite)
    assert found == pytest.approx(finite, nan_ok=True) if len(kept) == len(x) else math.isnan(found)


@FEW
@given(tensors(), tensors())
def test_extrema_are_those_of_all_calls(a, b):
    found = watched(lambda **o: MinMaxSubscriber("activations", **o), [a, b])
    x = every(a, b)
    low, high = found["activations_min"], found["activations_max"]
    assert low + high == pytest.approx([x.min(), x.max()], rel=0, abs=0, nan_ok=True)


@pytest.mark.fault(47)
@FEW
@given(tensors(), tensors())
@example(torch.tensor([1.0, 0.0]), torch.tensor([math.nan, math.inf]))
def test_counts_are_exact(a, b):
    x = every(a, b)
    assert values(lambda **o: SparsitySubscriber("activations", **o), [a, b]) == [np.mean(x == 0)]
    assert values(lambda **o: NonFiniteSubscriber("activations", **o), [a, b]) == [np.sum(~np.isfinite(x))]


def moments(x):
    d = x - x.mean()
    m2 = (d**2).mean()
    return (d**3).mean() / m2**1.5, (d**4).mean() / m2**2 - 3


@FEW
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e20]),
    st.sampled_from([0.0, 1.0, 100.0]),
    st.integers(0, 99),
)
@example(torch.float32, 1e-12, 0.0, 0)
def test_moments_at_every_scale(dtype, scale, offset, seed):
    """Powers of small numbers leave the range of float32 long before the numbers do."""
    generator = torch.Generator().manual_seed(seed)
    calls = [((torch.randn(n, generator=generator).exp() + offset) * scale).to(dtype) for n in (40, 1, 300)]
    found = watched(lambda **o: MomentsSubscriber("activations", **o), calls)
    skewness, kurtosis = moments(every(*calls))
    assert found["activations_skewness"] == [pytest.approx(skewness, rel=1e-3, abs=1e-3)]
    assert found["activations_kurtosis"] == [pytest.approx(kurtosis, rel=1e-3, abs=1e-3)]


@pytest.mark.parametrize("x", [torch.full((1000,), 0.1), torch.tensor([3.0]), torch.tensor([1.0, math.nan, 2.0])])
def test_what_has_no_moments_has_nan(x):
    found = watched(lambda **o: MomentsSubscriber("activations", **o), x)
    assert [math.isnan(v) for kind in found.values() for v in kind] == [True, True]


def test_moments_of_the_finite_elements():
    x = torch.tensor([1.0, math.nan, 2.0, math.inf, 4.0, 9.0])
    found = watched(lambda **o: MomentsSubscriber("activations", finite_only=True, **o), x)
    expected = moments(np.array([1.0, 2.0, 4.0, 9.0]))
    assert [v for kind in found.values() for v in kind] == pytest.approx(expected)


def neighbours(x, q):
    """Return the order statistics a percentile lies between, widened by the bins they are in."""
    ordered = np.sort(x)
    rank = (len(x) - 1) * q / 100
    edges = bin_edges()
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    low = edges[np.searchsorted(edges, below, "right" if below > 0 else "left") - 1]  # a bin holds its end nearer to 0
    high = edges[min(np.searchsorted(edges, above, "right" if above > 0 else "left"), len(edges) - 1)]
    slack = np.array([low, high]).clip(-1e38, 1e38) * 1e-7  # bins are of float32, extremes are as exact as the data
    return low - abs(slack[0]) - 1e-38, high + abs(slack[1]) + 1e-38


@FEW
@given(tensors(), st.sampled_from([0, 0.13, 2.28, 15.87, 33.3, 50, 84.13, 99.87, 100]))
def test_percentiles_are_within_a_bin_of_numpys(x, q):
    def make(**options):
        return PercentileSubscriber("activations", q, exact=True, finite_only=True, **options)

    found = watched(make, x)[f"activations_percentile_{q:g}"]
    kept = numbers(x)
    kept = kept[np.isfinite(kept)].astype(np.float32).astype(np.float64)
    if not len(kept):
        assert math.isnan(found[0])
        return
    low, high = neighbours(kept, q)
    assert low <= found[0] <= high
    if q in (0, 100) and np.isfinite(numbers(x)).all():
        assert found[0] == pytest.approx(np.percentile(numbers(x), q), rel=1e-15)


@pytest.mark.fault(47)
@FEW
@given(tensors())
def test_a_nan_makes_every_percentile_nan(x):
    found = watched(lambda **o: PercentileSubscriber("activations", exact=True, **o), x)
    assert len(found) == 7
    if np.isnan(numbers(x)).any():
        assert all(math.isnan(v) for kind in found.values() for v in kind)


def test_percentiles_of_a_sample_have_the_ranks_they_should():
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    found = watched(lambda **o: PercentileSubscriber("activations", **o), x)
    ranks = [(x < v).float().mean().item() for kind in found.values() for v in kind]
    assert ranks == pytest.approx([0.0013, 0.0228, 0.1587, 0.5, 0.8413, 0.9772, 0.9987], abs=0.006)
    names = [f"activations_percentile_{q}" for q in ("0.13", "2.28", "15.87", "50", "84.13", "97.72", "99.87")]
    assert list(found) == names


@pytest.mark.fault(47)
@FEW
@given(tensors(), tensors(), st.integers(1, 40))
def test_a_histogram_holds_every_finite_element(a, b, bins):
    found = watched(lambda **o: HistogramSubscriber("activations", bins=bins, exact=True, **o), [a, b])
    x = every(a, b)
    kept = x[np.abs(x) < 3.4e38].astype(np.float32).astype(np.float64)
    if not len(kept):
        assert not found
        return
    [histogram] = found["activations"]
    assert histogram.num == len(kept)
    assert sum(histogram.bucket_counts) == pytest.approx(len(kept))
    assert len(histogram.bucket_counts) in (1, bins)
    below = np.cumsum(histogram.bucket_counts)
    width = 0.13 * np.abs(histogram.bucket_limits) + 2e-38
    for limit, count, slack in zip(histogram.bucket_limits, below, width, strict=True):
        assert np.sum(kept < limit - slack) - 1e-6 <= count <= np.sum(kept <= limit + slack) + 1e-6


def test_a_histogram_holds_a_largest_element_that_rounds_up():
    below_five = torch.tensor([0.0, 5 - 1e-9], dtype=torch.float64)
    [found] = values(lambda **o: HistogramSubscriber("activations", bins=2, exact=True, **o), below_five)
    assert found.bucket_counts == [1, 1]


@pytest.mark.parametrize("x", [torch.tensor([100.0, 200.0, 300.0]), torch.tensor([0.1, -7.0, 1e-3, 0.0])])
def test_an_exact_histogram_has_the_sums_of_the_elements(x):
    [found] = values(lambda **o: HistogramSubscriber("activations", exact=True, **o), x)
    assert found.sum == pytest.approx(x.double().sum().item(), rel=1e-6)
    assert found.sum_squares == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.fault(51)
def test_an_empty_tensor_publishes_nothing():
    for make in (SumSubscriber, MinMaxSubscriber, SparsitySubscriber, NonFiniteSubscriber, MomentsSubscriber):
        assert not watched(lambda make=make, **o: make("activations", **o), torch.empty(0, 3))
    assert not watched(lambda **o: PercentileSubscriber("activations", **o), torch.empty(0))
    assert not watched(lambda **o: HistogramSubscriber("activations", **o), torch.empty(0))


@pytest.mark.fault(60)
def test_more_elements_than_single_precision_counts():
    """2**24 is where a float32 counter stops."""
    n = 2**24 + 3
    x = torch.cat([torch.zeros(n // 2), torch.ones(n - n // 2)])
    assert values(lambda **o: SumSubscriber("activations", **o), x) == [pytest.approx(n - n // 2, rel=1e-12)]
    assert values(lambda **o: SparsitySubscriber("activations", **o), x) == [n // 2 / n]
    x[-3:] = math.nan
    assert values(lambda **o: NonFiniteSubscriber("activations", **o), x) == [3]
    [histogram] = values(lambda **o: HistogramSubscriber("activations", exact=True, bins=2, **o), x)
    assert (histogram.num, histogram.bucket_counts) == (n - 3, [n // 2, n - n // 2 - 3])


def test_identities():
    """The sum scales, extrema swap under a sign, the median of a shifted tensor shifts."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(1))
    a, b = values(lambda **o: SumSubscriber("activations", **o), x, 2 * x)
    assert b == pytest.approx(2 * a)
    found = watched(lambda **o: MinMaxSubscriber("activations", **o), x, -x)
    assert found["activations_min"] == [-v for v in reversed(found["activations_max"])]
    found = watched(lambda **o: MomentsSubscriber("activations", **o), x, -3 * x)
    assert found["activations_skewness"][1] == pytest.approx(-found["activations_skewness"][0], rel=1e-5)
    assert found["activations_kurtosis"][1] == pytest.approx(found["activations_kurtosis"][0], rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PercentileSubscriber("weights", 101), "percentiles between 0 and 100, got 101"),
        (lambda: PercentileSubscriber("weights", []), "percentiles between 0 and 100, got \\[\\]"),
        (lambda: PercentileSubscriber("weights", [50, 50.0]), "differ from each other, got \\[50, 50.0\\]"),
        (lambda: PercentileSubscriber("weights", math.nan), "between 0 and 100, got nan"),
        (lambda: HistogramSubscriber("weights", bins=0), "bins between 1 and 1000, got 0"),
        (lambda: HistogramSubscriber("weights", bins=2.5), "bins between 1 and 1000, got 2.5"),
        (lambda: MinMaxSubscriber("weights", publishes="a"), "2 names, for weights_min, weights_max; got 1: \\['a'\\]"),
        (lambda: SumSubscriber("weights", subsample=0), "subsample must be an int >= 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_results_can_be_named():
    found = watched(lambda **o: MinMaxSubscriber("activations", publishes=["low", "high"], **o), torch.arange(3.0))
    assert found == {"low": [0.0], "high": [2.0]}


@pytest.mark.parametrize("exact", [False, True])
def test_percentiles_of_finite_elements_leave_out_the_others(exact):
    x = torch.tensor([1.0, 2.0, 3.0, math.inf, math.inf, math.inf, math.nan])
    for finite_only, expected in ((False, math.nan), (True, 2.0)):
        options = {"exact": exact, "finite_only": finite_only}
        [median] = values(lambda options=options, **o: PercentileSubscriber("activations", 50, **options, **o), x)
        assert median == pytest.approx(expected, rel=1 / 8, nan_ok=True)
