"""Statistics of parameters and gradients under flat names."""

import math

import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.inspect import monitor


def linear(weight, bias=None):
    weight = torch.as_tensor(weight, dtype=torch.float64)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(torch.as_tensor(bias))
    return layer


def two_layers():
    return nn.Sequential(linear(torch.arange(12.0).reshape(3, 4)), linear([[10.0, 20, 30]]))


def cuts(report):
    return [value for key, value in report.items() if "/percentile/" in key]


def value(report, statistic):
    return next(number for key, number in report.items() if key.endswith(f"/{statistic}"))


def test_a_weight_matrix():
    """E01."""
    layer = linear(torch.arange(12.0).reshape(3, 4))
    report = monitor.weight_statistics(layer)
    assert (value(report, "min"), value(report, "max"), value(report, "mean")) == (0, 11, 5.5)
    assert value(report, "std") == pytest.approx(3.452052529534663)
    assert value(monitor.weight_statistics(layer, correction=1), "std") == pytest.approx(3.605551275463989)
    assert cuts(report) == pytest.approx([0.0143, 0.2508, 1.7457, 5.5, 9.2543, 10.7492, 10.9857])
    assert value(monitor.sparsity(layer), "zeros") == 1


def test_a_bias():
    """E02."""
    report = monitor.bias_statistics(linear(torch.zeros(3, 1), [10.0, 20, 30]))
    assert value(report, "mean") == 20
    assert value(report, "std") == pytest.approx(8.16496580927726)
    assert cuts(report) == pytest.approx([10.026, 10.456, 13.174, 20, 26.826, 29.544, 29.974])


def test_a_model_is_pooled():
    """E03: not a mean of the layers' means."""
    report = monitor.weight_statistics(two_layers())
    assert [value(report, name) for name in ("mean", "std", "min", "max")] == pytest.approx(
        [8.4, 7.517091636175967, 0, 30]
    )
    assert cuts(report) == pytest.approx([0.0182, 0.3192, 2.2218, 7, 10.7782, 26.808, 29.818])


def test_names():
    """E04."""
    report = monitor.weight_statistics(two_layers(), name="net")
    assert len(report) == 11
    assert "net/*/weight/data/percentile/3" in report
    one = monitor.weight_statistics(two_layers(), layer="0", name="net")
    assert list(one) == [key.replace("*", "0") for key in report]
    old = monitor.weight_statistics(two_layers(), name="net", param_names={"weight": "W", "bias": "b"})
    assert "net/*/W/data/min" in old
    assert all(type(number) is float for number in report.values())


def test_a_layer_without_bias_is_nan_everywhere():
    """E06."""
    report = monitor.bias_statistics(nn.Linear(2, 3, bias=False))
    assert len(report) == 11
    assert all(math.isnan(number) for number in report.values())


def test_gradients_before_backward_have_the_same_names():
    """E07."""
    model = two_layers()
    before = monitor.weight_gradient_statistics(model)
    assert all(math.isnan(number) for number in before.values())
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    after = monitor.weight_gradient_statistics(model)
    assert list(after) == list(before)
    assert not any(math.isnan(number) for number in after.values())
    assert len(monitor.bias_gradient_statistics(model)) == 11


def test_a_lazy_layer_is_nan_until_it_exists():
    """E08."""
    layer = nn.LazyLinear(3)
    assert all(math.isnan(number) for number in monitor.weight_statistics(layer).values())
    layer(torch.ones(1, 2))
    assert not any(math.isnan(number) for number in monitor.weight_statistics(layer).values())


def test_a_nan_propagates_or_is_omitted():
    """E09."""
    layer = linear([[1.0, 2, math.nan]])
    assert all(math.isnan(number) for number in monitor.weight_statistics(layer).values())
    report = monitor.weight_statistics(layer, nan="omit")
    assert [value(report, name) for name in ("min", "max", "mean", "std")] == [1, 2, 1.5, 0.5]


def test_zeros_are_counted():
    """E10."""
    layer = linear([[0.0, 1], [-0.0, math.nan]], [0.0, 3])
    report = monitor.sparsity(layer)
    assert (value(report, "zeros"), value(report, "fraction"), value(report, "total")) == (2, 0.5, 4)
    assert value(monitor.sparsity(layer, include_bias=True), "zeros") == 3
    assert value(monitor.sparsity(layer, layer=layer), "zeros") == 2


def test_which_parameters_are_weights_and_which_biases():
    """E12."""
    model = nn.Module()
    model.parts = nn.ModuleList(
        [
            nn.LSTM(4, 3, 2, bidirectional=True, proj_size=2),
            nn.MultiheadAttention(8, 2),
            nn.BatchNorm1d(3),
            nn.Embedding(5, 2),
            nn.Conv2d(3, 4, 3),
        ]
    )
    totals = {
        (param, norm): sum(p.numel() for p in monitor._select(model, param, None, norm))
        for param in ("weight", "bias")
        for norm in (False, True)
    }
    assert totals == {("weight", False): 686, ("weight", True): 689, ("bias", False): 132, ("bias", True): 135}
    assert value(monitor.sparsity(model, tol=math.inf), "total") == 686


def test_shared_parameters_count_once():
    """E13."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert value(monitor.sparsity(model), "total") == 9


def test_parametrised_weights_are_weights():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert value(monitor.sparsity(model), "total") == 2 + 6


def test_an_identity_matrix():
    """E14."""
    layer = linear(torch.eye(4))
    report = monitor.weight_statistics(layer)
    assert value(monitor.sparsity(layer), "zeros") == 12
    assert (value(report, "mean"), value(report, "std")) == (0.25, pytest.approx(0.4330127018922193))
    assert cuts(report) == [0, 0, 0, 0, 1, 1, 1]


def test_a_symmetric_range():
    """E15."""
    report = monitor.weight_statistics(linear(torch.linspace(-1, 1, 101, dtype=torch.float64)[None]))
    assert cuts(report) == pytest.approx([-0.9974, -0.9544, -0.6826, 0, 0.6826, 0.9544, 0.9974], abs=1e-12)
    assert cuts(report) == pytest.approx([-cut for cut in reversed(cuts(report))], abs=1e-12)


def test_an_unknown_layer_lists_close_ones():
    """E19."""
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    with pytest.raises(KeyError, match="encoder"):
        monitor.weight_statistics(model, "encodr")
    with pytest.raises(KeyError, match="not part"):
        monitor.weight_statistics(model, nn.Linear(1, 1))


@pytest.mark.parametrize("wrong", [{"param": "w"}, {"attr": "x"}, {"nan": "no"}, {"percentiles": [101]}])
def test_invalid_values_are_named(wrong):
    with pytest.raises(ConfigError):
        monitor.parameter_statistics(two_layers(), **wrong)


def test_a_named_layer_aggregates_what_is_below_it():
    model = nn.Sequential(two_layers(), nn.BatchNorm1d(1))
    assert value(monitor.weight_statistics(model, "0"), "mean") == pytest.approx(8.4)
    assert value(monitor.weight_statistics(model, "1"), "mean") == 1.0  # a normalisation layer, because it is named
    assert value(monitor.weight_statistics(model), "mean") == pytest.approx(8.4)


def test_sparse_gradients_without_nan():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1])).sum().backward()
    assert monitor.weight_gradient_statistics(layer, nan="omit") == monitor.weight_gradient_statistics(layer)
