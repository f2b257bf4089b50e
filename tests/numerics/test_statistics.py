"""The properties of records against scipy, and their merge against the record of all elements."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics import FIELDS, Record, merge, needed_fields
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.record import Records, record_of
from ikkuna.numerics.statistics.table import repeat_rows

ALL = needed_fields([f for f in FIELDS if f != "codes"])
SAMPLE = hnp.arrays(np.float64, st.integers(0, 30), elements=st.floats(-1e3, 1e3))
WILD = hnp.arrays(np.float32, st.integers(0, 12), elements=st.floats(width=32))


def record(x):
    return measure(torch.from_numpy(np.array(x)), ALL)


def assert_same(a, b, size=1.0):
    assert (a.n, a.nans, a.infs, a.zeros) == (b.n, b.nans, b.infs, b.zeros)
    for name, power in (
        ("center", 1),
        ("m2", 2),
        ("m3", 3),
        ("m4", 4),
        ("l1", 1),
        ("sumsq", 2),
        ("min", 0),
        ("max", 0),
    ):
        got, want = getattr(a, name), getattr(b, name)
        slack = 1e-9 * max(1, a.n) * max(size, 1e-30) ** power
        assert got == pytest.approx(want, rel=1e-6, abs=slack, nan_ok=True), name


@given(SAMPLE)
@settings(deadline=None, max_examples=80)
def test_moments_are_those_of_scipy(x):
    r = record(x)
    if not len(x):
        assert all(
            math.isnan(v) for v in (r.mean, r.variance(), r.skewness, r.kurtosis, r.rms, r.sparsity, r.linf_norm)
        )
        assert (r.l1_norm, r.l2_norm, r.l0_norm) == (0, 0, 0)
        return
    assert r.mean == pytest.approx(x.mean(), abs=1e-9)
    assert r.variance() == pytest.approx(x.var(), rel=1e-6, abs=1e-9)
    if len(x) > 1:
        assert r.variance(correction=1) == pytest.approx(x.var(ddof=1), rel=1e-6, abs=1e-9)
    if x.std() > 1e-3 * max(1, abs(x).max()):
        assert r.skewness == pytest.approx(stats.skew(x), abs=1e-6)
        assert r.kurtosis == pytest.approx(stats.kurtosis(x), abs=1e-6)
    assert r.l1_norm == pytest.approx(abs(x).sum())
    assert r.l2_norm == pytest.approx(np.linalg.norm(x))
    assert r.linf_norm == abs(x).max()
    assert r.rms == pytest.approx(np.sqrt((x**2).mean()))
    assert (r.l0_norm, r.sparsity) == ((x != 0).sum(), (x == 0).mean())


@given(SAMPLE, st.lists(st.integers(0, 30), max_size=3))
@settings(deadline=None, max_examples=80)
def test_parts_merge_to_the_whole_in_any_order(x, cuts):
    parts = [record(p) for p in np.split(x, sorted(cuts))]
    size = max(1.0, abs(x).max(initial=0))
    for order in (parts, parts[::-1]):
        assert_same(merge(*order), record(x), size)
    nested = functools.reduce(lambda a, b: merge(b, a), parts)
    assert_same(nested, record(x), size)


@given(WILD, WILD)
@settings(deadline=None, max_examples=60)
def test_nan_and_infinity_merge_as_counts(a, b):
    both = np.concatenate([a, b])
    got = merge(record(a), record(b))
    assert got.n == len(both)
    assert got.nans == np.isnan(both).sum()
    assert got.infs == np.isinf(both).sum()
    assert got.zeros == (both == 0).sum()
    assert got.count == np.isfinite(both).sum()
    if got.nonfinite:
        assert math.isnan(got.mean)
        assert math.isnan(got.l2_norm)
        got.finite_only = True
    finite = both[np.isfinite(both)].astype(np.float64)
    if len(finite):
        assert got.mean == pytest.approx(finite.mean(), rel=1e-5, abs=1e-6 * abs(finite).max())


def test_the_empty_record_changes_nothing():
    r = record([1.0, 2.0])
    assert merge(r, Record()) is r
    assert merge(Record(), r) is r
    assert merge().n == 0
    assert merge(Record(), Record()).n == 0


def test_a_field_missing_in_one_record_is_dropped():
    some = measure(torch.ones(3), needed_fields(["sumsq"]))
    got = merge(record(np.ones(3, dtype=np.float32)), some)
    assert got.center is None
    assert got.l2_norm == pytest.approx(math.sqrt(6))
    with pytest.raises(ConfigError, match="'mean' was not measured"):
        _ = got.mean


@given(SAMPLE.filter(len), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_repeating_is_merging_with_itself(x, times):
    own = record(x)
    repeated = record_of(repeat_rows(Records.of_record(own).table[0], times), own.fields)
    assert_same(repeated, record(np.tile(x, times)), max(1.0, abs(x).max()))


@pytest.mark.parametrize("value", [0.0, -2.5, math.inf, -math.inf, math.nan])
def test_one_number(value):
    one = Record.of(value)
    both = merge(one, record([5.0]))
    if math.isfinite(value):
        assert_same(one, record([value]))
    else:
        assert (one.n, one.nonfinite, one.count) == (1, 1, 0)
        assert math.isnan(one.mean)
        assert math.isnan(one.variance())
    assert_same(both, record([value, 5.0]), 5.0)


def test_codes_merge_by_addition():
    a, b = (Record(n=2, codes=np.array([1, 1])), Record(n=1, codes=np.array([0, 1])))
    assert merge(a, b).codes.tolist() == [1, 2]


def test_the_needed_fields_are_those_that_others_are_computed_from():
    assert needed_fields(["m4"]) == {"n", "mean", "m2", "m3", "m4", "nans", "infs"}
    assert needed_fields([]) == {"n"}
    assert needed_fields(["zeros"]) == {"n", "zeros", "nans", "infs"}
    assert needed_fields(needed_fields(["l1"])) == needed_fields(["l1"])
    with pytest.raises(ConfigError, match="unknown statistics field 'median'"):
        needed_fields(["median"])


@pytest.mark.parametrize(
    "name", ["skewness", "kurtosis", "l0_norm", "l1_norm", "linf_norm", "rms", "sparsity", "nonfinite"]
)
def test_reading_a_field_that_was_not_measured_names_it(name):
    with pytest.raises(ConfigError, match="not measured"):
        getattr(Record(n=3), name)


def test_splits_of_a_large_sample_agree_with_scipy():
    x = np.random.default_rng(0).gamma(2, size=100_000) + 1000
    got = merge(*(record(p) for p in np.split(x, [1, 10, 500, 40_000])))
    assert got.mean == pytest.approx(x.mean(), rel=1e-12)
    assert got.variance() == pytest.approx(x.var(), rel=1e-9)
    assert got.skewness == pytest.approx(stats.skew(x), rel=1e-6)
    assert got.kurtosis == pytest.approx(stats.kurtosis(x), rel=1e-6)
