"""Gradients under a gradient scaler; the sentences of *Limits, and the order of calls* on scaled gradients."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ikkuna.export import Exporter
from ikkuna.export.subscriber import NonFiniteSubscriber, NormSubscriber, SumSubscriber
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.devices

KINDS = (
    "layer_gradients",
    "weight_gradients",
    "bias_gradients",
    "weight_gradients_unclipped",
    "weight_micro_gradients",
)
SCALE = 1024.0


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def watched(bus, model, kinds=KINDS, make=NormSubscriber):
    recording = RecordingBackend()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    for kind in kinds:
        bus.register_subscriber(make(kind, backend=recording))
    return exporter, recording


def shown(recording):
    return {(series.kind, series.name, step): value for series, value, step in recording.values}


def run(model, steps, scaler, optimizers=None):
    """Train, and return the norms of an independent float64 copy of the model without a scaler."""
    expected = {}
    optimizers = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)]
    for step in range(steps):
        plain = copy.deepcopy(model).double()
        for module in plain.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        outputs, x = [], torch.ones(2, 3, dtype=torch.float64)
        for layer in plain:
            x = layer(x)
            x.retain_grad()
            outputs.append(x)
        x.square().sum().backward()
        for i, output in enumerate(outputs):
            expected["layer_gradients_norm2", str(i), step] = output.grad.norm().item()
        for name, parameter in plain.named_parameters():
            module, role = name.split(".")
            expected[f"{role}_gradients_norm2", module, step] = parameter.grad.norm().item()
            if role == "weight":
                expected["weight_gradients_unclipped_norm2", module, step] = parameter.grad.norm().item()
                expected["weight_micro_gradients_norm2", module, step] = parameter.grad.norm().item()
        model.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return expected


@pytest.mark.fault(218)
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_all_gradients_are_those_of_the_loss_without_the_scale(bus, model, scale):
    """All gradients are those of the loss without the factor of a gradient scaler."""
    exporter, recording = watched(bus, model)
    expected = run(model, 3, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2))
    exporter.close()
    found = shown(recording)
    assert {key: value for key, value in found.items() if key[2]} == pytest.approx(
        {key: value for key, value in expected.items() if key[2]}, rel=1e-5
    )


@pytest.mark.fault(218)
def test_the_first_step_under_a_scaler(bus, model, caplog):
    """The first step under a gradient scaler has no gradients of layers, of single micro-batches and before clipping."""
    exporter, recording = watched(bus, model)
    run(model, 2, None)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    run(model, 2, scaler)
    run(model, 2, None)
    exporter.close()
    steps = {}
    for kind, _, step in shown(recording):
        steps.setdefault(kind, set()).add(step)
    without = {0, 1, 3, 5}  # the scaler is new at step 2, and gone at step 4
    assert steps == {
        "layer_gradients_norm2": without,
        "weight_gradients_unclipped_norm2": without,
        "weight_micro_gradients_norm2": without,
        "weight_gradients_norm2": set(range(6)),
        "bias_gradients_norm2": set(range(6)),
    }
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.fault(218)
def test_a_parameter_without_an_optimizer_under_a_scaler(bus, model):
    """The scaler unscales what its optimizer has; gradients of other parameters are divided, too."""
    exporter, recording = watched(bus, model, KINDS[:3])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    expected = run(model, 3, torch.amp.GradScaler("cpu", init_scale=SCALE), [optimizer])
    exporter.close()
    found = shown(recording)
    last = {key: value for key, value in found.items() if key[2] == 2}
    assert len(last) == 7
    assert last == pytest.approx({key: expected[key] for key in last}, rel=1e-5)


@pytest.mark.fault(218)
def test_half_precision(bus):
    """Gradients that half precision cannot represent without the scale are not rounded to 0."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    exporter, recording = watched(bus, model, ("layer_gradients",))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, dtype=torch.float16)).float().sum() * 2.0**-26
        scaler.scale(loss).backward()
        optimizer.param_groups[0]["params"][0].grad = None  # half-precision gradients cannot be unscaled
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(1)}
        scaler._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
        scaler.step(optimizer)
        scaler.update()
    exporter.close()
    found = shown(recording)
    assert found["layer_gradients_norm2", "1", 1] == pytest.approx(2.0**-26 * 2, rel=1e-6)  # four elements


@pytest.mark.fault(218)
def test_a_step_that_the_scaler_skips_shows_its_infinities(bus, model):
    exporter, recording = watched(bus, model, ("layer_gradients",), NonFiniteSubscriber)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    exporter.close()
    assert any(value > 0 for _, value, _ in recording.values)


@pytest.mark.fault(218)
def test_scalers_that_take_turns(bus, model, caplog):
    """Steps of one model in which scalers take turns have no layer gradients; this is logged once."""
    exporter, recording = watched(bus, model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=SCALE) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        run(model, 1, scalers[i % 2], [optimizer])
    exporter.close()
    assert {kind for kind, _, _ in shown(recording)} == {"weight_gradients_norm2", "bias_gradients_norm2"}
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "layer_gradients" in record.getMessage()


def test_micro_batches_under_a_scaler(bus, model):
    """Each of several micro-batches whose loss is a function has its own gradient without the factor."""
    exporter, recording = watched(bus, model, ("weight_micro_gradients",), SumSubscriber)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=SCALE)
    expected = {}
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
            scaler.scale(loss / 3).backward()
        scaler.unscale_(optimizer)
        for module in ("0", "2"):
            gradient = model.get_submodule(module).weight.grad
            expected["weight_micro_gradients_sum", module, step] = gradient.sum().item()
        scaler.step(optimizer)
        scaler.update()
    exporter.close()
    assert shown(recording) == pytest.approx({k: v for k, v in expected.items() if k[2]}, rel=1e-4, abs=1e-6)


def test_a_scale_by_hand_stays(bus, model):
    """A factor that the training loop multiplies by hand stays in the gradients of layers."""
    exporter, recording = watched(bus, model, ("layer_gradients",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.ones(2, 3)).sum() * SCALE).backward()
    optimizer.step()
    exporter.close()
    assert shown(recording)["layer_gradients_norm2", "2", 0] == pytest.approx(SCALE * 2)
