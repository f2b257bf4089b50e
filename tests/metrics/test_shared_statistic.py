"""The base class of metrics that are a function of shared statistics."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.export import subscriber
from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record
from tests.metrics.running import watched

RECORDS = [
    Record(4, 2.0, 5.0, 3.0, 11.0, 1.0, 4.0, 8.0, 21.0, 0, 0, 0),
    Record(3, 1.0, 0.0, 1e-40, 1e-40, 1.0, 1.0, 3.0, 3.0, 0, 0, 0),
    Record(9, -1.0, 7.0, -2.0, 30.0, -6.0, 0.0, 9.0, 16.0, 2, 0, 0),
]


class Extremes(SharedStatisticSubscriber):
    """The largest magnitude and the range."""

    fields = ("min", "max")
    results = ("largest", "range")

    def values(self, record):
        return record.linf_norm, record.max - record.min


def test_a_subclass_needs_fields_results_and_values_only():
    found = watched(lambda **o: Extremes("activations", **o), torch.tensor([-3.0, 1.0, 2.0]))
    assert found == {"activations_largest": [3.0], "activations_range": [5.0]}


def test_other_names_must_be_as_many_as_the_results():
    assert Extremes("weights", publishes=["a", "b"]).publishes == ("a", "b")
    with pytest.raises(ConfigError, match="2 names, for weights_largest, weights_range; got 1"):
        Extremes("weights", publishes="a")


def test_the_results_of_one_object_do_not_change_its_class():
    assert subscriber.NormSubscriber("weights", 1).publishes == ("weights_norm1",)
    assert subscriber.NormSubscriber("weights").publishes == ("weights_norm2",)
    assert subscriber.NormSubscriber.results == ()


def test_finite_only_is_refused_where_it_would_have_no_effect():
    for make in (Extremes, subscriber.MinMaxSubscriber, subscriber.SparsitySubscriber, subscriber.RankSpreadSubscriber):
        with pytest.raises(ConfigError, match=f"{make.__name__} always uses all elements"):
            make("weights", finite_only=True)
        assert make("weights", finite_only=False).finite_only is False
    assert subscriber.MeanSubscriber("weights", finite_only=True).finite_only


@pytest.mark.parametrize(
    "make",
    [
        lambda: subscriber.MeanSubscriber("weights"),
        lambda: subscriber.SumSubscriber("weights"),
        lambda: subscriber.VarianceSubscriber("weights", correction=1),
        lambda: subscriber.MinMaxSubscriber("weights"),
        lambda: subscriber.SparsitySubscriber("weights"),
        lambda: subscriber.MomentsSubscriber("weights"),
        *(lambda p=p: subscriber.NormSubscriber("weights", p) for p in (0, 1, 2, math.inf)),
    ],
)
def test_values_of_many_tensors_at_once_equal_those_of_each(make):
    """Delivery by arrays passes an object whose properties are arrays with one element per tensor."""

    def column(name):
        return np.array([getattr(record, name) for record in RECORDS])

    names = ("mean", "count", "min", "max", "finite_min", "finite_max", "skewness", "kurtosis", "sparsity")
    norms = ("l0_norm", "l1_norm", "l2_norm", "linf_norm")
    table = SimpleNamespace(**{name: column(name) for name in (*names, *norms)})
    table.variance = lambda correction: np.array([record.variance(correction) for record in RECORDS])
    metric = make()
    expected = np.array([[float(value) for value in metric.values(record)] for record in RECORDS])
    np.testing.assert_array_equal(np.stack([np.asarray(v) for v in metric.values(table)], axis=1), expected)


def test_equal_numbers_have_no_moments_however_their_mean_is_rounded():
    metric = subscriber.MomentsSubscriber("weights")
    assert all(
        math.isnan(value) for value in metric.values(Record(3, 0.1, 1e-34, 1e-51, 1e-68, *[0.1] * 4, nans=0, infs=0))
    )
