"""Statistics of several tensors as arrays equal the records of the single tensors."""

import math

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS, Record, needed_fields
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.record import Records
from ikkuna.numerics.statistics.table import row_of, rows_of

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


def test_selected_records_keep_their_fields():
    records = Records.of(np.array([1.0, math.nan, 3.0]))
    assert records.select(np.array([2, 0])).mean.tolist() == [3.0, 1.0]
    assert math.isnan(records.l1_norm[1])
    finite = Records(records.table, records.fields, finite_only=True)
    assert finite.l1_norm.tolist() == [1.0, 0.0, 3.0]
    assert finite.select(np.array([1])).finite_only
