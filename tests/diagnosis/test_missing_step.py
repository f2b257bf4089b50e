"""A training without a step of an optimizer has a finding that says what is there in place of one."""

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis.check import check


def no_call(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        optimizer.zero_grad()
        yield loss().backward()


def left_out_by_a_condition(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        loss().backward()
        if all(p.grad is None for p in model.parameters()):
            optimizer.step()
        yield optimizer.zero_grad()


def of_a_copy(model, loss):
    optimizer = torch.optim.Adagrad(nn.Linear(4, 3).parameters(), 0.1)
    while True:
        optimizer.zero_grad()
        loss().backward()
        yield optimizer.step()


def skipped_by_a_scaler(model, loss):
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**60)
    while True:
        optimizer.zero_grad()
        (scaler.scale(loss()) * torch.inf).backward()
        scaler.step(optimizer)
        yield scaler.update()


def without_a_backward(model, loss):
    while True:
        yield loss()


@pytest.mark.parametrize(
    ("loop", "texts"),
    [
        (no_call, ["Backward passes have given gradients", "SGD has parameters of the model", "step() was not called"]),
        (left_out_by_a_condition, ["Backward passes have given gradients", "or was skipped"]),
        (of_a_copy, ["Backward passes have given gradients", "parameters of other models or of a copy", "Adagrad"]),
        (
            skipped_by_a_scaler,
            ["A gradient scaler is used, which skips the step", "its scale has fallen from 1.15292e+18 to"],
        ),
        (without_a_backward, ["No backward pass has given gradients"]),
    ],
)
@pytest.mark.parametrize("steps", [30, 120])
def test_the_finding_says_what_is_there_in_place_of_a_step(loop, texts, steps, tmp_path):
    model, function = nn.Linear(4, 3), nn.CrossEntropyLoss()
    with ikkuna.watch(model, function, log_dir=tmp_path, verbosity=0) as monitor:
        one_step = loop(model, lambda: function(model(torch.randn(8, 4)), torch.randint(3, (8,))))
        for _ in range(steps):
            next(one_step)
    [finding] = [found for found in monitor.findings if found.severity != "info"]
    assert (finding.rule, finding.severity) == ("missing_step", "error")
    assert [text for text in texts if text not in finding.message] == []


def test_a_few_forwards_without_a_step_are_no_mistake(tmp_path):
    model = nn.Linear(4, 3)
    with ikkuna.watch(model, log_dir=tmp_path, verbosity=0) as monitor:
        for _ in range(20):
            model(torch.randn(8, 4))
    assert not monitor.findings


def test_the_finding_is_stored(tmp_path):
    model = nn.Linear(4, 3)
    with ikkuna.watch(model, log_dir=tmp_path, verbosity=0) as monitor:
        for _ in range(120):
            model(torch.randn(8, 4)).sum().backward()
    [run] = tmp_path.iterdir()
    assert [found.rule for found in check(run)] == ["missing_step"] == [f.rule for f in monitor.findings]


def test_parameters_that_never_have_a_gradient_are_a_finding(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "head": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, log_dir=tmp_path, verbosity=0) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            model["used"](torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    [finding] = [found for found in monitor.findings if found.rule == "no_gradient"]
    assert (finding.severity, finding.module, finding.modules) == ("info", "head.0", ("head.0", "head.1"))
    assert "in 30 steps, head.0 (weight), head.0 (bias), head.1 (weight), head.1 (bias)" in finding.message


@pytest.mark.parametrize("write", ["in place", "by data"])
def test_weights_that_the_loop_updates_by_hand_are_no_error(write, tmp_path):
    model, function = nn.Linear(4, 3), nn.CrossEntropyLoss()
    with ikkuna.watch(model, function, log_dir=tmp_path, verbosity=0) as monitor:
        for _ in range(120):
            function(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
            for parameter in model.parameters():
                if write == "by data":
                    parameter.data = parameter.data - 0.1 * parameter.grad
                else:
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad
                parameter.grad = None
    [finding] = monitor.findings
    assert (finding.rule, finding.severity) == ("missing_step", "info")
    assert "Something else has changed its parameters." in finding.message
