"""The gradient of each backward pass is observed as autograd computed it."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber
from ikkuna.metrics.messages.kinds import MICRO_KINDS
from tests.zoo import CASES, Loop


def watched(bus, model, kinds=MICRO_KINDS):
    """Return the exporter and what it shows: (kind, module, step, gradient)."""
    seen = []
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    see = CallbackSubscriber(
        kinds, lambda m: seen.append((m.kind, m.name, m.global_step, m.data.clone())), backend="null"
    )
    bus.register_subscriber(see)
    return exporter, seen


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_each_micro_batch_is_seen_alone_and_unclipped(bus):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, model)
    expected = []
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            loss = model(torch.randn(5, 3)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
                layer, role = name.split(".")
                expected.append((f"{role}_micro_gradients", layer, step, gradient))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        optimizer.step()
    exporter.close()
    for kind, layer, step, _ in expected:
        ours = [data for k, name, s, data in seen if (k, name, s) == (kind, layer, step)]
        theirs = [data for k, name, s, data in expected if (k, name, s) == (kind, layer, step)]
        assert len(ours) == 3
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(seen) == len(expected)


def test_a_hook_of_the_users_comes_first(bus):
    model = nn.Linear(2, 1)
    model.weight.register_hook(lambda grad: 10 * grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, model, ["weight_micro_gradients"])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    exporter.close()
    assert [data.tolist() for *_, data in seen] == [[[10.0, 10.0]]]


def test_a_gradient_that_is_only_asked_for_is_not_seen(bus):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, model)
    output = model(torch.ones(1, 3)).sum()
    torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
    assert not seen
    output.backward()
    optimizer.step()
    exporter.close()
    assert len(seen) == 4


def test_of_a_closure_the_last_evaluation_counts(bus):
    from ikkuna.export.subscriber import NormSubscriber
    from ikkuna.testing import RecordingBackend

    loop, recording = Loop(CASES["mlp-lbfgs"]), RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        for kind in ("weight_micro_gradients", "weight_gradients"):
            bus.register_subscriber(NormSubscriber(kind, backend=recording))
        loop.run(2)
    values = {(series.kind, series.name, step): value for series, value, step in recording.values}
    for name, step in (("0", 0), ("4", 1)):
        micro, whole = (values[f"{kind}_norm2", name, step] for kind in ("weight_micro_gradients", "weight_gradients"))
        assert micro == pytest.approx(whole)


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_left_on_a_parameter(bus, compiled):
    torch.compiler.reset()
    model = two_layers()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, run)
    for step in range(3):
        run(torch.ones(1, 3)).sum().backward()
        assert len(seen) == 4 * (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    exporter.close()
    run(torch.ones(1, 3)).sum().backward()
    assert len(seen) == 12
    assert all(parameter._backward_hooks is None for parameter in model.parameters())
    torch.compiler.reset()


def test_a_model_that_is_given_another_dtype_is_seen_on(bus):
    """Autograd gives such a parameter another node, which layer gradients ask for as well."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, model, [*MICRO_KINDS, "layer_gradients"])
    model.to(torch.bfloat16)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    exporter.close()
    assert {kind for kind, *_ in seen} == {*MICRO_KINDS, "layer_gradients"}
    assert {data.dtype for *_, data in seen} == {torch.bfloat16}


def test_frozen_parameters_and_evaluations_bring_none(bus):
    model = two_layers()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = watched(bus, model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    exporter.test()
    model(torch.ones(1, 3)).sum().backward()
    exporter.close()
    assert sorted((kind, name) for kind, name, *_ in seen) == [
        ("bias_micro_gradients", "0"),
        ("bias_micro_gradients", "2"),
        ("weight_micro_gradients", "2"),
    ]


def test_a_repeated_evaluation_has_a_fresh_stamp(bus):
    """Metrics that keep values from one micro-batch to the next forget them if the stamp is equal, but another object."""
    model = two_layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    stamps = []
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    keep = CallbackSubscriber("weight_micro_gradients", lambda m: stamps.append(m.stamp), modules="0", backend="null")
    bus.register_subscriber(keep)

    def closure():
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 3)).pow(2).sum().backward()
        return torch.zeros(())

    optimizer.step(closure)
    exporter.close()
    first, second, third, *_ = stamps
    assert len(stamps) >= 4
    assert first is second
    assert second == third
    assert second is not third
