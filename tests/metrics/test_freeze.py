"""Freezing layers that have converged: the only subscriber that changes training, and how."""

import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, ModuleMessage, Stamp
from ikkuna.export.subscriber import CKASubscriber, FreezeSubscriber, SVCCASubscriber
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(steps, model, metric=CKASubscriber, **options):
    """Train with a decaying optimizer under a freezer; return its curve and the weights after each step."""
    recording, bus, states = RecordingBackend(), MessageBus(), []
    probe = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(metric(probe, to=["previous"], every=1, backend="null"))
        kind = "svcca_to_previous" if metric is SVCCASubscriber else "cka_to_previous"
        bus.register_subscriber(FreezeSubscriber(kind, backend=recording, **options))
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)  # a gradient of zero would let momentum and decay go on
            model(probe).square().mean().backward()
            optimizer.step()
            states.append([p.detach().clone() for p in model.parameters()])
    return curves(recording).get(("frozen_parameters", None), []), states


@pytest.mark.parametrize("metric", [CKASubscriber, SVCCASubscriber])
def test_layers_freeze_from_the_bottom_up_and_stay_as_they_are(metric, caplog):
    model = network()
    frozen, states = trained(8, model, metric, threshold=0.9, patience=3)
    assert frozen == [40, 112]
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2
    assert all(p.grad is None for p in list(model.parameters())[:4])
    # The third look froze them: the weights of step 2 are the last, in spite of the optimizer's decay and momentum.
    for before, after in zip(states[2][:4], states[-1][:4], strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(states[1][0], states[2][0])
    assert not torch.equal(states[-2][4], states[-1][4])
    assert "0 was frozen after step 2: " in caplog.text
    assert "at least 0.9 in 3 evaluations in a row (40 parameters)" in caplog.text


def test_a_layer_that_goes_on_changing_keeps_those_above_it_free():
    model = network()
    assert trained(6, model, threshold=0.9, patience=2, modules="[24]")[0] == [72]
    model = network()
    assert trained(6, model, threshold=2.0, patience=2)[0] == []
    assert all(p.requires_grad for p in model.parameters())


def test_one_layer_always_stays_trainable():
    model = network()
    trained(6, model, threshold=-1.0, patience=1)
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2


def test_similar_evaluations_must_be_in_a_row():
    model = network()
    metric = FreezeSubscriber("cka_to_previous", threshold=0.5, patience=2, backend="null")
    bus = MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(CKASubscriber(torch.randn(9, 4), to=["previous"], every=1, backend="null"))
        bus.register_subscriber(metric)
        for step, value in enumerate([0.9, 0.1, 0.9, float("nan"), 0.9]):
            metric.compute(ModuleMessage(Stamp(step, step, 0), "cka_to_previous", value, module="0", name="0"))
            assert model[0].weight.requires_grad
        metric.compute(ModuleMessage(Stamp(5, 5, 0), "cka_to_previous", 0.9, module="0", name="0"))
        assert not model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "needs patience >= 1, got 0"),
        ({"threshold": "high"}, "needs a number as threshold, got 'high'"),
        ({"threshold": float("nan")}, "needs a number as threshold, got nan"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        FreezeSubscriber(**arguments)
