"""P1: training is bit-identical with and without ikkuna."""

from functools import partial

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, Subscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.observation.hooks.hook import Hook
from ikkuna.testing import RecordingBackend
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS
from tests.zoo import CASES, Case, Loop, mlp, vectors

torch.set_num_threads(1)


def same(a, b, path="state"):
    """Compare bytes, not values: NaN equals itself and -0 differs from 0."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes(), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def trained(case: Case, bus=None, subscribers=()):
    loop = Loop(case)
    if bus is None:
        losses = loop.run()
        return {"losses": losses, **loop.state()}
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        losses = loop.run()
        assert exporter.health().steps >= 3
    return {"losses": losses, **loop.state()}


@pytest.mark.fault(58)
@pytest.mark.parametrize("name", CASES)
def test_training_with_every_subscriber_is_bit_identical(name, bus):
    recording = RecordingBackend()
    subscribers = [make(backend=recording) for make in EVERY_SUBSCRIBER.values()]
    same(trained(CASES[name]), trained(CASES[name], bus, subscribers))
    assert recording.values


class StateReader(nn.Module):
    """Reads the state of a layer of a recurrent network, and none of its outputs, which get no gradient."""

    def __init__(self, kind, layer, batch_first):
        super().__init__()
        self.cells, self.head, self.layer = kind(3, 8, 2, batch_first=batch_first), nn.Linear(8, 2), layer

    def forward(self, x):
        _, state = self.cells(x)
        return self.head((state[0] if isinstance(state, tuple) else state)[self.layer])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_outputs_that_nothing_uses_change_nothing(kind, layer, batch_first, tmp_path):
    def weights(is_watched):
        torch.manual_seed(0)
        model, loss = StateReader(kind, layer, batch_first), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"log_dir": tmp_path, "backend": "null", "verbosity": 0, "preflight": False}
        monitor = ikkuna.watch(model, loss, **options) if is_watched else None
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(4, 4, 3)), torch.randint(0, 2, (4,))).backward()
            optimizer.step()
        if monitor is not None:
            monitor.close()
            assert (monitor.health().steps, monitor.health().errors) == (3, 0)
        return model.state_dict()

    same(weights(False), weights(True))


class Viewed(nn.Module):
    """Has outputs that are views, are changed in place, or stay unused."""

    def __init__(self):
        super().__init__()
        self.cells, self.line, self.flat, self.head = nn.LSTM(3, 8), nn.Linear(8, 8), nn.Flatten(), nn.Linear(40, 2)

    def forward(self, x):
        _, (state, _) = self.cells(x)
        return self.head(self.flat(self.line(x.repeat(1, 1, 3)[..., :8] + state[0]).relu_()))


def test_every_hook_on_a_tensor_is_guarded(tmp_path, monkeypatch):
    """A function that is registered as it is would raise its errors in the user's backward."""
    registered, register = [], torch.Tensor.register_hook
    monkeypatch.setattr(
        torch.Tensor, "register_hook", lambda self, hook: registered.append(hook) or register(self, hook)
    )
    model, loss = Viewed(), nn.CrossEntropyLoss()
    monitor = ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0, every=1, preflight=False)
    for _ in range(2):
        loss(model(torch.randn(4, 5, 3)), torch.randint(0, 2, (4,))).backward()
    assert monitor.health().errors == 0
    monitor.close()
    called = [hook.func if isinstance(hook, partial) else hook for hook in registered]
    functions = {hook.function.__name__ for hook in called if isinstance(hook, Hook)}
    assert {"gradient_computed", "base_gradient_computed", "view_gradient_computed", "output_reached"} <= functions
    assert all(isinstance(hook, Hook) for hook in called)


def scaled_step(loop):
    inputs, labels = loop.batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loop.optimizer.zero_grad()
    loss = loop.loss(loop.model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(loop.optimizer)
    return loss


def penalized_step(loop):
    inputs, labels = loop.batch()
    inputs.requires_grad_()
    loop.optimizer.zero_grad()
    loss = loop.loss(loop.model(inputs), labels)
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    loss = loss + grad.pow(2).sum()
    loss.backward()
    loop.optimizer.step()
    return loss


def siamese_step(loop):
    (one, labels), (other, _) = loop.batch(), loop.batch()
    loop.optimizer.zero_grad()
    loss = loop.loss(loop.model(one) - loop.model(other), labels)
    loss.backward()
    loop.optimizer.step()
    return loss


def step_in_backward(loop):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in loop.model.parameters()}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), p.grad.zero_())[0]) for p in optimizers
    ]
    inputs, labels = loop.batch()
    loss = loop.loss(loop.model(inputs), labels)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss


def two_optimizers_step(loop):
    parameters = list(loop.model.parameters())
    first = vars(loop).setdefault("first", torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9))
    second = vars(loop).setdefault("second", torch.optim.AdamW(parameters[2:], lr=0.01))
    inputs, labels = loop.batch()
    for optimizer in (first, second):
        optimizer.zero_grad()
    loss = loop.loss(loop.model(inputs), labels)
    loss.backward()
    for optimizer in (first, second):
        optimizer.step()
    return loss


OTHER_LOOPS = {
    "two-optimizers": Case(mlp, vectors, step=two_optimizers_step),
    "scaled": Case(mlp, vectors, step=scaled_step),
    "scaled-fused": Case(mlp, vectors, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), scaled_step),
    "penalized": Case(mlp, vectors, step=penalized_step),
    "siamese": Case(mlp, vectors, step=siamese_step),
    "step-in-backward": Case(mlp, vectors, step=step_in_backward),
}


@pytest.mark.parametrize("name", OTHER_LOOPS)
def test_other_loops_with_every_subscriber_are_bit_identical(name, bus):
    recording = RecordingBackend()
    subscribers = [make(backend=recording) for make in EVERY_SUBSCRIBER.values()]
    same(trained(OTHER_LOOPS[name]), trained(OTHER_LOOPS[name], bus, subscribers))
    assert recording.values


def adversaries(bus=None):
    """Train two networks against each other, in `bus` under an exporter each; return all that training consists of."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(8, 1))
    networks, loss = {"generator": generator, "critic": critic}, nn.BCEWithLogitsLoss()
    exporters = [Exporter(message_bus=bus, on_error="raise") for _ in networks if bus is not None]
    recording = RecordingBackend()
    for exporter, network in zip(exporters, networks.items(), strict=False):
        exporter.add_modules(network)
    if exporters:
        exporters[1].set_loss(loss)
        for make in EVERY_SUBSCRIBER.values():
            subscriber = make(backend=recording)
            if not subscriber.needs_model:  # which cannot know which of the two it is to evaluate
                bus.register_subscriber(subscriber)
    optimizers = [torch.optim.Adam(n.parameters(), lr=0.01, betas=(0.5, 0.9)) for n in networks.values()]
    losses, real = [], torch.ones(6, 1)
    for _ in range(4):
        for optimizer, is_critics in zip(reversed(optimizers), (True, False), strict=True):
            optimizer.zero_grad()
            fake = generator(torch.randn(6, 3))
            value = loss(critic(fake.detach() if is_critics else fake), real * (not is_critics))
            if is_critics:
                value = value + loss(critic(torch.randn(6, 4) + 1), real)
            value.backward()
            optimizer.step()
            losses.append(value.detach().clone())
    for exporter in exporters:
        assert exporter.health().steps == 4
        exporter.close()
    state = [(n.state_dict(), [p.grad for p in n.parameters()]) for n in networks.values()]
    return [losses, state, [o.state_dict() for o in optimizers], torch.get_rng_state()], recording


def test_two_networks_against_each_other_are_bit_identical(bus):
    (plain, _), (watched, recording) = adversaries(), adversaries(bus)
    same(plain, watched)
    assert {series.name.split(".")[0] for series, _, _ in recording.values if series.name} >= {"generator", "critic"}


@pytest.mark.parametrize("name", ["mlp", "conv-bn-dropout", "attention"])
@pytest.mark.parametrize("subscriber", EVERY_SUBSCRIBER)
def test_training_with_one_subscriber_is_bit_identical(name, subscriber, bus):
    makers = (*NEEDS.get(subscriber, ()), EVERY_SUBSCRIBER[subscriber])
    same(trained(CASES[name]), trained(CASES[name], bus, [make(backend=RecordingBackend()) for make in makers]))


@pytest.mark.parametrize("name", CASES)
def test_an_exporter_without_subscribers_changes_nothing(name, bus):
    same(trained(CASES[name]), trained(CASES[name], bus))


class Bad(Subscriber):
    """Does one thing a subscriber must not do."""

    def __init__(self, deed):
        super().__init__("weights", backend="null")
        self.deed = deed

    def measure(self, message):
        self.deed(message.data)

    def compute(self, message):
        pass


@pytest.mark.parametrize(
    "deed", [lambda x: torch.randn(1), lambda x: x.data.mul_(1.001)], ids=["global-rng", "data-write"]
)
def test_the_comparison_notices_a_bad_subscriber(deed, bus):
    case = CASES["conv-bn-dropout"]
    with pytest.raises(AssertionError, match="state"):
        same(trained(case), trained(case, bus, [Bad(deed)]))


@pytest.mark.fault(40)
def test_a_write_to_a_borrowed_tensor_is_noticed_and_ends_the_subscriber(bus, caplog):
    case = Case(mlp, vectors)
    bad = Bad(lambda x: x.add_(0.0))
    trained(case, bus, [bad])
    assert "changed 'weights'" in caplog.text
    assert bus.error_guard.disabled == ["Bad"]


def test_every_module_kind_was_looked_at(bus):
    """The comparisons above say nothing if no tap is there."""
    seen = set()
    subscriber = CallbackSubscriber(MODULE_KINDS, lambda message: seen.add(message.kind), backend="null")
    trained(CASES["attention"], bus, [subscriber])
    assert seen == set(MODULE_KINDS)


def test_a_module_is_as_it_was_after_close(bus):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = [{k: (v.copy() if isinstance(v, dict) else v) for k, v in m.__dict__.items()} for m in model.modules()]
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
    assert [dict(m.__dict__) for m in model.modules()] == before


def test_a_forward_with_fake_tensors_touches_no_memory(tmp_path, recwarn):
    """As the search for the memory that a model needs makes one, between two steps; torch warns of a read of fake memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, every=1, log_dir=tmp_path, verbosity=0) as watched:
        for is_fake in (False, True, False):
            if is_fake:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    model(torch.randn(3, 4))
                continue
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        assert watched.health().errors == 0
    assert not [warning for warning in recwarn if "FakeTensor" in str(warning.message)]
