"""The examples run, and TensorBoard reads their files."""

import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.plugins.children import ROOT, run_python

KINDS = {
    "digits": ("weights_norm2", "layer_gradients_norm2", "activations_variance", "weight_updates_weights_ratio"),
    "text": ("weights_norm2", "layer_gradients_norm2", "activations_mean", "weight_updates_weights_ratio"),
}
LAYERS = {"digits": ("conv1", "hidden"), "text": ("head", "blocks.layers.0.linear1")}
SIZE = {"digits": "1", "text": "12"}  # epochs, steps


@pytest.fixture(scope="module", params=KINDS)
def example(request, tmp_path_factory):
    """The name of an example, its output, and its values: tag → {step: value}."""
    work = tmp_path_factory.mktemp(request.param)
    printed = run_python(str(ROOT / "examples" / f"{request.param}.py"), SIZE[request.param], "run", cwd=work)
    [run] = (work / "run").iterdir()
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return request.param, printed, {t: {v.step: v.value for v in events.Scalars(t)} for t in events.Tags()["scalars"]}


def test_the_loss_is_written_at_every_step_and_falls(example):
    _, _, curves = example
    loss = list(curves["Network/loss"].values())
    assert list(curves["Network/loss"]) == list(range(len(loss)))
    assert len(loss) >= 12
    assert sum(loss[-3:]) < sum(loss[:3])


def test_every_kind_is_written_for_the_layers(example):
    name, _, curves = example
    for kind in KINDS[name]:
        for layer in LAYERS[name]:
            values = curves[f"{kind}/{layer}"]
            assert list(values)[:2] == ([0, 5] if name == "digits" else [0, 10])
            assert all(math.isfinite(value) for value in values.values())


def test_the_table_shows_the_values_of_the_file(example):
    name, printed, curves = example
    last = list(curves[f"weights_norm2/{LAYERS[name][0]}"].values())[-1]
    [line] = [line for line in printed.splitlines() if line.split()[:1] == [LAYERS[name][0]]]
    assert f"{last:.4g}" in line.split()
    assert "tensorboard --logdir run" in printed


def test_gradients_are_printed_during_training_and_no_file_is_written(tmp_path):
    printed = run_python(str(ROOT / "examples" / "print_gradients.py"), "11", cwd=tmp_path).splitlines()
    found = [re.fullmatch(r"step (\d+) +(\w+) +(\w+) +norm (\d\.\d{3}e[+-]\d\d)", line).groups() for line in printed]
    kinds = ("weight_gradients", "bias_gradients")
    assert [line[:3] for line in found] == [(s, m, k) for s in ("0", "10") for m in ("0", "2") for k in kinds]
    assert all(float(norm) > 0 for *_, norm in found)
    assert not list(tmp_path.iterdir())


def test_the_printed_norms_are_those_of_the_gradients(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from print_gradients import watch_gradients

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_gradients(model):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    norms = [f"{parameter.grad.norm():.3e}" for parameter in model.parameters()]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == norms


def test_the_dead_layer_is_found_and_drawn(tmp_path):
    printed = run_python(str(ROOT / "examples" / "dead_layer.py"), str(tmp_path), "60", cwd=tmp_path)
    findings = [line.split()[:3] for line in printed.splitlines() if line.startswith(("error", "warning"))]
    assert findings == [["error", "dead_units", "relu3"]]
    assert (tmp_path / "dead_layer.png").stat().st_size > 5_000
