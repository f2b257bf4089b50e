"""Native functions record exactly what the hooks in Python record, and do nothing that these would not do."""

import gc
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.hook_functions import Permits, hook_functions
from ikkuna.observation.hooks import context
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.gradients import LayerGradientHooks, MicroGradientHooks
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.skipif(
    hook_functions(library(), wait=True) is None, reason="the native library cannot be built here"
)
KINDS = (
    *("layer_inputs", "activations", "layer_gradients"),
    *(
        "weights",
        "weight_gradients",
        "weight_updates",
        "bias_updates",
        "weight_micro_gradients",
        "bias_micro_gradients",
    ),
)


class Twice(nn.Module):
    """Calls a layer three times, and changes one of its outputs in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.layer(x)
        x.relu_()
        return self.head(self.layer(self.layer(x).tanh()))


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.drop, self.flat, self.head = nn.LSTM(4, 4), nn.Dropout(0.5), nn.Flatten(1), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.flat(self.drop(self.lstm(x)[0])))


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self[0].requires_grad_(False)


class Changed(nn.Sequential):
    """Changes what its first layers return, in three ways, before the next layer receives it."""

    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        x = self[0](x)
        x.mul_(2.0)
        x = self[1](x)
        x.data.mul_(3.0)
        x = self[2](x)
        x.data = x.data + 1.0
        return self[3](x)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

    def forward(self, x):
        return self.join(self.first(x), self.second(x)).tanh()


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 2))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 4)),
    "three axes": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), (2, 3, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2)
        ).to(memory_format=torch.channels_last),
        (2, 1, 4, 4),
    ),
    "shared": (Twice, (3, 4)),
    "checkpoint": (lambda: Recomputed(False), (3, 4)),
    "reentrant checkpoint": (lambda: Recomputed(True), (3, 4)),
    "several outputs": (Several, (3, 2, 4)),
    "transformer": (transformer, (2, 3, 4)),
    "frozen": (Frozen, (3, 4)),
    "changed": (Changed, (3, 4)),
    "joined": (Joined, (3, 4)),
    "double": (lambda: nn.Linear(4, 2).double(), (3, 4)),
}


def plain(model, x, optimizer, exporter):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def accumulated(model, x, optimizer, exporter):
    optimizer.zero_grad()
    for factor in (1.0, 2.0, 3.0):
        model(x * factor).square().sum().backward()
    optimizer.step()


def together(model, x, optimizer, exporter):
    optimizer.zero_grad()
    first, second = model(x), model(x * 2)
    model(x * 3)  # without a backward
    (first.square().sum() + second.square().sum()).backward()
    optimizer.step()


def penalized(model, x, optimizer, exporter):
    optimizer.zero_grad()
    x = x.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (slope.square().sum() + model(x).square().sum()).backward()
    optimizer.step()


def with_closure(model, x, optimizer, exporter):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def abandoned(model, x, optimizer, exporter):
    def fail(*_):
        raise ValueError

    handle = [*model.modules()][-1].register_forward_hook(fail)
    with pytest.raises(ValueError):
        model(x)
    handle.remove()
    plain(model, x, optimizer, exporter)


def with_a_pause(model, x, optimizer, exporter):
    def pause(*_):
        handle.remove()
        with exporter.paused():
            inner(x.new_ones(1, inner.in_features))

    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(pause)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def evaluated(model, x, optimizer, exporter):
    plain(model, x, optimizer, exporter)
    exporter.evaluate([x], "testing")
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def transformed(model, x, optimizer, exporter):
    def per_sample(*_):
        torch.func.vmap(lambda row: inner(row))(x.new_ones(2, inner.in_features))

    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    handle = inner.register_forward_pre_hook(lambda *_: handle.remove() or per_sample())
    plain(model, x, optimizer, exporter)


def hooked(model, x, optimizer, exporter):
    """The user's own hooks on outputs, of which one survives the step."""
    kept = []
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    handle = last.register_forward_hook(
        lambda module, args, out: kept.append(out) or (out.register_hook(lambda g: g * 2) and None)
    )
    plain(model, x, optimizer, exporter)
    handle.remove()
    optimizer.zero_grad()
    out = model(x)
    assert len(kept) == 1
    kept.append(out)
    out.register_hook(lambda grad: grad * 3)
    out.square().sum().backward()
    optimizer.step()


CALLED = (
    *((ForwardHooks, "module_called"), (LayerGradientHooks, "gradient_computed")),
    (MicroGradientHooks, "gradient_computed"),
)
LOOPS = (plain, accumulated, together, penalized, with_closure, abandoned, with_a_pause, evaluated, transformed, hooked)


def recorded(make, shape, loop, is_native, monkeypatch, more=(), steps=3, every=1):
    """Return all values of a training, and the number of calls that were handled in Python."""
    with monkeypatch.context() as patch:
        if not is_native:
            patch.setattr(context, "hook_functions", lambda kernels: None)
        calls = []
        for cls, name in CALLED:
            original = getattr(cls, name)
            patch.setattr(cls, name, lambda *args, original=original: calls.append(1) or original(*args))
        torch.manual_seed(0)
        model, recording = make(), RecordingBackend()
        x = torch.randn(shape, dtype=next(model.parameters()).dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
            exporter.add_modules(model)
            for kind in KINDS:
                for cls in (NormSubscriber, VarianceSubscriber, MinMaxSubscriber):
                    exporter.message_bus.register_subscriber(cls(kind, backend=recording, tag=None, subsample=every))
            for subscriber in more:
                exporter.message_bus.register_subscriber(subscriber)
            for _ in range(steps):
                loop(model, x, optimizer, exporter)
            assert exporter.health().errors == 0
        values = {(series.kind, series.name, series.pass_name, step): value for series, value, step in recording.values}
    state = {name: p.clone() for name, p in model.state_dict().items()}
    return values, len(calls), state


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("what", MODELS)
def test_the_values_are_the_same_with_and_without_native_functions(what, loop, monkeypatch):
    make, shape = MODELS[what]
    if loop is penalized and ("checkpoint" in what or what in ("transformer", "several outputs")):
        pytest.skip("torch has no second derivative of these on the CPU, or refuses it")
    if loop is evaluated and what == "reentrant checkpoint":
        pytest.skip("torch warns of a reentrant checkpoint without gradients")
    native_values, few, state = recorded(make, shape, loop, True, monkeypatch)
    values, many, other = recorded(make, shape, loop, False, monkeypatch)
    assert native_values.keys() == values.keys()
    different = {
        key: (value, values[key]) for key, value in native_values.items() if value != values[key] and value == value
    }
    assert not different
    assert len(values) > 20
    assert few <= many
    assert all(torch.equal(state[name], other[name]) for name in state)


def chain(layers):
    return lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


@pytest.mark.parametrize("every", [1, 3])
def test_the_number_of_calls_in_python_does_not_grow_with_the_number_of_modules(every, monkeypatch):
    """Nor with the number of steps, between which the hooks may be removed."""
    (_, few, _), (_, many, _) = (
        recorded(chain(n), (3, 4), plain, True, monkeypatch, steps=4 * every, every=every) for n in (3, 30)
    )
    # the first step creates the hooks of the gradients
    assert many - few == 27


@pytest.mark.parametrize("every", [1, 5])
def test_another_plan_is_measured_by_its_own_fields(every, monkeypatch):
    """Steps with more subscribers, and steps of which nothing is wanted, alternate."""
    found = []
    for is_native in (True, False):
        recording = RecordingBackend()
        more = [
            SparsitySubscriber("activations", subsample=2, backend=recording),
            CallbackSubscriber("activations", lambda message: None, subsample=3, backend="null"),
            SparsitySubscriber("layer_inputs", subsample=2, backend=recording),
        ]
        values, _, _ = recorded(*MODELS["mlp"], plain, is_native, monkeypatch, more, steps=7, every=every)
        found.append((values, [(s.kind, s.name, value, step) for s, value, step in recording.values]))
    assert found[0] == found[1]
    assert len(found[0][1]) == 4 * 3 + 4 * 3


def test_a_subscriber_that_calls_the_model_in_a_hook_is_not_recorded(monkeypatch):
    """Its calls of the model happen while a hook in Python runs."""
    found = []
    for is_native in (True, False):
        model = None

        def make():
            nonlocal model
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            return model

        def call(message, made=lambda: model):
            made()[0](torch.full((2, 4), 1e6))

        more = [CallbackSubscriber("activations", call, modules="1", backend="null")]
        found.append(recorded(make, (3, 4), plain, is_native, monkeypatch, more)[0])
    assert found[0] == found[1]
    assert found[0]["activations_max", "0", "training", 0] < 1e4


def test_another_thread_is_not_recorded_into_the_forward_of_this_one(monkeypatch):
    found = []
    for is_native in (True, False):

        def elsewhere(model, x, optimizer, exporter):
            def run(*_):
                thread = threading.Thread(target=lambda: model[0](torch.full((2, 4), 1e6)))
                thread.start()
                thread.join()

            handle = model[2].register_forward_pre_hook(run)
            plain(model, x, optimizer, exporter)
            handle.remove()

        found.append(recorded(*MODELS["mlp"], elsewhere, is_native, monkeypatch)[0])
    assert found[0] == found[1]
    assert found[0]["activations_max", "0", "training", 1] < 1e4


def test_a_hook_of_the_users_stays_with_its_tensor():
    """The dictionary of hooks is used again in the next step only if no tensor has it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in ("activations", "layer_gradients"):
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend="null"))
        for _ in range(3):
            plain(model, torch.ones(2, 4), optimizer, exporter)
        kept = model(torch.ones(2, 4))
        kept.sum().backward(retain_graph=True)
        optimizer.zero_grad()
        optimizer.step()
        seen = []
        out = model(torch.ones(2, 4))
        out.register_hook(seen.append)
        kept.sum().backward()
        assert not seen
        out.sum().backward()
        assert len(seen) == 1


def objects(layers):
    """Return the numbers of objects for the garbage collector, by type, that a forward leaves, and a whole step."""
    model = chain(layers)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in KINDS:
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend="null"))
        for _ in range(4):
            plain(model, torch.ones(2, 4), optimizer, exporter)
        gc.collect()
        gc.disable()
        try:
            optimizer.zero_grad()
            before = Counter(type(x).__name__ for x in gc.get_objects())
            loss = model(torch.ones(2, 4)).sum()
            forward = Counter(type(x).__name__ for x in gc.get_objects()) - before
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return forward, Counter(type(x).__name__ for x in gc.get_objects()) - before
        finally:
            gc.enable()


def test_a_sampled_step_creates_no_object_for_each_module():
    """Torch itself has a tensor for each output, and an object for each node of autograd that has a hook."""
    for few, many in zip(objects(5), objects(60), strict=True):
        growing = {name for name, count in many.items() if count > few[name] + 5}
        assert growing <= {"Tensor", "AddmmBackward0"}


def test_compiled_autograd_calls_the_hook_in_python():
    functions, seen = hook_functions(library()), []

    def hook(grad):
        seen.append(grad)

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    assert functions.watch(y, functions.gradient(Permits(), 0, 0, hook))
    assert not functions.watch(x, functions.gradient(Permits(), 0, 0, hook))  # a leaf
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    assert len(seen) == 1
    assert x.grad.tolist() == [2.0] * 3


def test_an_error_of_the_hook_in_python_is_raised_by_the_backward():
    def hook(grad):
        raise ValueError("mine")

    functions = hook_functions(library())
    y = torch.ones(3, requires_grad=True) * 2
    assert functions.watch(y, functions.gradient(Permits(), 0, 0, hook))
    with pytest.raises(ValueError, match="mine"):
        y.sum().backward()
