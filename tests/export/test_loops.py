"""Loops of every kind: each test is a situation, the first line of its docstring what is published there."""

import copy
import io
import threading
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.func import functional_call
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    ClippingSubscriber,
    GlobalNormSubscriber,
    GradientNoiseScaleSubscriber,
    LossSubscriber,
    NormSubscriber,
    Subscriber,
    TrainAccuracySubscriber,
)
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.hook_functions import hook_functions
from ikkuna.observation.hooks import context
from ikkuna.testing import RecordingBackend
from tests.export.test_invisible import same

pytestmark = pytest.mark.devices
FUNCTIONS = hook_functions(library(), wait=True)


class Compared:
    """Three exporters of the same models: that of a test, one that records norms by native functions, and one without these.

    When they are closed, the norms of the other two are compared.  Their subscribers take no tensors, since native functions leave
    these to Python.
    """

    def __init__(self, make, models, kinds):
        self._others, self._norms = [], []
        if FUNCTIONS is not None and torch.get_default_device().type == "cpu":
            for used in (FUNCTIONS, None):  # the first has its hook in front of the others, and can be native
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(context, "hook_functions", lambda kernels, used=used: used)
                    self._others.append(make(MessageBus()))
        for exporter in self._others:
            recording = RecordingBackend()
            self._norms.append(recording)
            for model in models:
                exporter.add_modules(model)
            for kind in kinds:
                exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=recording))

    @property
    def native_seconds(self):
        return self._others[0]._session.context.native.seconds() if self._others else 0.0

    def each(self, method):
        for exporter in self._others:
            getattr(exporter, method)()

    def check(self):
        self.each("close")
        norms = [{(s.kind, s.name, step): value for s, value, step in norms.values} for norms in self._norms]
        for own, other in pairwise(norms):
            assert own.keys() == other.keys()
            assert not {key: (own[key], other[key]) for key in own if own[key] != other[key] and own[key] == own[key]}


class WatchedExporter(Exporter):
    """An exporter whose calls go to those that are compared as well."""

    compared = None

    def close(self):
        super().close()
        if self.compared is not None:
            compared, self.compared = self.compared, None
            compared.check()

    def step(self):
        super().step()
        self.compared.each("step")

    @contextmanager
    def detached(self):
        with ExitStack() as stack:
            stack.enter_context(super().detached())
            for exporter in self.compared._others:
                stack.enter_context(exporter.detached())
            yield


class Watched:
    """Models under an exporter; notes steps, skipped steps, and copies of all tensors by (step, kind, name)."""

    def __init__(self, bus, *models, kinds=MODULE_KINDS, **options):
        self.steps, self.skipped, self.tensors = [], [], {}
        compared = Compared(lambda own: Exporter(message_bus=own, on_error="raise", **options), models, kinds)
        self.exporter = WatchedExporter(message_bus=bus, on_error="raise", **options)
        self.exporter.compared = compared
        for model in models:
            self.exporter.add_modules(model)
        self.register(bus, kinds)

    def register(self, bus, kinds):
        bus.register_subscriber(CallbackSubscriber("batch_finished", self._finished, backend="null"))
        bus.register_subscriber(CallbackSubscriber(kinds, self._keep, backend="null"))

    def _finished(self, message):
        (self.skipped if message.skipped else self.steps).append(message.global_step)

    def _keep(self, message):
        self.tensors.setdefault((message.global_step, message.kind, message.name), []).append(message.data.clone())

    def seen(self, kind):
        """Return {name: [steps]} of a kind."""
        found = {}
        for step, k, name in self.tensors:
            if k == kind:
                found.setdefault(name, []).append(step)
        return found


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(module, **options):
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def backward(model, scale=1.0):
    (model(torch.ones(2, 3)).pow(2).sum() * scale).backward()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradient_scaler(bus, model, fused):
    """The gradients that the optimizer uses, unscaled, with a plain and with a fused optimizer."""
    watched = Watched(bus, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        reference = copy.deepcopy(model)
        backward(reference)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        (grad,) = watched.tensors[step, "weight_gradients", "0"]
        torch.testing.assert_close(grad, reference[0].weight.grad)
    watched.exporter.close()
    assert watched.steps == [0, 1]


def test_a_step_the_gradient_scaler_skips(bus, model):
    """``batch_finished`` with ``skipped``, and no values; the next step has the same number."""
    recording = RecordingBackend()
    watched = Watched(bus, model)
    bus.register_subscriber(NormSubscriber("layer_gradients", backend=recording))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2]
    assert watched.skipped == [1]
    assert {step for _, _, step in recording.values} == {1, 2}  # the first step shows which scaler is in use
    assert len(recording.values) == 2 * 3
    assert all(torch.isfinite(torch.tensor(v)) for _, v, _ in recording.values)


def test_a_fused_optimizer_skips(bus, model):
    """``batch_finished`` with ``skipped``, and no values; the step has its own number, because the optimizer was called."""
    recording = RecordingBackend()
    watched = Watched(bus, model)
    bus.register_subscriber(NormSubscriber("weight_updates", backend=recording))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    watched.exporter.close()
    assert watched.steps == [0, 2]
    assert watched.skipped == [1]
    assert {step for _, _, step in recording.values} == {0, 2}


def test_a_subscriber_can_ask_for_skipped_steps(bus, model):
    """The values of a skipped step, for subscribers with ``sees_skipped``."""

    class Counting(Subscriber):
        fields = ("nans", "infs")
        sees_skipped = True
        got = ()

        def compute(self, message):
            self.got = (*self.got, (message.global_step, message.record.nonfinite))

    counting = Counting("layer_gradients", modules="2", backend="null")
    watched = Watched(bus, model)
    bus.register_subscriber(counting)
    for factor in (1.0, float("inf"), 1.0):
        model.zero_grad()
        (model(torch.ones(2, 3)).sum() * factor).backward()
        if factor == 1.0:
            sgd(model).step()
    watched.exporter.close()
    assert counting.got == ((0, 0), (1, 4), (1, 0))


def test_two_optimizers_of_one_model(bus, model):
    """One step for both optimizers, with the updates of both."""
    watched = Watched(bus, model)
    first, second = sgd(model[0]), torch.optim.Adam(model[2].parameters())
    for _ in range(3):
        backward(model)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2]
    assert watched.seen("weight_updates") == {"0": [0, 1, 2], "2": [0, 1, 2]}


def test_a_second_optimizer_that_steps_now_and_then(bus, model):
    """One step per iteration, once both optimizers are known; the first call of the second optimizer is a separate step."""
    watched = Watched(bus, model)
    first, second = sgd(model[0]), sgd(model[2])
    for i in range(6):
        backward(model)
        first.step()
        if i % 2:
            second.step()
        model.zero_grad()
    watched.exporter.close()
    assert watched.steps == list(range(len(watched.steps)))
    assert len(watched.steps) in (6, 7)
    assert len(watched.seen("weight_updates")["2"]) == 3


def test_gan_with_two_exporters_on_one_bus(bus):
    """Each network under its own name with its own steps; forwards in the step of the other network do not count."""
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    watched = {}
    seen = {}
    for name, network in (("generator", generator), ("discriminator", discriminator)):
        watched[name] = Exporter(message_bus=bus, on_error="raise")
        watched[name].add_modules((name, network))
    finished = []
    bus.register_subscriber(
        CallbackSubscriber("batch_finished", lambda m: finished.append((m.global_step, m.skipped)), backend="null")
    )
    recording = RecordingBackend()
    bus.register_subscriber(NormSubscriber("weight_updates", backend=recording))
    optimizers = sgd(generator), sgd(discriminator)
    for _ in range(3):
        optimizers[1].zero_grad()
        loss = discriminator(torch.randn(4, 3)).mean() - discriminator(generator(torch.randn(4, 2)).detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(generator(torch.randn(4, 2))).mean().backward()
        optimizers[0].step()
    for exporter in watched.values():
        exporter.close()
    for series, _, step in recording.values:
        seen.setdefault(series.name, []).append(step)
    assert seen == {"generator": [0, 1, 2], "discriminator": [0, 1, 2]}
    assert [step for step, skipped in finished if not skipped] == [0, 0, 1, 1, 2, 2]


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, noise):
        return self.generator(noise)


def deep_convolutional(generate, critic, steps):
    fake = generate(torch.randn(4, 2))
    steps["critic"](critic(fake.detach()).mean() - critic(torch.randn(4, 3)).mean())
    steps["generator"](-critic(fake).mean())


def frozen_in_turn(generate, critic, steps):
    critic.requires_grad_(False)
    steps["generator"](-critic(generate(torch.randn(4, 2))).mean())
    critic.requires_grad_(True)
    steps["critic"](critic(generate(torch.randn(4, 2)).detach()).mean())


def soft_actor_critic(generate, critic, steps):
    action = generate(torch.randn(4, 2))
    steps["critic"](critic(torch.randn(4, 3)).square().mean())
    steps["generator"](-critic(action).mean())


def wasserstein(generate, critic, steps):
    for _ in range(5):
        steps["critic"](critic(generate(torch.randn(4, 2)).detach()).mean() - critic(torch.randn(4, 3)).mean())
    steps["generator"](-critic(generate(torch.randn(4, 2))).mean())


def joint(generate, critic, steps):
    steps["both"](critic(generate(torch.randn(4, 2))).mean())


@pytest.mark.parametrize("every", [1, 7, 10, 12])
@pytest.mark.parametrize("whole", [True, False], ids=["model called", "parts called"])
@pytest.mark.parametrize("loop", [deep_convolutional, frozen_in_turn, soft_actor_critic, wasserstein, joint])
def test_optimizers_that_take_turns(bus, loop, whole, every):
    """Each step of an optimizer is a step, whatever is sampled; if one is due, so are the next until all have stepped."""
    model = Adversaries()
    optimizers = {"generator": sgd(model.generator), "critic": sgd(model.critic)}
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    found, updates, numbers = {}, {}, {}
    for kind in ("weight_updates", "activations"):
        bus.register_subscriber(NormSubscriber(kind, backend="null", subsample=every))

        def keep(message):
            found[message.kind, message.module, message.global_step] = message.data
            numbers[message.global_step] = message.optimizers

        bus.register_subscriber(CallbackSubscriber(f"{kind}_norm2", keep, backend="null"))

    def step(names, loss):
        before = {name: model.get_submodule(name).weight.detach().clone() for name in names}
        model.zero_grad()
        loss.backward()
        for name in names:
            optimizers[name].step()
        after = {name: model.get_submodule(name).weight.detach() for name in names}
        updates[len(updates)] = {name: (after[name] - before[name]).norm().item() for name in names}

    groups = {"generator": ["generator"], "critic": ["critic"], "both": ["generator", "critic"]}
    steps = {name: partial(step, names) for name, names in groups.items()}
    for _ in range(12):
        loop(model if whole else model.generator, model.critic, steps)
    exporter.close()
    assert exporter.health().steps == len(updates)
    for (kind, name, at), value in found.items():
        assert kind == "activations_norm2" or value == pytest.approx(updates[at][name])
    for name in optimizers:
        dues = range(every, len(updates) - 12, every)
        sampled = [at for kind, other, at in found if kind == "weight_updates_norm2" and other == name]
        assert all(any(due <= at < due + 12 for at in sampled) for due in dues)
    assert numbers.keys() >= set(range(0, len(updates), every))
    order = list(dict.fromkeys(name for names in updates.values() for name in names))
    assert numbers == {at: tuple(sorted(order.index(name) for name in updates[at])) for at in numbers}
    of_critic = {at for kind, name, at in found if (kind, name) == ("activations_norm2", "critic")}
    assert of_critic >= {at for at in numbers if at or whole}


def test_siamese_forwards(bus, model):
    """One step; the rows of both forwards are merged."""
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)) - model(torch.zeros(2, 3))).pow(2).sum().backward()
        optimizer.step()
    assert (watched.exporter.compared.native_seconds > 0) == (
        FUNCTIONS is not None
    ) or torch.get_default_device().type != "cpu"
    watched.exporter.close()
    assert watched.steps == [0, 1]
    assert [len(watched.tensors[step, "activations", "0"]) for step in (0, 1)] == [2, 2]
    assert watched.skipped == []


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def encode(self, x):
        return self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize(
    "make", [Encoder, lambda: nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})], ids=["method", "dict"]
)
def test_the_root_is_never_called(bus, make):
    """Parameters from the first step on, activations and layer gradients from the second step on."""
    model = make()
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        out = (
            model.encode(torch.ones(2, 3))
            if hasattr(model, "encode")
            else model["head"](torch.relu(model["body"](torch.ones(2, 3))))
        )
        out.sum().backward()
        optimizer.step()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2, 3]
    assert watched.seen("weight_updates") == {"body": [0, 1, 2, 3], "head": [0, 1, 2, 3]}
    assert watched.seen("activations") == {"body": [1, 2, 3], "head": [1, 2, 3]}
    assert watched.seen("layer_gradients") == {"head": [1, 2, 3], "body": [1, 2, 3]}
    assert all(len(v) == 1 for v in watched.tensors.values())


def test_updates_by_hand(bus, model):
    """With ``exporter.step()``: weights, gradients and updates from the first step on."""
    watched = Watched(bus, model)
    for _ in range(3):
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        watched.exporter.step()
        model.zero_grad()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2]
    assert watched.seen("weight_gradients")["0"] == [0, 1, 2]
    assert watched.seen("weights")["0"] == watched.seen("weight_updates")["0"] == [0, 1, 2]
    (update,), (grad,) = watched.tensors[2, "weight_updates", "0"], watched.tensors[2, "weight_gradients", "0"]
    torch.testing.assert_close(update, -0.1 * grad)


def test_optimizers_that_step_in_backward(bus, model):
    """One step per backward pass, with all gradients and updates."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    watched = Watched(bus, model)
    for _ in range(3):
        backward(model)
    watched.exporter.close()
    for handle in handles:
        handle.remove()
    assert watched.steps == [0, 1, 2]
    for kind in ("weights", "weight_gradients", "weight_updates"):
        assert dict(watched.seen(kind).items()) == {"2": [0, 1, 2], "0": [0, 1, 2]}
    assert watched.seen("layer_gradients")["0"] == [0, 1, 2]


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize(
    "is_tensor",
    [False, pytest.param(True, marks=pytest.mark.host("to read a learning rate of a device is to wait for it"))],
)
def test_a_distributed_checkpoint_that_creates_the_state_of_an_optimizer(bus, model, has_trained, is_tensor):
    """No step, although torch calls the optimizer with learning rate 0 for it."""
    watched = Watched(bus, model)
    rate = torch.tensor(0.1) if is_tensor else 0.1
    optimizer = torch.optim.SGD(model[0].parameters(), lr=rate)  # it has no state, and lacks parameters
    called = []
    optimizer.register_step_post_hook(lambda *unused: called.append(None))
    for _ in range(has_trained):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        get_state_dict(model[0], optimizer)
    assert len(called) == has_trained + 1
    for _ in range(2):
        backward(model)
        optimizer.step()
    watched.exporter.close()
    assert watched.steps == list(range(has_trained + 2))
    assert watched.seen("activations")["0"] == watched.steps


def test_a_scheduler_that_wraps_the_step(bus, model):
    """One step per call of the optimizer."""
    watched = Watched(bus, model)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for _ in range(3):
        backward(model)
        optimizer.step()
        scheduler.step()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2]


def test_an_averaged_copy_beside_the_model(bus, model):
    """Only the model; the copy is not observed."""
    watched = Watched(bus, model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        average.update_parameters(model)
        average(torch.ones(2, 3))
    watched.exporter.close()
    assert watched.steps == [0, 1]
    assert all(len(v) == 1 for (_, kind, _), v in watched.tensors.items() if kind == "activations")


def test_gradient_penalty(bus, model):
    """Layer gradients of the loss, without those of the penalty's own backward pass."""
    watched = Watched(bus, model, kinds=("layer_gradients",))
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() + grad.pow(2).sum()).backward()
        optimizer.step()
    watched.exporter.close()
    assert watched.steps == [0, 1]
    assert all(len(v) == 1 for v in watched.tensors.values())


def test_an_adversarial_example_before_the_step(bus, model):
    """Layer gradients of the loss, without those of the attack."""
    watched = Watched(bus, model, kinds=("layer_gradients",))
    optimizer = sgd(model)
    x = torch.ones(2, 3, requires_grad=True)
    optimizer.zero_grad()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    model((x + grad.sign()).detach()).sum().backward()
    optimizer.step()
    watched.exporter.close()
    assert all(len(v) == 1 for v in watched.tensors.values())


def test_functional_call(bus, model):
    """The call with other parameters, like any call of the model."""
    watched = Watched(bus, model, kinds=("activations",))
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
    out = functional_call(model, parameters, (torch.ones(2, 3),))
    watched.exporter.close()
    assert torch.equal(watched.tensors[0, "activations", "2"][0], out)


def test_transforms_of_torch_func(bus, model):
    """Nothing, because tensors inside ``vmap`` and ``grad`` cannot be read."""
    watched = Watched(bus, model)
    parameters = dict(model.named_parameters())
    per_sample = torch.func.vmap(torch.func.grad(lambda p, x: functional_call(model, p, (x,)).sum()), in_dims=(None, 0))
    grads = per_sample(parameters, torch.ones(5, 3))
    watched.exporter.close()
    assert grads["0.weight"].shape == (5, 4, 3)
    assert watched.tensors == {}


def test_torch_export(bus, model):
    """Nothing; the exported program contains no hooks."""
    watched = Watched(bus, model)
    program = torch.export.export(model, (torch.ones(2, 3),))
    watched.exporter.close()
    assert watched.tensors == {}
    plain = torch.export.export(model, (torch.ones(2, 3),))
    assert [n.op for n in program.graph.nodes] == [n.op for n in plain.graph.nodes]


@pytest.mark.host("the simulated device cannot be traced by TorchScript")
def test_jit_trace(bus, model):
    """Nothing; the traced module works."""
    watched = Watched(bus, model)
    with watched.exporter.detached():
        traced = torch.jit.trace(model, torch.ones(2, 3))
    watched.exporter.close()
    assert watched.tensors == {}
    assert torch.equal(traced(torch.ones(2, 3)), model(torch.ones(2, 3)))


@pytest.mark.fault(18)
def test_lazy_parameters(bus):
    """All values, including those of the first step."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    watched = Watched(bus, model)
    model(torch.ones(2, 3))
    optimizer = sgd(model)
    model.zero_grad()
    backward(model)
    optimizer.step()
    watched.exporter.close()
    assert watched.steps == [0]
    assert watched.seen("weight_updates") == {"0": [0], "2": [0]}


@pytest.mark.fault(50)
@pytest.mark.host("the simulated device has no sparse tensors")
def test_sparse_embedding_gradients(bus):
    """The gradient of all rows of the table, including rows that are not stored."""
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    recording = RecordingBackend()
    watched = Watched(bus, model)
    bus.register_subscriber(NormSubscriber("weight_gradients", backend=recording))
    model(torch.tensor([[1, 1], [2, 5]])).sum().backward()
    expected = model[0].weight.grad.to_dense().norm().item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    watched.exporter.close()
    assert {s.name: v for s, v, _ in recording.values}["0"] == pytest.approx(expected, rel=1e-6)
    assert watched.tensors[0, "weight_gradients", "0"][0].shape == (10, 3)


@pytest.mark.fault(59)
def test_parameters_replaced_between_steps(bus, model):
    """The new parameters, from the next step on."""
    watched = Watched(bus, model)
    backward(model)
    sgd(model).step()
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
    backward(model)
    sgd(model).step()
    watched.exporter.close()
    assert watched.steps == [0, 1]
    (weight,), (update,) = watched.tensors[1, "weights", "0"], watched.tensors[1, "weight_updates", "0"]
    torch.testing.assert_close(weight + update, model[0].weight.detach())


@pytest.mark.fault(59)
def test_a_module_replaced_between_epochs(bus, model):
    """The new module, from the next epoch on."""
    watched = Watched(bus, model)
    for _ in range(2):
        backward(model)
        sgd(model).step()
        model[2] = nn.Linear(4, 5)
        watched.exporter.epoch_finished()
    watched.exporter.close()
    shapes = [watched.tensors[step, "weights", "2"][0].shape for step in (0, 1)]
    assert shapes == [(2, 4), (5, 4)]
    assert watched.tensors[1, "activations", "2"][0].shape == (2, 5)


def test_weights_edited_between_steps(bus, model):
    """Only the updates of the optimizer; the next weights contain the edit."""
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(2):
        model.zero_grad()
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
    watched.exporter.close()
    (update,), (grad,) = watched.tensors[1, "weight_updates", "0"], watched.tensors[1, "weight_gradients", "0"]
    torch.testing.assert_close(update, -0.1 * grad, rtol=1e-4, atol=1e-7)
    assert watched.tensors[1, "weights", "0"][0].abs().max() <= 0.01


def test_training_in_evaluation_mode(bus, model):
    """Steps and parameters; forwards from the second step on, because the first step shows that they count."""
    model.eval()
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 3))
    assert watched.seen("activations")["0"] == watched.seen("layer_gradients")["0"] == [1, 2]
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        model.eval()
        model(torch.ones(2, 3))  # a validation that has forgotten no_grad
        model.train()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2, 3, 4]
    assert watched.seen("weight_updates")["0"] == [0, 1, 2, 3, 4]
    assert [len(watched.tensors[step, "activations", "0"]) for step in (1, 2, 3, 4)] == [1, 1, 1, 1]


class Lookahead(torch.optim.Optimizer):
    """Goes back half of the way that another optimizer went in two steps (Zhang et al. 2019)."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))


def test_an_optimizer_that_wraps_another(bus, model):
    """One step per call of the outer optimizer, with its updates."""
    watched = Watched(bus, model)
    optimizer, expected = Lookahead(sgd(model)), []
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        before = model[0].weight.detach().clone()
        optimizer.step()
        expected.append(model[0].weight.detach() - before)
    watched.exporter.close()
    assert watched.steps == [0, 1, 2, 3]
    assert watched.seen("activations")["0"] == watched.seen("weight_gradients")["0"] == watched.steps
    for step, update in enumerate(expected):
        (seen,) = watched.tensors[step, "weight_updates", "0"]
        torch.testing.assert_close(seen, update)


def test_an_optimizer_made_of_several(bus, model):
    """One step per call, if it owns the parameters of its optimizers or none."""

    class Several(torch.optim.Optimizer):
        def __init__(self, optimizers, parameters):
            self.optimizers = optimizers
            super().__init__(parameters, {})

        def step(self, closure=None):
            for optimizer in self.optimizers:
                optimizer.step()

    watched = Watched(bus, model)
    parts = [sgd(model[0]), torch.optim.AdamW(model[2].parameters())]
    for owned in (list(model.parameters()), [torch.zeros(1)]):
        optimizer = Several(parts, owned)
        for _ in range(2):
            model.zero_grad()
            backward(model)
            optimizer.step()
    watched.exporter.close()
    assert watched.steps == [0, 1, 2, 3]
    assert all(watched.seen(kind)[name] == watched.steps for kind in ("activations", "weight_updates") for name in "02")


# -- passes, epochs, resuming ------------------------------------------------------------------------------------------


class Moving(nn.Module):
    """All state an evaluation could change: dropout, batch norm, a frozen submodule in evaluation mode, a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(4).eval()
        self.head = nn.Linear(4, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.frozen(self.body(x)))


def evaluated_run(bus, evaluate):
    torch.manual_seed(1)
    model, loss = Moving(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(24, 3), torch.randint(0, 5, (24,)))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator), generator=generator)
    losses, flags = [], []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        bus.register_subscriber(TrainAccuracySubscriber(tag="testing", publishes="held_out", backend="null"))
        for _ in range(2):
            for x, y in loader:
                if evaluate:
                    exporter.evaluate(loader)
                optimizer.zero_grad()
                value = loss(model(x), y)
                value.backward()
                optimizer.step()
                losses.append(value.detach())
                flags.append([m.training for m in model.modules()])
    return {
        "losses": losses,
        "flags": flags,
        "model": model.state_dict(),
        "rng": torch.get_rng_state(),
        "own": generator.get_state(),
    }


def test_evaluate_leaves_every_bit_of_training_as_found():
    """Another pass under its own name; training stays bit-identical."""
    same(evaluated_run(MessageBus(), False), evaluated_run(MessageBus(), True))


def test_evaluate_publishes_one_row_over_all_batches(bus, model):
    recording = RecordingBackend()
    loss = nn.CrossEntropyLoss()
    data = [(torch.randn(n, 3), torch.randint(0, 2, (n,))) for n in (4, 4, 1)]
    outputs = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        bus.register_subscriber(TrainAccuracySubscriber(tag="testing", publishes="test_share", backend=recording))
        bus.register_subscriber(NormSubscriber("loss", tag="testing", backend=recording))
        exporter.evaluate(data, visit=lambda out, labels: outputs.append((out, labels)))
    out, labels = torch.cat([o for o, _ in outputs]), torch.cat([y for _, y in outputs])
    values = {s.kind: v for s, v, _ in recording.values}
    assert values["test_share"] == pytest.approx((out.argmax(1) == labels).float().mean().item())
    assert values["loss_norm2"] == pytest.approx(loss(out, labels).item(), rel=1e-6)
    assert not out.requires_grad


def test_evaluate_restores_after_an_exception(bus, model):
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError):
            exporter.evaluate([torch.ones(2, 7)])
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert exporter._session.context.tracker.pass_name == "training"


def test_evaluate_takes_a_forward_of_ones_own(bus, model):
    got = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        batches = [{"a": torch.ones(2, 3)}]
        exporter.evaluate(batches, visit=lambda out, _: got.append(out), forward=lambda m, batch: m(batch["a"]) * 2)
        assert torch.equal(got[0], model(torch.ones(2, 3)).detach() * 2)


def test_evaluate_needs_to_know_the_model(bus):
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(("a", nn.Linear(1, 1)))
        exporter.add_modules(("b", nn.Linear(1, 1)))
        with pytest.raises(ConfigError, match="2 were added; choose one with set_model"):
            exporter.evaluate([])


def test_a_subscriber_that_needs_the_model_can_evaluate_it(bus, model):
    """A subscriber with ``needs_model`` runs the model in ``compute``, at the end of a step."""

    class Evaluating(Subscriber):
        needs_model = True

        def __init__(self, batches):
            super().__init__("batch_finished", publishes="sum", backend="null")
            self.batches = batches
            self.sums = []

        def compute(self, message):
            self.evaluate(self.batches, visit=lambda out, labels: self.sums.append(out.sum().item()))
            self.emit(message, self.sums[-1])

    evaluating = Evaluating([torch.ones(2, 3)])
    watched = Watched(bus, model)
    bus.register_subscriber(evaluating)
    for _ in range(2):
        backward(model)
        sgd(model).step()
    watched.exporter.close()
    assert len(evaluating.sums) == 2
    assert watched.steps == [0, 1]
    assert all(len(v) == 1 for v in watched.tensors.values())


@pytest.mark.parametrize("way", ["wrapper", "call", "count"])
def test_epochs(bus, model, way):
    """``epoch_finished`` after the last step: by ``exporter.epoch(batches)``, by a call, or by the number of steps."""
    events = []
    optimizer = sgd(model)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        watch = CallbackSubscriber(
            ["batch_finished", "epoch_finished"],
            lambda m: events.append((m.kind[:5], m.global_step, m.epoch)),
            backend="null",
        )
        bus.register_subscriber(watch)
        if way == "count":
            exporter.steps_per_epoch = 2
        for _ in range(2):
            for _ in exporter.epoch(range(2)) if way == "wrapper" else range(2):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
            if way == "call":
                exporter.epoch_finished()
    assert events == [
        ("batch", 0, 0),
        ("batch", 1, 0),
        ("epoch", 1, 0),
        ("batch", 2, 1),
        ("batch", 3, 1),
        ("epoch", 3, 1),
    ]


def test_an_epoch_that_is_left_early_is_not_finished(bus, model):
    events = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(CallbackSubscriber("epoch_finished", events.append, backend="null"))
        for i in exporter.epoch(range(5)):
            if i == 2:
                break
    assert events == []


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_steps_per_epoch_is_checked(bus, steps):
    with Exporter(message_bus=bus) as exporter, pytest.raises(ConfigError, match="steps_per_epoch must be an int >= 1"):
        exporter.steps_per_epoch = steps


@pytest.mark.fault(90)
def test_a_resumed_run_goes_on_counting(bus, model):
    """Steps and epochs continue from the checkpoint."""
    watched = Watched(bus, model)
    for _ in range(2):
        backward(model)
        sgd(model).step()
    watched.exporter.epoch_finished()
    file = io.BytesIO()
    torch.save(watched.exporter.state_dict(), file)
    watched.exporter.close()
    file.seek(0)
    again = Watched(MessageBus(), model)
    bus2 = again.exporter.message_bus
    again.exporter.load_state_dict(torch.load(file))
    stamps = []
    bus2.register_subscriber(
        CallbackSubscriber(
            "batch_started", lambda m: stamps.append((m.global_step, m.train_step, m.epoch)), backend="null"
        )
    )
    backward(model)
    sgd(model).step()
    again.exporter.close()
    assert stamps == [(2, 0, 1)]


@pytest.mark.fault(81)
@pytest.mark.parametrize(
    "state",
    [None, {}, {"global_step": -1, "train_step": 0, "epoch": 0}, {"global_step": "1", "train_step": 0, "epoch": 0}],
)
def test_a_state_that_is_none_is_refused(bus, state):
    with Exporter(message_bus=bus) as exporter, pytest.raises(ConfigError, match="needs what state_dict.. returned"):
        exporter.load_state_dict(state)


class Parts(nn.Module):
    """A module that is never called itself: its owner calls a method, or its parts."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)

    def training_step(self, x):
        return self.body(x).pow(2).sum()


BATCHES = [torch.full((2, 3), value) for value in (1.0, 2.0, 3.0)]


def watched_norms(bus, model):
    """Return an exporter, and {step: norm of what the first layer returned}, filled as it is published."""
    found = {}
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    bus.register_subscriber(NormSubscriber("activations", modules=["0", "body"], backend="null"))
    keep = CallbackSubscriber("activations_norm2", lambda m: found.update({m.global_step: m.data}), backend="null")
    bus.register_subscriber(keep)
    return exporter, found


def norm_of(layer, batches):
    with torch.no_grad():
        return sum(layer(x).pow(2).sum().item() for x in batches) ** 0.5


def accumulating_step(model, optimizer, loss_of):
    """Accumulate over two batches, and let the optimizer's closure take the third."""
    optimizer.zero_grad()
    for x in BATCHES[:2]:
        loss_of(x).backward()

    def closure():
        loss = loss_of(BATCHES[2])
        loss.backward()
        return loss

    optimizer.step(closure)


def test_micro_batches_before_a_closure(bus, model):
    """One step with the micro-batches before ``step(closure)`` and those of the closure, if their gradients are kept."""
    exporter, norms = watched_norms(bus, model)
    optimizer, expected = sgd(model), []
    for _ in range(2):
        expected.append(norm_of(model[0], BATCHES))
        accumulating_step(model, optimizer, lambda x: model(x).pow(2).sum())
    exporter.close()
    assert norms == pytest.approx(dict(enumerate(expected)))


def test_gradients_thrown_away_before_a_closure(bus, model):
    """Only the closure's evaluation: sharpness-aware optimizers discard the first gradient and step with the second."""
    exporter, norms = watched_norms(bus, model)
    x = BATCHES[0]
    backward(model)

    class Climbing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            for p in model.parameters():
                p += 0.1 * p.grad
            self.zero_grad()
            with torch.enable_grad():
                closure()
            return super().step()

    optimizer = Climbing(model.parameters(), lr=0.1)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.norm().item()))
    optimizer.step(lambda: model(x).pow(2).sum().backward())
    exporter.close()
    assert norms == pytest.approx({0: seen[-1]})


def test_a_method_that_calls_the_parts(bus):
    """As with a forward; if the first step runs inside a closure, forwards count from the second step on."""
    model = Parts()
    exporter, norms = watched_norms(bus, model)
    optimizer, expected = sgd(model), []
    for _ in range(3):
        expected.append(norm_of(model.body, BATCHES))
        accumulating_step(model, optimizer, model.training_step)
    exporter.close()
    assert norms == pytest.approx(dict(list(enumerate(expected))[1:]))


def test_closures_that_call_a_method(bus):
    """The last evaluation of each step, although no root is called."""
    model = Parts()
    exporter, norms = watched_norms(bus, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    seen, expected = [], []
    model.body.register_forward_hook(lambda module, args, output: seen.append(output.norm().item()))

    def closure():
        optimizer.zero_grad()
        loss = model.training_step(BATCHES[0])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        expected.append(seen[-1])
    exporter.close()
    assert norms == pytest.approx(dict(enumerate(expected)))
    assert len(seen) > 3


def test_a_compiled_method(bus):
    """The values of its graph, from the second step on."""
    model = Parts()
    exporter, norms = watched_norms(bus, model)
    optimizer, training_step, expected = sgd(model), torch.compile(model.training_step, backend="eager"), []
    for _ in range(3):
        expected.append(norm_of(model.body, BATCHES[:1]))
        optimizer.zero_grad()
        training_step(BATCHES[0]).backward()
        optimizer.step()
    exporter.close()
    assert norms == pytest.approx(dict(list(enumerate(expected))[1:]))


# -- loops that look alike, and which forwards and gradients they use ---------------------------------------------------


def recorded(bus, model, kinds=("activations", "layer_gradients"), **options):
    """Return an exporter, and {(kind, name, step): L2 norm}, filled as steps are published."""
    found = {}
    exporter = Exporter(message_bus=bus, on_error="raise", **options)
    exporter.add_modules(model)
    for kind in kinds:
        bus.register_subscriber(NormSubscriber(kind, backend="null"))

        def keep(message, kind=kind):
            found[kind, message.name, message.global_step] = message.data

        bus.register_subscriber(CallbackSubscriber(f"{kind}_norm2", keep, backend="null"))
    return exporter, found


def joint(tensors):
    return torch.cat([t.detach().double().reshape(-1) for t in tensors]).norm().item()


class Outputs:
    """Keeps what a layer returned and its gradient, by hooks of its own, as lists that a test empties."""

    def __init__(self, layer):
        self.values, self.gradients = [], []
        layer.register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        if torch.is_grad_enabled():
            self.values.append(output.detach().clone())
            output.register_hook(lambda grad: self.gradients.append(grad.clone()))

    def clear(self):
        self.values.clear()
        self.gradients.clear()


def test_an_interrupted_forward(bus):
    """All values from the next forward on; the interrupted forward does not count."""

    class Interrupting(nn.Module):
        interrupts = False

        def forward(self, x):
            if self.interrupts:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(3, 4), Interrupting(), nn.Linear(4, 2))
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    for step in range(4):
        model[1].interrupts = step == 1
        optimizer.zero_grad()
        try:
            backward(model)
        except KeyboardInterrupt:
            continue
        optimizer.step()
    exporter.close()
    assert {step for kind, _, step in norms if kind == "activations"} == {0, 1, 2}
    assert {step for kind, _, step in norms if kind == "layer_gradients"} == {0, 1, 2}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["before", "between"])
def test_gradients_thrown_away(bus, order, set_to_none):
    """Only the step's own forwards, if ``zero_grad()`` stands before the forward or between forward and backward."""
    torch.manual_seed(2)
    generator, discriminator = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = sgd(generator), sgd(discriminator)
    exporter, norms = recorded(bus, discriminator)
    seen, expected = Outputs(discriminator[0]), {}
    for step in range(3):
        fake = generator(torch.randn(4, 2))
        optimizers[0].zero_grad()
        discriminator(fake).mean().backward()
        optimizers[0].step()
        seen.clear()
        if order == "before":
            optimizers[1].zero_grad(set_to_none)
        loss = discriminator(torch.randn(4, 3)).mean() - discriminator(fake.detach()).mean()
        if order == "between":
            optimizers[1].zero_grad(set_to_none)
        loss.backward()
        expected["activations", "0", step] = joint(seen.values)
        expected["layer_gradients", "0", step] = joint(seen.gradients)
        optimizers[1].step()
    exporter.close()
    assert {key: norms[key] for key in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("forwards", [1, 2])
def test_gradients_of_single_terms_are_thrown_away(bus, model, forwards, set_to_none):
    """All forwards of the step and the layer gradients of the last backward, if those of single terms are cleared."""
    optimizer, seen, expected = sgd(model), Outputs(model[0]), {}
    exporter, norms = recorded(bus, model)
    for step in range(3):
        seen.clear()
        outputs = [model(torch.randn(4, 3)) for _ in range(forwards)]
        terms = outputs[0].square().mean(), outputs[-1].mean()
        for term in (*terms, terms[0] + 0.1 * terms[1]):
            optimizer.zero_grad(set_to_none)
            seen.gradients.clear()
            term.backward(retain_graph=True)
        expected["activations", "0", step] = joint(seen.values)
        expected["layer_gradients", "0", step] = joint(seen.gradients)
        optimizer.step()
    exporter.close()
    assert {key: norms[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert {step for *_, step in norms} == {0, 1, 2}


def test_a_scaler_skips_between_forward_and_backward(bus, model):
    """The next step has no value of the skipped step, also if ``zero_grad()`` stands between forward and backward."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    exporter, norms = recorded(bus, model)
    for i in range(3):
        loss = model(torch.ones(2, 3)).pow(2).sum() * (float("inf") if i == 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    exporter.close()
    assert {step for _, _, step in norms} == {0, 1}
    assert all(value == value and value < 1e6 for value in norms.values())


def test_clipping_between_micro_batches(bus, model):
    """All micro-batches: gradients that were changed but not cleared are used.

    On CUDA only the last one: whether they are zero now is not read there.
    """
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    seen = Outputs(model[0])
    for _ in range(3):
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = joint(seen.values[-1:] if torch.get_default_device().type == "cuda" else seen.values)
    optimizer.step()
    exporter.close()
    assert norms["activations", "0", 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("way", ["two", "backward"])
def test_weights_are_recorded_once(bus, model, way):
    """Each weight once per step, also with two optimizers and with optimizers that step in the backward pass."""
    exporter, norms = recorded(bus, model, ("weights", "biases"))
    expected = {0: model[0].weight.norm().item(), 2: model[2].weight.norm().item()}
    if way == "two":
        backward(model)
        for optimizer in (sgd(model[0]), sgd(model[2])):
            optimizer.step()
    else:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
        backward(model)
        for handle in handles:
            handle.remove()
    exporter.close()
    for name, value in expected.items():
        assert norms["weights", str(name), 0] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("together", [True, False])
def test_two_optimizers_of_the_same_parameters(bus, model, together):
    """One step with the sum of the updates, if both step after one forward; with a forward between them, one step each."""
    watched = Watched(bus, model, kinds=("weight_updates", "weight_gradients"))
    optimizers = [sgd(model), torch.optim.Adam(model.parameters(), lr=0.01)]
    changes = []
    for i in range(4):
        model.zero_grad()
        backward(model)
        before = model[0].weight.detach().clone()
        for optimizer in optimizers if together else [optimizers[i % 2]]:
            optimizer.step()
        changes.append(model[0].weight.detach() - before)
    watched.exporter.close()
    assert watched.steps == [0, 1, 2, 3]
    for step, change in enumerate(changes):
        (update,) = watched.tensors[step, "weight_updates", "0"]
        torch.testing.assert_close(update, change)
        assert len(watched.tensors[step, "weight_gradients", "0"]) == 1


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize(
    ("options", "names"),
    [({"module_filter": [nn.ReLU]}, {"backbone.1"}), ({"depth": 0}, {"headed"}), ({"depth": 1}, {"backbone", "head"})],
    ids=["filter", "depth0", "depth1"],
)
def test_observed_modules_without_trained_parameters(bus, options, names):
    """The steps of the added model, for any observed part of it."""
    model = Headed()
    exporter, norms = recorded(bus, model, **options)
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    exporter.close()
    assert {(name, step) for kind, name, step in norms if kind == "activations"} == {
        (n, s) for n in names for s in (0, 1)
    }


@pytest.mark.parametrize("whole", [True, False])
def test_a_frozen_backbone_under_a_trained_head(bus, whole, caplog):
    """The steps of the head's optimizer, if only the backbone is added, and if the model is set."""
    model = Headed()
    model.backbone.requires_grad_(False)
    exporter, norms = recorded(bus, model.backbone)
    if whole:
        exporter.set_model(model)
    optimizer = sgd(model.head)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    exporter.close()
    name = "backbone.0" if whole else "0"
    assert [step for _, n, step in norms if n == name] == [0, 1, 2]
    assert not caplog.records


def test_gradients_of_a_frozen_part_between_trained_ones(bus):
    """A part without trainable parameters has gradients of its layers; those of ``torch.autograd.grad`` do not count."""
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh()).requires_grad_(False), nn.Linear(4, 1)
    )
    exporter, norms = recorded(bus, model[1])
    optimizer, expected = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1), {}
    for step in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        seen = Outputs(model[1][1])
        model(x).pow(2).sum().backward()
        expected[step] = joint(seen.gradients)
        optimizer.step()
    exporter.close()
    found = {s: value for (kind, name, s), value in norms.items() if (kind, name) == ("layer_gradients", "1")}
    assert found == pytest.approx(expected)


def test_gradients_by_autograd_grad(bus, model):
    """Layer gradients, as in a backward pass, if ``torch.autograd.grad`` computes the gradients of the parameters."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    seen, expected = Outputs(model[0]), {}
    for step in range(2):
        seen.clear()
        loss = model(torch.ones(2, 3)).pow(2).sum()
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = grad
        expected["layer_gradients", "0", step] = joint(seen.gradients)
        expected["activations", "0", step] = joint(seen.values)
        optimizer.step()
    exporter.close()
    assert {key: norms[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def test_a_penalty_on_gradients_of_parameters(bus, model):
    """Layer gradients of the backward pass, without those of the preceding ``torch.autograd.grad``."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    seen = Outputs(model[2])
    loss = model(torch.ones(2, 3)).pow(2).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    seen.gradients.clear()
    (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()
    expected = joint(seen.gradients)
    optimizer.step()
    exporter.close()
    assert norms["layer_gradients", "2", 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("only", [True, False], ids=["inside alone is trained", "all is trained"])
def test_layer_gradients_around_a_checkpoint(bus, use_reentrant, only):
    """Layer gradients inside and outside the checkpoint, also if only modules inside it are trained (LoRA)."""

    class Checkpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.stem(x)
            if not h.requires_grad:
                h = h.detach().requires_grad_()  # as enable_input_require_grads() does
            return self.head(torch.utils.checkpoint.checkpoint(self.block, h, use_reentrant=use_reentrant))

    torch.manual_seed(1)
    model = Checkpointing()
    if only:
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    exporter, norms = recorded(bus, model)
    expected = {}
    for step in range(2):
        optimizer.zero_grad()
        plain = copy.deepcopy(model)
        h = plain.stem(torch.ones(2, 3)).detach().requires_grad_()
        middle = plain.block(h)
        out = plain.head(middle)
        for name, tensor in (("block", middle), ("head", out)):
            tensor.retain_grad()
            expected["layer_gradients", name, step] = tensor
        out.pow(2).sum().backward()
        backward(model)
        optimizer.step()
    exporter.close()
    expected = {key: tensor.grad.norm().item() for key, tensor in expected.items()}
    assert {key: norms.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)


def test_the_root_in_a_reentrant_checkpoint(bus, model):
    """The recomputed forward, because it is the one with gradients."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).pow(2).sum().backward()
        expected = model(torch.ones(2, 3)).norm().item()
        optimizer.step()
    exporter.close()
    assert {step for kind, name, step in norms if (kind, name) == ("activations", "2")} == {0, 1}
    assert {step for kind, name, step in norms if (kind, name) == ("layer_gradients", "2")} == {0, 1}
    assert norms["activations", "2", 1] == pytest.approx(expected, rel=1e-6)


def test_another_thread_calls_the_model(bus, model):
    """Only the forwards of the training thread; a thread that evaluates does not disturb them."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    seen, expected, stop, batch = Outputs(model[0]), {}, threading.Event(), torch.ones(2, 3)

    def evaluate():
        while not stop.is_set():
            with torch.no_grad():
                model(batch)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for step in range(100):
            seen.clear()
            optimizer.zero_grad()
            backward(model)
            expected["activations", "0", step] = joint(seen.values)
            expected["layer_gradients", "0", step] = joint(seen.gradients)
            optimizer.step()
    finally:
        stop.set()
        thread.join()
    exporter.close()
    assert {key: norms.get(key) for key in expected} == pytest.approx(expected, rel=1e-6)


def test_trainings_in_two_threads():
    """All steps of both threads, each with its own exporter and bus."""

    def train(found, ready):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = sgd(model)
        exporter, norms = recorded(MessageBus(), model)
        found.append((exporter, norms))
        ready.wait()
        for _ in range(200):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()

    found, ready = [], threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(found, ready)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exporter, norms in found:
        exporter.close()
        assert {step for _, _, step in norms} == set(range(200))
        assert len(norms) == 200 * 6


@pytest.mark.parametrize("position", ["before", "after", "none"])
def test_a_forward_without_a_backward(bus, model, position):
    """Only forwards with a backward pass; other forwards in training mode do not count."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model)
    if position == "before":
        model(100 * torch.ones(2, 3))
    loss = model(torch.ones(2, 3)).pow(2).sum()
    expected = model[0](torch.ones(2, 3)).norm().item()
    if position == "after":
        model(100 * torch.ones(2, 3))
    loss.backward()
    optimizer.step()
    exporter.close()
    assert norms["activations", "0", 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("used", ["first", "both"])
def test_a_module_that_returns_views_of_each_other(bus, used):
    """The gradients of the outputs that the loss uses, and no others."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.pair = nn.Linear(3, 2), Logits()

        def forward(self, x):
            return self.pair(self.linear(x))

    class Logits(nn.Module):
        def forward(self, x):
            t = x * 1.0
            return t, t.t()

    model = Views()
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model, ("layer_gradients",))
    first, second = model(torch.ones(2, 3))
    (first.sum() if used == "first" else first.sum() + second.pow(2).sum()).backward()
    optimizer.step()
    exporter.close()
    assert ("layer_gradients", "pair", 0) in norms
    assert (("layer_gradients", "pair:1", 0) in norms) == (used != "first")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("weight", [None, [1.0, 5.0]], ids=["plain", "class weights"])
def test_the_loss_of_micro_batches(bus, model, reduction, weight):
    """The loss of all micro-batches: a weighted mean of means, or the sum of sums."""
    weight = None if weight is None else torch.tensor(weight)
    loss = nn.CrossEntropyLoss(weight=weight, reduction=reduction, ignore_index=-1)
    recording = RecordingBackend()
    optimizer = sgd(model)
    batches = [(torch.randn(n, 3), torch.randint(-1, 2, (n,))) for n in (5, 2, 4)]
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        bus.register_subscriber(LossSubscriber(backend=recording))
        for x, y in batches:
            loss(model(x), y).backward()
        with exporter.paused():
            whole = loss(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).item()
        optimizer.step()
    [value] = [value for series, value, _ in recording.values if series.name is None]
    assert value == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_half_precision_weights(bus, dtype):
    """The difference in float32."""
    model = nn.Linear(64, 64).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.37)
    exporter, norms = recorded(bus, model, ("weight_updates",))
    before = model.weight.detach().double()
    model(torch.randn(8, 64).to(dtype)).float().pow(2).sum().backward()
    optimizer.step()
    exporter.close()
    expected = (model.weight.detach().double() - before).norm().item()
    assert norms["weight_updates", "linear", 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loop", ["plain", "accumulated", "scaled", "lightning-like closure"])
def test_gradients_before_clipping(bus, model, loop):
    """``weight_gradients_unclipped`` as the last backward left them, unscaled; with a gradient scaler from the second step on."""
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model, ("weight_gradients", "weight_gradients_unclipped"))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=loop == "scaled")
    unclipped = {}
    for step in range(2):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        for _ in range(2 if loop == "accumulated" else 1):
            backward(plain)
        unclipped[step] = plain[0].weight.grad.norm().item()
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3).item()
        assert total > 1e-3

        def closure():
            optimizer.zero_grad()
            for _ in range(2 if loop == "accumulated" else 1):
                scaler.scale(model(torch.ones(2, 3)).pow(2).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        if loop.endswith("closure"):
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
    exporter.close()
    for step, value in unclipped.items():
        if step or ("weight_gradients_unclipped", "0", step) in norms:
            assert norms["weight_gradients_unclipped", "0", step] == pytest.approx(value, rel=1e-5)
        assert norms["weight_gradients", "0", step] < 1.1e-3


@pytest.mark.parametrize("kind", ["weight_gradients_unclipped", "weight_micro_gradients"])
def test_gradients_of_a_backward_alone_where_the_root_is_never_called(bus, kind):
    """From the second step on, also if nothing of the forward is wanted."""
    torch.manual_seed(2)
    model, expected = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), {}
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model, (kind,))
    for step in range(4):
        optimizer.zero_grad()
        model[1](model[0](torch.randn(4, 3)).tanh()).square().mean().backward()
        if step:
            expected |= {(kind, str(i), step): model[i].weight.grad.norm().item() for i in range(2)}
        optimizer.step()
    exporter.close()
    assert norms == pytest.approx(expected, rel=1e-6)


def test_gradients_before_clipping_of_optimizers_that_take_turns(bus):
    """Only those of the parameters whose optimizer steps, although the other ones have gradients."""
    torch.manual_seed(2)
    model, expected, shares = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), {}, []
    optimizers = sgd(model[0]), sgd(model[1])
    exporter, norms = recorded(bus, model, ("weight_gradients", "weight_gradients_unclipped"))
    bus.register_subscriber(ClippingSubscriber(backend="null"))
    bus.register_subscriber(
        CallbackSubscriber("clipped_share", lambda message: shares.append(message.data), backend="null")
    )
    for step in range(6):
        part = step % 2
        optimizers[part].zero_grad()
        model(torch.randn(4, 2)).mean().backward()
        expected["weight_gradients_unclipped", str(part), step] = model[part].weight.grad.norm().item()
        optimizers[part].step()
    exporter.close()
    found = {key: norm for key, norm in norms.items() if key[0] == "weight_gradients_unclipped"}
    assert found == pytest.approx(expected, rel=1e-6)
    assert set(shares) == {0.0}


@pytest.mark.parametrize("rules", [None, "default"])
def test_an_old_gradient_of_a_frozen_part(rules, tmp_path, caplog):
    """Nothing, once no optimizer has the part: it is the gradient of an earlier step."""
    torch.manual_seed(2)
    model, recording = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), RecordingBackend()
    options = {"every": 1, "backend": recording, "log_dir": tmp_path, "verbosity": 0}
    with ikkuna.watch(model, GlobalNormSubscriber(), ClippingSubscriber(), rules=rules, **options):
        optimizer, expected = sgd(model), []
        for step in range(8):
            if step == 4:
                model[0].requires_grad_(False)
                optimizer = sgd(model[2])
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            trained = [p.grad for p in model.parameters() if p.requires_grad]
            expected.append(joint(trained))
            optimizer.step()
    assert model[0].weight.grad is not None
    for kind in ("gradients_global_norm", "gradient_norm_unclipped"):
        assert [v for series, v, _ in recording.values if series.kind == kind] == pytest.approx(expected, rel=1e-6)
    assert "get gradients" not in caplog.text


def test_unclipped_gradients_beside_micro_batches(bus, model):
    """all micro-batches, also for metrics that keep values from one to the next, such as the noise scale"""
    recording = RecordingBackend()
    optimizer = sgd(model)
    exporter, norms = recorded(bus, model, ("weight_gradients_unclipped",))
    bus.register_subscriber(GradientNoiseScaleSubscriber(backend=recording))
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        for x in BATCHES:
            model(x + torch.randn(2, 3)).pow(2).sum().backward()
        expected.append(model[0].weight.grad.norm().item())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    exporter.close()
    got = [norms["weight_gradients_unclipped", "0", step] for step in range(2)]
    assert got == pytest.approx(expected, rel=1e-6)
    assert {step for series, _, step in recording.values if series.kind == "gradient_noise_scale"} == {0, 1}


@pytest.mark.fault(203)
def test_a_weight_that_changes_its_shape(bus, model):
    """the new shape from the next step on; no autograd node of the old one is kept, which would make the backward raise"""
    exporter, norms = recorded(bus, model, ("layer_gradients", "weight_gradients", "weight_micro_gradients"))
    expected = {}
    for step in range(3):
        optimizer = sgd(model)
        optimizer.zero_grad()
        backward(model)
        expected[step] = model[2].weight.grad.norm().item()
        optimizer.step()
        model[2].weight.data = torch.randn(3 + step, 4)
        model[2].bias.data = torch.randn(3 + step)
        model[2].weight.grad = model[2].bias.grad = None
    exporter.close()
    gradients = {step: norm for (kind, name, step), norm in norms.items() if (kind, name) == ("weight_gradients", "2")}
    assert gradients == pytest.approx(expected, rel=1e-6)
    assert {step for kind, name, step in norms if (kind, name) == ("weight_micro_gradients", "2")} == {0, 1, 2}


def test_a_pass_after_a_skipped_step(bus, model):
    """the pass under its own name, and the skipped step afterwards"""
    recording, skipped = RecordingBackend(), []
    exporter, _ = recorded(bus, model)
    bus.register_subscriber(NormSubscriber("network_output", tag="testing", backend=recording))
    bus.register_subscriber(CallbackSubscriber("batch_finished", lambda m: skipped.append(m.skipped), backend="null"))
    optimizer = sgd(model)
    backward(model)  # a gradient scaler makes no step of it
    optimizer.zero_grad()
    exporter.evaluate([torch.ones(2, 3), torch.zeros(2, 3)])
    expected = joint([model(torch.ones(2, 3)), model(torch.zeros(2, 3))])
    backward(model)
    optimizer.step()
    exporter.close()
    assert [value for _, value, _ in recording.values] == pytest.approx([expected], rel=1e-6)
    assert skipped == [True, False]
