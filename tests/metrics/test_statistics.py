"""Statistics of parameters while a network trains, against `ikkuna.monitor` and float64 numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna import monitor
from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import StatisticsSubscriber
from ikkuna.plot import fan_series
from tests.metrics.running import trained

SIGMA = (0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87)


def numpy_statistics(x):
    x = x.double().numpy()
    return [x.min(), x.max(), x.mean(), x.std(), *np.percentile(x, SIGMA)]


def network():
    """The acceptance case E03: its pooled mean is not the mean of layers' means."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1, bias=False), nn.LayerNorm(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(12.0).reshape(3, 4))
        model[1].weight.copy_(torch.tensor([[10.0, 20.0, 30.0]]))
    return model


def run(network, steps=1, **options):
    log = []
    makers = [lambda **o: StatisticsSubscriber(**{"exact": True, "report": log.append, **options, **o})]
    found, before = trained(makers, network, steps, batch=lambda step: torch.ones(2, 4))
    return log, found, before


def test_the_acceptance_case_has_its_numbers():
    log, found, _ = run(network(), kinds="weights")
    [entry] = log
    expected = [0, 30, 8.4, 7.517091636175967]
    assert [entry[f"model/*/weight/data/{s}"] for s in ("min", "max", "mean", "std")] == pytest.approx(expected)
    cuts = [entry[f"model/*/weight/data/percentile/{i}"] for i in range(7)]
    assert cuts == pytest.approx([0.0182, 0.3192, 2.2218, 7, 10.7782, 26.808, 29.818], rel=0.13)
    assert entry["model/*/weight/sparsity/zeros"] == 1
    assert entry["model/0/weight/data/mean"] == 5.5
    assert found["weight_data_std", None] == [entry["model/*/weight/data/std"]]
    assert found["weight_data_percentile_3", "1"] == [pytest.approx(20, rel=0.13)]


def test_keys_are_those_of_the_monitor_and_the_same_at_every_step():
    log, _, _ = run(network(), steps=3, model="Sequential")
    model = network()
    keys = set()
    for layer in (None, "0", "1", "2"):
        parts = [monitor.weight_statistics(model, layer), monitor.weight_gradient_statistics(model, layer)]
        if layer != "1":
            parts += [monitor.bias_statistics(model, layer), monitor.bias_gradient_statistics(model, layer)]
        keys |= {key for part in parts for key in part}
    zeros = {key for key in log[0] if key.endswith("/sparsity/zeros")}
    assert len(zeros) == 2 + 3 + 2
    assert set(log[0]) - zeros == keys
    assert all(entry.keys() == log[0].keys() for entry in log)


def test_statistics_are_those_of_numpy_for_all_parameters_of_a_layer_together():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 60))
    log, found, before = run(model, steps=2)
    for step, weights in enumerate(before):
        for layer, names in {"0": ["0.weight"], "1": ["1.weight"], "*": ["0.weight", "1.weight"]}.items():
            x = torch.cat([weights[name].reshape(-1) for name in names])
            wanted = numpy_statistics(x)
            values = [v for k, v in log[step].items() if k.startswith(f"model/{layer}/weight/data/")]
            assert values[:4] == pytest.approx(wanted[:4], rel=1e-6, abs=1e-7 * x.std().item())
            assert values[4:] == pytest.approx(wanted[4:], rel=0.13, abs=1e-3)
    assert found["bias_grad_mean", "1"] == [entry["model/1/bias/grad/mean"] for entry in log]


def test_normalisation_layers_count_in_the_whole_only_with_include_norm():
    def entry(**options):
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        with torch.no_grad():
            model[1].weight.fill_(100.0)
        return run(model, **options)[0][0]

    assert entry()["model/*/weight/data/max"] < 1
    assert entry(include_norm=True)["model/*/weight/data/max"] == 100
    assert entry()["model/1/weight/data/max"] == 100


def test_what_does_not_exist_is_nan_in_the_report_and_no_point_of_a_curve():
    model = network()
    model[0].requires_grad_(False)
    log, found, _ = run(model)
    assert math.isnan(log[0]["model/0/weight/grad/percentile/6"])
    assert ("weight_grad_mean", "0") not in found
    assert ("weight_grad_mean", "1") in found


def test_one_nan_makes_all_statistics_nan_but_not_those_of_other_layers():
    model = network()
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    [entry] = run(model, kinds="weights")[0]
    assert all(math.isnan(entry[f"model/{layer}/weight/data/min"]) for layer in "*1")
    assert entry["model/0/weight/data/min"] == 0


def test_a_log_is_drawn_as_a_fan():
    log, _, _ = run(network(), steps=3)
    fans = {(fan.layer, fan.column): fan for fan in fan_series(log)}
    assert {column for _, column in fans} == {"Weights", "Biases", "Weight Gradients", "Bias Gradients"}
    assert len(fans["*", "Weights"].bands) == 4
    assert fans["0", "Weights"].median.shape == (3,)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="needs kinds of parameters .*, got 'activations'"):
        StatisticsSubscriber("activations")
    with pytest.raises(ConfigError, match="report needs a function of a dictionary, got list"):
        StatisticsSubscriber(report=[])
