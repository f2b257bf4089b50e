"""Findings say what their values know about the cause: where a NaN is, and whether outputs ever depended on the inputs."""

import math

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis import Judge, get_rules
from tests.diagnosis.rows import NETWORK


def train(model, batch, path, rate=0.1, steps=60):
    optimizer, loss = torch.optim.SGD(model.parameters(), rate), nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss=loss, log_dir=path, backend="null", verbosity=0) as exporter:
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return {finding.rule: finding for finding in exporter.findings}


def labels_of(x):
    return (x[:, 0] > 0).long()


class Root(nn.Module):
    def forward(self, x):
        return (x - x).sqrt() + x


@pytest.mark.parametrize(
    ("layer", "poison", "text", "module"),
    [
        (nn.Tanh(), True, "came in with the inputs", None),
        (Root(), False, "It is first seen at this module", "1"),
    ],
)
def test_a_nan_is_located(layer, poison, text, module, tmp_path):
    torch.manual_seed(0)

    def batch(step):
        x = torch.randn(16, 8)
        y = labels_of(x)
        if poison and step == 20:
            x[3, 2] = math.nan
        return x, y

    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 2))
    finding = train(model, batch, tmp_path)["nonfinite"]
    assert text in finding.message
    assert finding.module == module
    assert ("missing values" in finding.advice) == poison


def judged(rule, values):
    """Return the finding of a rule on series with a value at every tenth step."""
    judge = Judge([next(each for each in get_rules() if each.name == rule)], NETWORK)
    for i in range(40):
        for (kind, name), of in values.items():
            judge.add(kind, name, 10 * i, of[min(i, len(of) - 1)])
        judge.finish_step(10 * i)
    (finding,) = judge.findings
    return finding


def test_outputs_that_never_depended_on_the_inputs_are_cut_off():
    finding = judged("ignores_input", {("output_dependence", None): [1e-12]})
    assert "at the first step already" in finding.message
    assert "multiplied by zero" in finding.advice


def test_outputs_that_depended_on_the_inputs_at_first_have_learned_a_constant():
    """Both remaining causes are named, with what tells them apart."""
    finding = judged("ignores_input", {("output_dependence", None): [0.3, 0.1, 1e-3, 1e-9]})
    assert "It was 0.3 at the first step" in finding.message
    assert "the labels do not belong to the inputs; if it is larger, the learning rate is too high" in finding.message
    assert "multiplied by zero" not in finding.advice


WEIGHTS = {("weights_norm2", name): [1.0] for name in ("fc0", "fc1", "head")}
GRADIENTS = {("weight_gradients_norm2", name): [1.0] for name in ("fc0", "fc1", "head")}


@pytest.mark.parametrize(
    ("series", "module", "text"),
    [
        (
            {("weights_norm2", "fc1"): [1.0, math.nan]},
            "fc1",
            "weight of this module, which an earlier step has changed",
        ),
        ({("weight_gradients_norm2", "fc1"): [1.0, math.nan]}, "fc1", "gradient of this weight"),
        ({("activations_variance", "fc1"): [1.0, math.nan]}, "fc1", "output of this module"),
        (
            {("input_data_mean", None): [0.0, math.nan], ("activations_variance", "fc0"): [1.0, math.nan]},
            None,
            "inputs",
        ),
        # the weights were broken before, and the inputs may be outputs of another network
        ({("input_data_mean", None): [math.nan], ("weights_norm2", "fc1"): [math.nan]}, "fc1", "weight of this module"),
    ],
)
def test_a_value_that_is_not_finite_is_located_by_the_series(series, module, text):
    finding = judged("nonfinite", WEIGHTS | GRADIENTS | series)
    assert finding.module == module
    assert text in finding.message


@pytest.mark.parametrize(("limit", "expected"), [(1e-8, {"clipped_hard"}), (1e5, set())])
def test_clipping_explains_updates_that_are_rounded_away(limit, expected, tmp_path):
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for _ in range(80):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss(model(x), labels_of(x)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
    assert {finding.rule for finding in exporter.findings} & {"clipped_hard", "lost_updates"} == expected
    assert all("lost_updates" in finding.consequences for finding in exporter.findings)


def test_an_activation_before_the_loss_explains_its_dead_units(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2), nn.ReLU())
    nn.init.constant_(model[2].bias, -9.0)
    found = train(model, lambda step: ((x := torch.randn(16, 8)), labels_of(x)), tmp_path)
    assert "dead_units" in found["activation_before_loss"].consequences
