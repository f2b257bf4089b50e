"""P5: every kind carries what autograd and arithmetic give, with the step that made it."""

import dataclasses
import gc

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, MeanSubscriber, NormSubscriber, VarianceSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop

pytestmark = pytest.mark.devices


def record(bus, model, kinds=MODULE_KINDS, loss=None, **options):
    """Return an open exporter and a dict (step, kind, name) → list of copies of what was seen."""
    seen = {}

    def keep(message):
        seen.setdefault((message.global_step, message.kind, message.series_name), []).append(message.data.clone())

    exporter = Exporter(message_bus=bus, on_error="raise", **options)
    exporter.add_modules(model)
    if loss is not None:
        exporter.set_loss(loss)
    bus.register_subscriber(CallbackSubscriber(kinds, keep, backend="null"))
    return exporter, seen


class Network(nn.Module):
    """A 3-D linear layer (whose output is a view) and an in-place activation."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(4, 2)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_every_module_kind_equals_the_hand_computed_one(bus):
    gc.collect()  # gradient scalers of other tests
    model = Network().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    exporter, seen = record(bus, model)
    reference = {}
    for step in range(3):
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        up_w, up_b, down_w, down_b = (p.detach().clone().requires_grad_() for p in model.parameters())
        up = x @ up_w.T + up_b
        act = up.clamp(min=0)
        down = act @ down_w.T + down_b
        loss = (down**2).sum()
        grads = torch.autograd.grad(loss, [up, act, down, up_w, up_b, down_w, down_b])
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
        after = [p.detach().clone() for p in model.parameters()]
        reference |= {(step, "layer_inputs", "up"): x, (step, "layer_inputs", "down"): act}
        for name, value, grad in zip(("up", "act", "down"), (up, act, down), grads[:3], strict=True):
            reference[step, "activations", name] = value
            reference[step, "layer_gradients", name] = grad
        for name, w, b, gw, gb, new_w, new_b in (
            ("up", up_w, up_b, grads[3], grads[4], after[0], after[1]),
            ("down", down_w, down_b, grads[5], grads[6], after[2], after[3]),
        ):
            reference |= {(step, "weights", name): w, (step, "biases", name): b}
            for kind in ("gradients", "micro_gradients", "gradients_unclipped"):
                reference |= {(step, f"weight_{kind}", name): gw, (step, f"bias_{kind}", name): gb}
            reference |= {(step, "weight_updates", name): new_w - w, (step, "bias_updates", name): new_b - b}
    exporter.close()
    assert seen.keys() == reference.keys()
    for key, (value,) in seen.items():
        torch.testing.assert_close(value, reference[key].detach(), rtol=1e-12, atol=1e-14, msg=str(key))


@pytest.mark.parametrize(
    "name",
    [
        *("attention", "conv-bn-dropout", "checkpointed", "checkpointed-reentrant", "tied", "spectral-norm"),
        "lstm",
    ],
)
def test_layer_gradients_equal_those_of_retained_outputs(name, bus):
    """Compared with an independent instrument: a clone after each leaf module, whose gradient autograd keeps."""
    case = CASES[name]
    loop = Loop(case)
    exporter, seen = record(bus, loop.model, ("layer_gradients",))
    loop.run(1)
    exporter.close()
    other = Loop(case)
    kept = {}

    def keep(module, args, output, name):
        outputs = output if isinstance(output, tuple) else (output,)
        if not isinstance(outputs[0], torch.Tensor) or not outputs[0].requires_grad:
            return None
        shadow = outputs[0].clone()  # the module's output now has a private gradient, whatever happens in place later
        outputs[0].register_hook(lambda grad: kept.setdefault(name, []).append(grad.clone()))
        return (shadow, *outputs[1:]) if isinstance(output, tuple) else shadow

    for child_name, module in other.model.named_modules():
        if not list(module.children()) or isinstance(module, nn.MultiheadAttention | nn.Linear):
            module.register_forward_hook(lambda m, a, o, n=child_name: keep(m, a, o, n))
    other.run(1)
    mine = {key[2]: values for key, values in seen.items() if ":" not in key[2]}
    assert mine
    for module_name, values in mine.items():
        if module_name in kept:
            for value, reference in zip(values, kept[module_name], strict=True):
                torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-7)
    assert len(set(mine) & set(kept)) >= len(mine) - 1


@pytest.mark.fault(56)
def test_a_checkpointed_module_is_seen_once(bus):
    for name in ("checkpointed", "checkpointed-reentrant"):
        loop = Loop(CASES[name])
        exporter, seen = record(bus, loop.model, ("activations", "layer_gradients"))
        loop.run(2)
        exporter.close()
        names = {key[2] for key in seen if key[1] == "activations"}
        assert {"block.0", "block.3", "stem", "head"} <= names
        assert {key[2] for key in seen if key[1] == "layer_gradients"} >= {"block.0", "block.3", "stem", "head"}
        assert all(len(values) == 1 for values in seen.values())


def test_updates_bear_the_step_that_made_them_and_the_last_is_there(bus):
    loop = Loop(CASES["mlp-sgd"])
    exporter, seen = record(bus, loop.model, ("weights", "weight_updates"))
    loop.run(4)
    exporter.close()
    last = loop.model[0].weight.detach()
    for step in range(4):
        (weight,), (update,) = seen[step, "weights", "0"], seen[step, "weight_updates", "0"]
        following = seen[step + 1, "weights", "0"][0] if step < 3 else last
        assert torch.equal(following - weight, update)


def test_three_micro_batches_are_one_step_and_merge_to_the_value_over_all(bus):
    model = nn.Linear(3, 2)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        for make in (NormSubscriber, MeanSubscriber, VarianceSubscriber):
            bus.register_subscriber(make("activations", backend=recording))
        bus.register_subscriber(NormSubscriber("weight_gradients", backend=recording))
        bus.register_subscriber(MeanSubscriber("loss", backend=recording))
        for _ in range(2):
            optimizer.zero_grad()
            batches = [(torch.randn(n, 3), torch.randint(0, 2, (n,))) for n in (4, 1, 3)]
            outputs = torch.cat([model(x) for x, _ in batches]).detach().double()  # without a backward: does not count
            recorded = [loss(model(x), y) for x, y in batches]
            for value in recorded:
                value.backward()
            expected_gradient = model.weight.grad.norm().item()
            optimizer.step()
    values = {(s.kind, step): v for s, v, step in recording.values}
    assert {step for _, step in values} == {0, 1}
    assert values["activations_norm2", 1] == pytest.approx(outputs.norm().item(), rel=1e-6)
    assert values["activations_mean", 1] == pytest.approx(outputs.mean().item(), rel=1e-5)
    assert values["activations_variance", 1] == pytest.approx(outputs.var(correction=0).item(), rel=1e-6)
    assert values["weight_gradients_norm2", 1] == pytest.approx(expected_gradient, rel=1e-6)
    weighted = sum(v.item() * n for v, n in zip(recorded, (4, 1, 3), strict=True)) / 8
    assert values["loss_mean", 1] == pytest.approx(weighted, rel=1e-6)


@pytest.mark.fault(57)
def test_gradients_are_what_the_optimizer_uses_after_accumulation_and_clipping(bus):
    loop = Loop(CASES["mlp-accumulated"])
    exporter, seen = record(bus, loop.model, ("weight_gradients", "bias_gradients"))
    loop.run(2)
    total = sum((v[0].double() ** 2).sum() for (step, _, _), v in seen.items() if step == 1)
    exporter.close()
    assert total.sqrt().item() <= 1.0 + 1e-5
    assert torch.equal(seen[1, "weight_gradients", "0"][0], loop.model[0].weight.grad)


@pytest.mark.fault(57)
@pytest.mark.parametrize("name", ["mlp-closure", "mlp-lbfgs"])
def test_with_a_closure_gradients_are_those_of_the_last_evaluation(name, bus):
    loop = Loop(CASES[name])
    exporter, seen = record(bus, loop.model, ("weight_gradients", "weights", "weight_updates"))
    for step in range(3):
        before = loop.model[0].weight.detach().clone()
        loop.run(1)
        assert torch.equal(seen[step, "weight_gradients", "0"][0], loop.model[0].weight.grad)
        assert torch.equal(seen[step, "weights", "0"][0], before)
        assert torch.equal(seen[step, "weight_updates", "0"][0], loop.model[0].weight.detach() - before)
    exporter.close()


def test_with_a_closure_the_last_evaluation_counts(bus):
    loop = Loop(CASES["mlp-lbfgs"])
    recording = RecordingBackend()
    outputs = []
    loop.model.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("activations", modules="4", backend=recording))
        bus.register_subscriber(NormSubscriber("network_output", backend=recording))
        loop.run(1)
    assert len(outputs) > 1
    assert [v for _, v, _ in recording.values] == pytest.approx([outputs[-1].norm().item()] * 2)


def test_network_kinds_carry_what_the_loss_module_sees(bus):
    loop = Loop(CASES["mlp"])
    exporter, seen = record(bus, loop.model, ("input_data", "network_output", "input_labels", "loss"), loop.loss)
    losses = loop.run(2)
    exporter.close()
    assert set(seen) == {(s, k, None) for s in (0, 1) for k in ("input_data", "network_output", "input_labels", "loss")}
    assert torch.equal(seen[1, "loss", None][0], losses[1])
    expected = nn.functional.cross_entropy(seen[1, "network_output", None][0], seen[1, "input_labels", None][0])
    assert torch.equal(expected, losses[1])
    assert seen[0, "input_data", None][0].shape == (6, 8)


def test_keyword_inputs_have_paths(bus):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x, *, scale=None):
            return {"logits": self.linear(x) * scale}

    model = Model()
    exporter, seen = record(bus, model, ("input_data", "network_output"))
    model(torch.ones(1, 2), scale=torch.tensor(2.0))["logits"].sum().backward()
    exporter.close()
    assert {key[1:] for key in seen} == {("input_data", None), ("input_data", "1.scale"), ("network_output", "logits")}


@pytest.mark.fault(53)
def test_names_of_nested_outputs_and_parameters(bus):
    for name, activations, weights in (
        (
            "lstm",
            {"embedding", "rnn", "rnn:1.0", "rnn:1.1", "head"},
            {"embedding", "head", "rnn.weight_ih_l0", "rnn.weight_hh_l1_reverse"},
        ),
        ("gru", {"embedding", "rnn", "rnn:1", "head"}, {"embedding", "head", "rnn.weight_ih_l0"}),
        ("attention", {"attention", "up", "act"}, {"attention.in_proj_weight", "attention.out_proj", "up", "norm"}),
        ("structured", {"inner.linear", "head"}, {"inner.linear", "head"}),
        ("spectral-norm", {"body", "head"}, {"body", "head.weight.original0", "head.weight.original1"}),
        ("tied", {"first", "second", "head"}, {"first", "head"}),
    ):
        loop = Loop(CASES[name])
        exporter, seen = record(bus, loop.model, ("activations", "weights"))
        loop.run(1)
        exporter.close()
        assert {key[2] for key in seen if key[1] == "activations"} >= activations, name
        got = {key[2] for key in seen if key[1] == "weights"}
        assert got >= weights, name
        assert not any(part in n for n in got for part in ("parametrizations", "bias")), name


@dataclasses.dataclass
class Nested:
    """An output of an odd shape."""

    logits: torch.Tensor
    hidden: dict
    nothing: None = None


@pytest.mark.fault(53)
def test_every_tensor_of_an_output_of_any_shape_has_its_place(bus):
    class Odd(nn.Module):
        def forward(self, x):
            return Nested(x * 2, {"last": (x, 3, [x + 1]), "again": x})

    class Silent(nn.Module):
        def forward(self, x):
            return None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.odd, self.silent = nn.Linear(2, 2), Odd(), Silent()

        def forward(self, x):
            self.silent(x)
            return self.odd(self.fc(x))

    model = Model()
    exporter, seen = record(bus, model, ("activations", "layer_gradients"))
    out = model(torch.ones(1, 2))
    (out.logits.sum() + out.hidden["last"][2][0].sum()).backward()
    exporter.close()
    places = {"fc", "odd:logits", "odd:hidden.last.0", "odd:hidden.last.2.0"}
    assert {name for _, kind, name in seen if kind == "activations"} == places
    assert {name for _, kind, name in seen if kind == "layer_gradients"} == places


@pytest.mark.fault(54)
def test_an_output_without_a_gradient_has_an_activation_and_no_layer_gradient(bus):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    exporter, seen = record(bus, model, ("activations", "layer_gradients"))
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 2))
    exporter.close()
    assert {name: len(found) for (_, kind, name), found in seen.items() if kind == "activations"} == {
        "0": 1,
        "1": 1,
        "2": 1,
    }
    assert {name for _, kind, name in seen if kind == "layer_gradients"} == {"2"}


@pytest.mark.fault(56)
def test_a_tied_weight_is_one_series_with_its_aliases(bus):
    loop = Loop(CASES["tied"])
    exporter, seen = record(bus, loop.model, ("weights",))
    loop.run(1)
    (first,) = [p for p in exporter._session.context.parameters.all if p.name == "first" and not p.is_bias]
    assert first.aliases == ("second",)
    exporter.close()
    assert {key[2] for key in seen} == {"first", "head"}


@pytest.mark.fault(56)
def test_a_module_called_three_times_is_one_row_over_all_calls(bus):
    loop = Loop(CASES["tied"])
    recording = RecordingBackend()
    calls = []
    loop.model.first.register_forward_hook(lambda module, args, output: calls.append(output.detach().clone()))
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("activations", modules="first", backend=recording))
        loop.run(1)
    ((_, value, _),) = recording.values
    assert len(calls) == 3
    assert value == pytest.approx(torch.stack(calls).norm().item(), rel=1e-6)


def test_a_frozen_parameter_has_a_weight_but_no_gradient_and_no_update(bus):
    loop = Loop(CASES["frozen"])
    exporter, seen = record(bus, loop.model)
    loop.run(2)
    exporter.close()
    kinds = {key[1] for key in seen if key[2] == "body"}
    assert kinds == {"layer_inputs", "activations", "weights", "biases"}


def test_a_module_that_returns_a_parameter_is_seen_once_a_step(bus):
    class Prompt(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.prompt

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = Prompt()

        def forward(self, x):
            return (self.source() * x).sum()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, seen = record(bus, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3)).backward()
        optimizer.step()
    exporter.close()
    assert [len(seen[step, "layer_gradients", "source"]) for step in range(3)] == [1, 1, 1]
    assert (2, "weights", "source.prompt") in seen
    assert not model.source.prompt._backward_hooks


def test_what_an_optimizer_keeps_is_a_kind(bus):
    loop = Loop(CASES["mlp"])
    exporter, seen = record(bus, loop.model, ("weight_state_exp_avg", "bias_state_exp_avg_sq"))
    loop.run(2)
    exporter.close()
    assert torch.equal(seen[1, "weight_state_exp_avg", "0"][0], loop.optimizer.state[loop.model[0].weight]["exp_avg"])
    assert torch.equal(seen[1, "bias_state_exp_avg_sq", "4"][0], loop.optimizer.state[loop.model[4].bias]["exp_avg_sq"])


def test_batch_finished_carries_the_learning_rates_of_the_step(bus):
    loop = Loop(CASES["mlp-sgd"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    rates = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        see = CallbackSubscriber("batch_finished", lambda m: rates.append(m.data["learning_rates"]), backend="null")
        bus.register_subscriber(see)
        for _ in range(3):
            loop.run(1)
            scheduler.step()
    assert rates == [{"0": 0.1}, {"0": 0.05}, {"0": 0.025}]


def test_groups_of_two_optimizers_that_share_a_name_are_numbered(bus):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    named = [
        torch.optim.SGD([{"params": [*part.parameters()], "name": "decay"}], lr=lr)
        for part, lr in zip(model[:2], (0.5, 0.25), strict=True)
    ]
    last = [{"params": [model[2].weight], "name": "3"}, {"params": [model[2].bias], "lr": 0.75}]
    numbered = torch.optim.SGD(last, lr=0.125)
    rates = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        see = CallbackSubscriber("batch_finished", lambda m: rates.append(m.data["learning_rates"]), backend="null")
        bus.register_subscriber(see)
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in (*named, numbered):
            optimizer.step()
    assert rates == [{"decay": 0.5, "decay_1": 0.25, "3": 0.125, "3_1": 0.75}]
