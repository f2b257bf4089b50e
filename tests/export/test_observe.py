"""Tensors that no module returns are recorded where the model passes them to ``observe``."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import MeanSubscriber, NormSubscriber
from ikkuna.observation.hooks import observed
from ikkuna.testing import RecordingBackend


class Router(nn.Module):
    """Two layers whose product no module returns."""

    def __init__(self, observe=ikkuna.observe, twice=False, mode=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.observe, self.twice, self.mode = observe, twice, mode

    def inner(self, x):
        scores = self.first(x) * 2 + 1
        self.observe("router.scores", scores)
        if self.twice:
            self.observe("router.scores", scores)
        return scores.softmax(-1)

    def forward(self, x):
        weights = self.inner(x) if self.mode is None else checkpoint(self.inner, x, use_reentrant=self.mode)
        return self.last(weights)

    def squares(self, x):
        return (self.first(x) * 2 + 1).detach().double().square().sum().item()


def quiet(name, tensor):
    """Observe nothing."""


def watched(model, *makes, **options):
    backend = RecordingBackend()
    exporter = Exporter(message_bus=MessageBus("observe"), on_error="raise", **options)
    exporter.add_modules(model)
    for make in makes or (lambda backend: NormSubscriber("observed", backend=backend),):
        exporter.message_bus.register_subscriber(make(backend))
    return exporter, backend


def batch(step, part=0):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + part))


def train(model, steps=3, micro=1, call=None):
    """Train, and return the norms of what is observed, computed by other means."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(micro):
            x = batch(step, part).requires_grad_()
            total += model.squares(x) * (2 if model.twice else 1) if isinstance(model, Router) else 0.0
            (model if call is None else call)(x).square().mean().backward()
        optimizer.step()
        norms[step] = total**0.5
    return norms


def shown(backend, kind="observed_norm2"):
    return {step: value for series, value, step in backend.values if series.kind == kind}


@pytest.mark.parametrize("options", [{}, {"twice": True}, {"mode": True}, {"mode": False}], ids=repr)
@pytest.mark.parametrize("micro", [1, 2])
def test_calls_and_micro_batches_are_merged_and_recomputations_count_once(options, micro):
    model = Router(**options)
    exporter, backend = watched(model)
    # the reference runs the first layer as well, outside of the model's call
    expected = train(model, micro=micro)
    exporter.close()
    assert shown(backend) == pytest.approx(expected, rel=1e-6)
    assert {series.name for series, *_ in backend.values} == {"router.scores"}


def test_training_is_bit_identical():
    alone, model = Router(quiet), Router()
    exporter, _ = watched(model)
    train(alone)
    train(model)
    exporter.close()
    assert all(map(torch.equal, alone.parameters(), model.parameters()))


def test_names_are_selected_as_modules_are():
    model = Router(lambda name, x: (ikkuna.observe(name, x), ikkuna.observe("other", x)))
    exporter, backend = watched(model, lambda backend: MeanSubscriber("observed", modules="other*", backend=backend))
    train(model)
    exporter.close()
    assert {series.name for series, *_ in backend.values} == {"other"}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["ikkuna", "exporter"])
def test_compiled_models_show_the_same_and_equal_calls_are_not_merged(twice, own):
    torch.compiler.reset()
    model = Router(twice=twice)
    exporter, backend = watched(model)
    if own:
        model.observe = exporter.observe
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = train(model, 4, call=compiled)
    exporter.close()
    assert shown(backend) == pytest.approx(expected, rel=1e-5)


def test_a_compiled_step_that_is_not_sampled_calls_no_operator(monkeypatch):
    torch.compiler.reset()
    model, calls = Router(), []
    exporter, backend = watched(model, lambda backend: NormSubscriber("observed", every=2, backend=backend))
    was = observed.ObservedHooks.observed
    exporter._session.hooks.observed.hook.function = lambda *args: calls.append(0) or was(*args)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, 5, call=compiled)
    exporter.close()
    assert list(shown(backend)) == [0, 2, 4]
    assert len(calls) == 3


def test_a_call_without_subscribers_returns_at_once(monkeypatch):
    model = Router()
    exporter, _ = watched(model, lambda backend: NormSubscriber("weights", backend=backend))
    monkeypatch.setattr(observed.Hook, "__call__", None)
    assert not observed._switch.on
    with torch.no_grad():
        model.inner(batch(0))
    monkeypatch.undo()
    exporter.close()


def test_two_exporters_record_only_their_own_models():
    first, second = Router(), Router()
    one, of_one = watched(first)
    other, of_other = watched(second)
    expected = train(first), train(second, 2)
    one.close()
    other.close()
    assert shown(of_one) == pytest.approx(expected[0], rel=1e-6)
    assert shown(of_other) == pytest.approx(expected[1], rel=1e-6)


def test_an_exporter_records_only_what_it_is_given():
    model = Router()
    exporter, backend = watched(model)
    model.observe = exporter.observe
    expected = train(model)
    exporter.close()
    assert shown(backend) == pytest.approx(expected, rel=1e-6)
    model(batch(0))  # after the end nothing is raised


def test_wrong_arguments_are_logged_and_not_raised(caplog):
    model = Router(lambda name, x: ikkuna.observe(3, x))
    exporter, backend = watched(model)
    exporter.message_bus.error_guard.set_policy("disable")
    train(model)
    exporter.close()
    assert shown(backend) == {}
    assert "observe() needs a name and a tensor, got int and Tensor" in caplog.text


def test_copies_of_models_and_transforms_are_not_disturbed():
    model = Router()
    exporter, _ = watched(model)
    copy.deepcopy(model)(batch(0))
    parameters = dict(model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (batch(0),)).sum())(parameters)
    exporter.close()
    assert not observed._switch.on
