"""Mistakes that `watch` finds in the loss at the first step, and training that is the same with and without."""

import random
import re
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.diagnosis import recorded_preflight
from ikkuna.diagnosis.recorded_preflight import why_impure
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.errors import ConfigError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 4
NUMBERS = X[:, :1] * 0.3 + 0.1
ZERO_ONE = (X[:, :4] > 0).float()
SCORES, NUMBER = [nn.Linear(8, 4)], [nn.Linear(8, 1)]
CHECKED = {"label_shape", "softmax_twice", "unbounded_loss", "wrong_optimum", "labels_without_gradient", "loss_floor",
           "labels_out_of_reach", "labels_no_distribution", "no_log_softmax", "sigmoid_twice", "loss_contract"}  # fmt: skip


def negative(output, labels):
    return -F.cross_entropy(output, labels)


def difference(output, labels):
    return (output - labels).square().mean()


class Focal(nn.Module):
    def forward(self, output, labels):
        losses = F.cross_entropy(output, labels, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


class Running(nn.Module):
    """A loss with a buffer, a counter and noise."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        self.seen += output.detach().mean()
        return F.cross_entropy(output + 0.01 * torch.randn_like(output), labels) + 0 * self.seen


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        if output.grad_fn is None:
            raise RuntimeError("not the output of the model")
        return F.cross_entropy(output, labels)


class Uncopyable(nn.CrossEntropyLoss):
    __module__ = "torch.of_a_library"

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.fixture
def patient(monkeypatch):
    """Let the checks take their time on a busy machine."""
    monkeypatch.setattr(recorded_preflight, "_SECONDS", 600.0)


def train(layers, loss, labels, path, steps=2, inputs=X, **options):
    """Train some steps, and return the closed handle."""
    torch.manual_seed(3)
    model = nn.Sequential(*layers)
    with ikkuna.watch(model, loss, log_dir=path, verbosity=0, backend="jsonl", **options) as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            watched.loss(model(inputs), labels).backward()
            optimizer.step()
    return watched


def named(watched):
    return {finding.rule for finding in watched.findings} & CHECKED


@pytest.mark.parametrize(
    ("layers", "loss", "labels", "rule"),
    [
        ([nn.Linear(8, 4), nn.Softmax(-1)], nn.CrossEntropyLoss(), CLASSES, "softmax_twice"),
        (NUMBER, difference, NUMBERS.flatten(), "label_shape"),
        (SCORES, negative, CLASSES, "wrong_optimum"),
        (SCORES, nn.BCEWithLogitsLoss(), 2 * ZERO_ONE - 1, "loss_contract"),
        ([nn.Linear(8, 1), nn.Sigmoid()], nn.MSELoss(), 10 + NUMBERS, "labels_out_of_reach"),
        (SCORES, nn.CrossEntropyLoss(), ZERO_ONE, "labels_no_distribution"),
        (SCORES, nn.CrossEntropyLoss(ignore_index=0), CLASSES, "labels_without_gradient"),
    ],
)
@pytest.mark.usefixtures("patient")
def test_planted_mistakes_are_named_at_step_0(layers, loss, labels, rule, tmp_path):
    heard = []
    watched = train(layers, loss, labels, tmp_path, steps=1, on_finding=heard.append)
    assert [(finding.rule, finding.step) for finding in heard if finding.rule in CHECKED] == [(rule, 0)]
    assert named(watched) == {rule}
    assert rule in {finding.rule for finding in read_findings(watched.run_directory)}


@pytest.mark.parametrize(
    ("layers", "loss", "labels"),
    [
        (SCORES, nn.CrossEntropyLoss(), CLASSES),
        (SCORES, nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), CLASSES),
        (SCORES, F.cross_entropy, CLASSES),
        ([nn.Linear(8, 4), nn.LogSoftmax(-1)], nn.NLLLoss(), CLASSES),
        (SCORES, nn.BCEWithLogitsLoss(), ZERO_ONE),
        ([nn.Linear(8, 4), nn.Sigmoid()], nn.BCELoss(), ZERO_ONE),
        (NUMBER, nn.MSELoss(), NUMBERS),
        (NUMBER, nn.L1Loss(), NUMBERS),
        (NUMBER, nn.SmoothL1Loss(), NUMBERS),
        (NUMBER, difference, NUMBERS),
        (SCORES, Focal(), CLASSES),
        (SCORES, nn.MultiMarginLoss(), CLASSES),
        (NUMBER, nn.PoissonNLLLoss(), NUMBERS.abs()),
        (NUMBER, nn.BCEWithLogitsLoss(), torch.ones(16, 1)),
        ([nn.Linear(8, 4), nn.LogSoftmax(-1)], nn.KLDivLoss(reduction="batchmean"), ZERO_ONE.add(1).softmax(-1)),
        (SCORES, nn.MSELoss(), torch.zeros(16, 4)),
    ],
)
@pytest.mark.usefixtures("patient")
def test_healthy_losses_are_silent_and_judged(layers, loss, labels, tmp_path):
    watched = train(layers, loss, labels, tmp_path)
    assert named(watched) == set()
    assert watched.findings.note == ""  # everything was judged


def functional_training(layers, call, path):
    """Train one step with a loss that `watch` does not know, and return the closed handle."""
    torch.manual_seed(3)
    model = nn.Sequential(*layers)
    with ikkuna.watch(model, log_dir=path, verbosity=0, backend="jsonl") as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        call(model(X)).backward()
        optimizer.step()
    return watched


LOG_PROBABILITIES = [nn.Linear(8, 4), nn.LogSoftmax(-1)]


@pytest.mark.parametrize(
    ("layers", "call", "rule"),
    [
        ([nn.Linear(8, 4), nn.Softmax(-1)], lambda y: F.cross_entropy(y, CLASSES), "softmax_twice"),
        (SCORES, lambda y: F.cross_entropy(y.softmax(-1), CLASSES) / 2, "softmax_twice"),
        (SCORES, lambda y: F.nll_loss(y, CLASSES), "no_log_softmax"),
        (SCORES, lambda y: F.cross_entropy(y, CLASSES, ignore_index=0), "labels_without_gradient"),
        (NUMBER, lambda y: F.mse_loss(y, NUMBERS.flatten()), "label_shape"),
        ([nn.Linear(8, 1), nn.Sigmoid()], lambda y: F.mse_loss(y, 10 + NUMBERS), "labels_out_of_reach"),
        (SCORES, lambda y: F.binary_cross_entropy_with_logits(y, 2 * ZERO_ONE - 1), "loss_contract"),
        ([nn.Linear(8, 4), nn.Sigmoid()], lambda y: nn.BCEWithLogitsLoss()(y, ZERO_ONE), "sigmoid_twice"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.usefixtures("patient")
def test_a_functional_loss_is_checked_by_what_its_node_has_saved(layers, call, rule, tmp_path):
    watched = functional_training(layers, call, tmp_path)
    assert named(watched) == {rule}
    assert {finding.step for finding in watched.findings if finding.rule == rule} == {0}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.usefixtures("patient")
def test_outputs_that_a_loss_has_repeated_differ_between_samples(tmp_path):
    watched = functional_training(NUMBER, lambda y: F.mse_loss(y.squeeze(1), NUMBERS), tmp_path)
    assert {finding.rule for finding in watched.findings} == {"label_shape"}


@pytest.mark.parametrize(
    ("layers", "call"),
    [
        (SCORES, lambda y: F.cross_entropy(y, CLASSES)),
        (SCORES, lambda y: F.cross_entropy(y, CLASSES, weight=torch.arange(1.0, 5.0)) * 128),
        (SCORES, lambda y: F.cross_entropy(y.reshape(2, 8, 4).mT, CLASSES.reshape(2, 8), reduction="sum")),
        (SCORES, lambda y: F.nll_loss(y.log_softmax(-1), CLASSES)),
        (LOG_PROBABILITIES, lambda y: F.nll_loss(y, CLASSES)),
        (SCORES, lambda y: F.binary_cross_entropy_with_logits(y, ZERO_ONE, pos_weight=torch.arange(1.0, 5.0))),
        ([nn.Linear(8, 4), nn.Sigmoid()], lambda y: F.binary_cross_entropy(y, ZERO_ONE)),
        (NUMBER, lambda y: F.mse_loss(y, NUMBERS)),
        (NUMBER, lambda y: F.huber_loss(y, NUMBERS, delta=0.5)),
        (NUMBER, lambda y: F.smooth_l1_loss(y, NUMBERS, beta=0.5)),
        (NUMBER, lambda y: nn.MSELoss()(y.squeeze(1), NUMBERS.flatten())),
    ],
)
@pytest.mark.usefixtures("patient")
def test_healthy_functional_losses_are_silent_and_judged(layers, call, tmp_path):
    watched = functional_training(layers, call, tmp_path)
    assert named(watched) == set()
    assert watched.findings.note == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda y: F.cross_entropy(y, CLASSES) + F.mse_loss(y, ZERO_ONE),
        lambda y: F.cross_entropy(y, CLASSES, label_smoothing=0.1),
        lambda y: (y - ZERO_ONE).square().mean(),
    ],
)
def test_what_was_not_tried_is_a_stored_line_that_says_what_to_do(call, tmp_path):
    watched = functional_training(SCORES, call, tmp_path)
    assert "something else than one loss of torch: pass the loss as watch(model, loss)" in watched.findings.note
    assert read_findings(watched.run_directory).note == watched.findings.note


def test_padding_of_flattened_sequences_is_no_mistake(tmp_path):
    labels = torch.tensor([1, 2, 3, 0, 2, 1, 0, 0])
    inputs = torch.tensor([[1, 2, 3, 1], [2, 1, 3, 3]])
    layers = [nn.Embedding(4, 5), nn.Linear(5, 4), nn.Flatten(0, 1)]
    watched = train(layers, nn.CrossEntropyLoss(ignore_index=0), labels, tmp_path, inputs=inputs)
    assert named(watched) == set()


def test_scores_of_inputs_that_are_not_scaled_hide_no_optimum(tmp_path):
    assert named(train(SCORES, nn.CrossEntropyLoss(), CLASSES, tmp_path, inputs=X * 5000)) == set()


@pytest.mark.parametrize("options", [{"preflight": False}, {"rules": None}, {"mute": ["softmax_twice"]}])
def test_what_was_switched_off_is_not_named(options, tmp_path):
    assert not named(train([nn.Linear(8, 4), nn.Softmax(-1)], nn.CrossEntropyLoss(), CLASSES, tmp_path, **options))


def test_another_value_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"preflight='auto' or False, got 'later'.*ikkuna.preflight"):
        ikkuna.watch(nn.Linear(1, 1), preflight="later", log_dir=tmp_path)


@pytest.mark.parametrize(("clock", "step"), [("thread_time", 1), ("monotonic", 10)])
def test_no_call_begins_after_the_time(clock, step, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_preflight.time, clock, iter(range(0, 10**7, step)).__next__)
    watched = train(SCORES, negative, CLASSES, tmp_path)
    assert named(watched) == set()
    note = watched.findings.note  # other threads look at the clock as well, so an earlier check may be left out too
    assert re.search(r"the time of 0.5 s was over before .*optimum", note)
    assert "ikkuna.preflight(" in watched.findings.note


def test_the_time_of_other_threads_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_preflight.time, "monotonic", iter(range(10**6)).__next__)  # a second for each look
    monkeypatch.setattr(recorded_preflight, "_PATIENCE", 10**7)
    watched = train(SCORES, negative, CLASSES, tmp_path)
    assert "wrong_optimum" in named(watched)
    assert not watched.findings.note


@pytest.mark.parametrize(
    ("loss", "labels", "reason"),
    [
        (Raising(), CLASSES, "not the output of the model"),
        (Uncopyable(), CLASSES, "the loss cannot be copied"),
        (lambda output, labels: _CALLS.append(1) or F.cross_entropy(output, labels), CLASSES, "refers to _CALLS"),
    ],
)
def test_what_cannot_be_checked_is_said(loss, labels, reason, tmp_path, caplog):
    _CALLS.clear()
    watched = train(SCORES, loss, labels, tmp_path, steps=3)
    assert named(watched) == set()
    assert reason in watched.findings.note
    assert "ikkuna.preflight(" in watched.findings.note
    assert getattr(loss, "calls", 3) == 3
    assert len(_CALLS) in (0, 3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


_CALLS = []


@pytest.mark.parametrize(
    ("loss", "output", "labels", "reason"),
    [
        (torch.compile(nn.CrossEntropyLoss(), backend="eager"), X, CLASSES, "the loss is compiled"),
        (nn.MSELoss(), torch.zeros(1000, 600), torch.zeros(1000, 600), "more than 1,000,000 elements"),
        (nn.MSELoss(), X.to_sparse(), X, "no plain tensors"),
        (nn.MSELoss(), X.to("meta"), X, "on an accelerator"),
    ],
)
def test_what_is_not_recorded(loss, output, labels, reason):
    checks = recorded_preflight.RecordedPreflight()
    checks.record(loss, (output, labels), {}, torch.zeros(()))
    assert reason in checks.note
    assert checks.findings() == []


def test_an_error_of_the_checks_is_logged_once_and_stays_there(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorded_preflight, "last_operations", lambda node: 1 / 0)
    watched = train(SCORES, nn.CrossEntropyLoss(), CLASSES, tmp_path, steps=3)
    assert "ZeroDivisionError" in watched.findings.note
    assert sum("first step failed" in record.message for record in caplog.records) == 1


def test_a_resumed_run_is_not_checked(tmp_path):
    first = train(SCORES, nn.CrossEntropyLoss(), CLASSES, tmp_path / "a", steps=3)
    model = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1))
    with ikkuna.watch(model, nn.CrossEntropyLoss(), log_dir=tmp_path / "b", verbosity=0, resume="auto") as watched:
        watched.load_state_dict(first.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            watched.loss(model(X), CLASSES).backward()
            optimizer.step()
        assert not named(watched)
        assert "the first loss that was seen is that of step 3" in watched.findings.note


def state_after(loss, preflight, path):
    """Return every number that training has left behind."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ikkuna.watch(model, loss, log_dir=path, verbosity=0, preflight=preflight) as watched:
        for _ in range(5):
            optimizer.zero_grad()
            watched.loss(model(X), CLASSES).backward()
            optimizer.step()
        assert watched.findings.note == ""
    moments = [each for state in optimizer.state.values() for each in state.values()]
    tensors = [*model.state_dict().values(), *moments, torch.get_rng_state(), *watched.loss.state_dict().values()]
    others = random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled(), getattr(loss, "calls", 0)
    return tensors, others


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, Running, lambda: F.cross_entropy])
@pytest.mark.usefixtures("patient")
def test_training_is_bit_identical(make, tmp_path):
    tensors, others = state_after(make(), "auto", tmp_path)
    expected, expected_others = state_after(make(), False, tmp_path)
    assert others == expected_others
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def counting():
    calls = 0

    def loss(output, labels):
        nonlocal calls
        calls += 1
        return output.sum()

    return loss


class Holding(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, output, labels):
        return output.sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (negative, ""),
        (Focal(), ""),
        (Running(), ""),
        (Holding(3), ""),
        (Holding(nn.MSELoss()), ""),
        (Holding(nn.Linear(1, 1)), "parameters"),
        (Holding(print), "value"),
        (Holding([1]), "value"),
        (counting(), "calls"),
        (lambda output, labels: [exec(x) for x in output], "exec"),
        (lambda output, labels: _CALLS, "_CALLS"),
        (partial(F.mse_loss, weight=torch.ones(1)), ""),
        (partial(negative, labels=CLASSES), "itself"),
    ],
)
def test_only_losses_without_effects_are_called(loss, reason):
    assert reason in why_impure(loss)
    assert bool(why_impure(loss)) == bool(reason)
