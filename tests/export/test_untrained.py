"""Parameters that are trainable and are not trained: their gradients are published, and a warning names them once."""

import logging

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.devices(slow=True)

KINDS = ("weight_gradients", "bias_gradients")


class Branched(nn.Module):
    """A network with a layer in a branch whose use the caller decides."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, use_branch=True, detach=False):
        x = self.trunk(x).tanh()
        if use_branch:
            side = self.branch(x)
            x = x + (side.detach() if detach else side)
        return self.head(x)


@pytest.fixture
def model():
    return Branched()


def watched(bus, model):
    recording = RecordingBackend()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    for kind in KINDS:
        bus.register_subscriber(NormSubscriber(kind, backend=recording))
    return exporter, recording


def train(model, optimizer, steps, **options):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(4, 3), **options).square().sum().backward()
        optimizer.step()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.fault(219)
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_gradients_without_an_optimizer(bus, model, caplog, closure):
    """They are published like all others, and a warning names the parameters once."""
    exporter, recording = watched(bus, model)
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
    expected = {}

    def loss():
        model.zero_grad()
        value = model(torch.ones(4, 3)).square().sum()
        value.backward()
        return value

    for step in range(3):
        if not closure:
            loss()
        optimizer.step(loss if closure else None)
        for name, parameter in model.named_parameters():
            module, role = name.split(".")
            expected[f"{role}_gradients_norm2", module, step] = parameter.grad.double().norm().item()
    exporter.close()
    shown = {(series.kind, series.name, step): value for series, value, step in recording.values}
    assert shown == pytest.approx(expected)
    (message,) = warnings(caplog)
    assert "branch (weight)" in message
    assert "branch (bias)" in message
    assert "trunk" not in message


@pytest.mark.fault(219)
def test_an_optimizer_that_gets_the_parameter_later(bus, model, caplog):
    """A parameter that is added to an optimizer before it gets gradients needs no warning."""
    exporter, recording = watched(bus, model)
    model.branch.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
    train(model, optimizer, 2)
    model.branch.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.branch.parameters())})
    train(model, optimizer, 2)
    exporter.close()
    steps = [
        step
        for series, _, step in recording.values
        if (series.kind, series.name) == ("weight_gradients_norm2", "branch")
    ]
    assert steps == [2, 3]
    assert not warnings(caplog)


@pytest.mark.fault(219)
def test_two_optimizers_that_take_turns(bus, model, caplog):
    """The parameters of an optimizer that does not step now are not without an optimizer."""
    exporter, _ = watched(bus, model)
    first = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
    second = torch.optim.SGD(model.branch.parameters(), lr=0.1)
    for optimizer in (first, second, first):
        train(model, optimizer, 1)
    exporter.close()
    assert not warnings(caplog)


@pytest.mark.fault(219)
@pytest.mark.parametrize("options", [{"use_branch": False}, {"detach": True}], ids=["unused", "detached"])
@pytest.mark.parametrize("steps", [120, 30], ids=["while training", "at the end"])
def test_a_parameter_that_never_gets_a_gradient(bus, model, caplog, options, steps):
    """A warning names it once, after 100 steps or at the end of a shorter run."""
    exporter, _ = watched(bus, model)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), steps, **options)
    assert len(warnings(caplog)) == (steps == 120)
    exporter.close()
    (message,) = warnings(caplog)
    assert "branch (weight), branch (bias)" in message
    assert f"{min(steps, 100)} steps" in message


@pytest.mark.fault(219)
def test_a_layer_that_is_used_now_and_then(bus, model, caplog):
    """One use in a hundred steps is enough."""
    exporter, _ = watched(bus, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(250):
        train(model, optimizer, 1, use_branch=step == 90)
    exporter.close()
    assert not warnings(caplog)


@pytest.mark.fault(219)
def test_a_layer_that_is_frozen_for_a_while(bus, model, caplog):
    """The steps in which it was frozen do not count."""
    exporter, _ = watched(bus, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.branch.requires_grad_(False)
    train(model, optimizer, 150, use_branch=False)
    model.branch.requires_grad_(True)
    train(model, optimizer, 60, use_branch=False)
    assert not warnings(caplog)
    train(model, optimizer, 100, use_branch=False)
    exporter.close()
    assert len(warnings(caplog)) == 1


def test_a_gradient_from_before_is_none_of_a_step(tmp_path):
    """A teacher that was trained before, in evaluation mode, keeps its last gradient."""
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    teacher(torch.randn(8, 4)).sum().backward()
    both, optimizer = (
        nn.ModuleDict({"student": student, "teacher": teacher.eval()}),
        torch.optim.SGD(student.parameters(), 0.1),
    )
    with ikkuna.watch(
        both, NormSubscriber("weight_gradients", backend="jsonl"), preset="default", log_dir=tmp_path, verbosity=0
    ) as watched:
        for _ in range(30):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            with torch.no_grad():
                goal = teacher(x)
            (student(x) - goal).square().sum().backward()
            optimizer.step()
        assert set(watched.read().names("weight_gradients_norm2")) == {"student"}
    assert "not_in_optimizer" not in {finding.rule for finding in watched.findings if finding.severity != "info"}
