"""Statistics of several tensors as arrays equal the records of the single tensors."""

import math

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS, Record, needed_fields
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.record import Records, record_of
from ikkuna.numerics.statistics.table import COLUMN, row_of, rows_of

PROPERTIES = (
    *("n", "count", "nonfinite", "mean", "skewness", "kurtosis", "rms", "sparsity", "l0_norm", "l1_norm", "l2_norm"),
    *("linf_norm", "min", "max", "finite_min", "finite_max", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs"),
)
TENSORS = (
    *([3.0, -4.0, 0.0], [1.5], [2.0, 2.0, 2.0], [0.0, 0.0], [1e200, -1e200], [1e-300, 0.0], [0.1, 0.2, 0.7, -3.0]),
    *([math.nan, 1.0], [math.inf, 1.0, 2.0], [math.nan], [math.inf, -math.inf], [math.nan, math.inf, 0.0]),
)


def table_of(tensors, fields):
    statistics = HostStatistics()
    for row, values in enumerate(tensors):
        statistics.add(row, torch.tensor(values, dtype=torch.float64), fields)
    return statistics


@pytest.mark.parametrize("finite_only", [False, True])
@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:7], TENSORS[7:8]], ids=["mixed", "finite", "one"])
def test_each_property_equals_that_of_the_records(tensors, finite_only):
    fields = needed_fields(set(FIELDS) - HISTOGRAMS)
    statistics = table_of(tensors, fields)
    records = Records(statistics.values[: len(tensors)], fields, finite_only)
    for i in range(len(tensors)):
        own = statistics.record(i, fields)
        own.finite_only = finite_only
        assert records[i].finite_only == finite_only
        with np.errstate(all="ignore"):
            for name in PROPERTIES:
                np.testing.assert_equal(getattr(records, name)[i], float(getattr(own, name)), err_msg=f"{name} of {i}")
            for correction in (0, 1):
                np.testing.assert_equal(records.variance(correction)[i], own.variance(correction))


def test_records_of_numbers_equal_those_of_single_numbers():
    values = [0.0, -0.5, 3.0, math.nan, math.inf, -math.inf, 1e300]
    np.testing.assert_array_equal(rows_of(np.array(values)), [row_of(value) for value in values])
    records = Records.of(np.array(values))
    for i, value in enumerate(values):
        for name in ("mean", "l2_norm", "min", "n", "nonfinite"):
            np.testing.assert_equal(getattr(records, name)[i], float(getattr(Record.of(value), name)))


def test_a_field_that_was_not_measured_is_an_error():
    records = Records(rows_of(np.array([1.0, 2.0])), needed_fields(["sumsq"]))
    assert records.l2_norm.tolist() == [1.0, 2.0]
    for name in ("mean", "max", "zeros", "sparsity"):
        with pytest.raises(ConfigError, match="was not measured"):
            getattr(records, name)
    with pytest.raises(ConfigError, match="'nans' and 'infs' were not measured"):
        _ = Records(rows_of(np.array([1.0])), needed_fields(["min"])).nonfinite


@pytest.mark.parametrize("name", ["mean", "m2", "m3", "m4"])
def test_a_moment_that_exceeds_float64_is_infinite(name):
    """Sums of opposite infinite terms are NaN in a table, in which only elements that are NaN are counted as such."""
    row = row_of(1.0)
    row[COLUMN[name]] = math.nan
    assert getattr(record_of(row, frozenset([name])), {"mean": "center"}.get(name, name)) == math.inf


def test_the_records_of_ranks_are_those_of_their_rows():
    rows = [row_of(2.0), None, row_of(5.0)]
    records = Records(rows_of(np.array([3.5])), frozenset(COLUMN), ranks=[rows])
    assert records[0].ranks == (Record.of(2.0), None, Record.of(5.0))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 128, 129, 500])
def test_as_many_rows_are_taken_as_are_requested(count):
    statistics, fields = HostStatistics(), needed_fields(["mean"])
    statistics.add(0, torch.tensor([3.0]), fields)
    assert [record_of(row, fields).n for row in statistics.take(count)[0]] == [1, *[0] * count][:count]


def test_selected_records_keep_their_fields():
    records = Records.of(np.array([1.0, math.nan, 3.0]))
    assert records.select(np.array([2, 0])).mean.tolist() == [3.0, 1.0]
    assert math.isnan(records.l1_norm[1])
    finite = Records(records.table, records.fields, finite_only=True)
    assert finite.l1_norm.tolist() == [1.0, 0.0, 3.0]
    assert finite.select(np.array([1])).finite_only
