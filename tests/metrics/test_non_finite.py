"""The producer of the first NaN or Inf is named, and not those that pass it on."""

import math
import random

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NonFiniteSubscriber
from ikkuna.testing import RecordingBackend
from tests import seeds
from tests.metrics.running import curves

DEPTH = 12


class Fault(torch.autograd.Function):
    """Passes on what it is given, but for one element, in one direction."""

    @staticmethod
    def forward(ctx, x, value, direction):
        ctx.value, ctx.direction = value, direction
        return spoilt(x, value) if direction == "forward" else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (spoilt(grad, ctx.value) if ctx.direction == "backward" else grad), None, None


def spoilt(x, value):
    x = x.clone()
    x.view(-1)[0] = value
    return x


class Layer(nn.Module):
    """A linear layer that may have a fault."""

    def __init__(self, width, residual):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.residual = residual
        self.fault = nn.Identity()

    def forward(self, x):
        y = self.fault(torch.tanh(self.linear(x)))
        return x + y if self.residual else y


class Faulty(nn.Module):
    def __init__(self, value, direction):
        super().__init__()
        self.value, self.direction = value, direction
        self.on = False

    def forward(self, x):
        return Fault.apply(x, self.value, self.direction) if self.on else x.clone()


class LogOfNegative(nn.Module):
    def forward(self, x):
        return torch.log(-x.abs())


def network(draw):
    width = draw.randint(3, 9)
    return nn.Sequential(*(Layer(width, draw.random() < 0.5) for _ in range(DEPTH))), width


def trained(model, width, steps=3, before=lambda step: None, before_step=None, step_of=None, compiled=False, **options):
    """Train; return what was named, (name, step), and how many tensors were not finite in each step."""
    recording, loss = RecordingBackend(), options.pop("loss", nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(call)
        exporter.set_loss(loss)
        exporter.message_bus.register_subscriber(NonFiniteSubscriber(backend=recording, **options))
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, width, generator=generator)
            changed = before(step)
            x = x if changed is None else changed
            loss(call(x), torch.zeros(4, width)).backward()
            if before_step is not None:
                before_step(step)
            (step_of or optimizer.step)()
    named = [(s.name, step) for s, value, step in recording.values if s.kind == "nonfinite_producer" and value == 1.0]
    return named, curves(recording)["nonfinite_tensors", None], recording


def seeded(seed):
    """Return what draws the network; the seed is part of the test's name."""
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize("seed", seeds.drawn(4))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_layer_that_makes_one_is_named(seed, direction, caplog):
    draw = seeded(seed)
    model, width = network(draw)
    place, value = draw.randrange(DEPTH), draw.choice([math.nan, math.inf, -math.inf])
    model[place].fault = fault = Faulty(value, direction)

    def before(step):
        fault.on = step == 1

    named, counts, _ = trained(model, width, before=before)
    assert named == [(f"{place}.fault", 1)]
    assert counts[0] == 0
    assert counts[1] > 1, "it was passed on"
    assert caplog.text.count("the first NaN or Inf was produced by") == 1
    assert f"step 1: the first NaN or Inf was produced by the {direction} pass of '{place}.fault'" in caplog.text


def test_in_a_compiled_model_as_well():
    torch.compiler.reset()
    model, width = network(seeded(1))
    model[7].fault = LogOfNegative()
    assert trained(model, width, compiled=True, steps=2)[0] == [("7.fault", 0)]
    torch.compiler.reset()


@pytest.fixture
def measured(monkeypatch):
    """The steps in which the order of the calls was observed."""
    steps, measure = set(), NonFiniteSubscriber.measure

    def noting(self, message):
        steps.add(message.global_step)
        return measure(self, message)

    monkeypatch.setattr(NonFiniteSubscriber, "measure", noting)
    return steps


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_is_named_long_after_the_order_was_learned(direction, measured):
    """The plan of step 1 is made before step 0 is delivered; from step 2 on shared statistics are enough."""
    model, width = network(seeded(8))
    model[6].fault = fault = Faulty(math.nan, direction)

    def before(step):
        fault.on = step == 5

    named, counts, _ = trained(model, width, 7, before)
    assert named == [("6.fault", 5)]
    assert not any(counts[:5])
    assert measured == {0, 1}


class LogOfBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sign", torch.ones(()))

    def forward(self, x):
        return x + torch.log(self.sign)


def test_one_is_named_in_a_compiled_model_after_the_order_was_learned(measured):
    torch.compiler.reset()
    model, width = network(seeded(1))
    model[7].fault = LogOfBuffer()

    def before(step):
        model[7].fault.sign.fill_(-1.0 if step == 4 else 1.0)

    assert trained(model, width, 5, before, compiled=True)[0] == [("7.fault", 4)]
    assert measured == {0, 1}
    torch.compiler.reset()


class Growing(nn.Module):
    """Has a second branch from step 3 on, and a third from step 5 on."""

    def __init__(self):
        super().__init__()
        self.step, self.first, self.second = 0, nn.Linear(4, 4), nn.Linear(4, 4)
        self.third = nn.Sequential(nn.Linear(4, 4), LogOfNegative())

    def forward(self, x):
        x = self.first(x)
        x = self.second(x) if self.step >= 3 else x
        return self.third(x) if self.step >= 5 else x


def test_one_is_named_in_a_module_that_is_new_in_this_step():
    model = Growing()

    def before(step):
        model.step = step

    assert trained(model, 4, 6, before)[0] == [("third.1", 5)]


def test_of_tensors_that_occur_several_times_the_first_one_that_is_not_finite_counts():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.between = nn.Linear(4, 4), Faulty(math.nan, "forward")

        def forward(self, x):
            return self.shared(self.between(self.shared(x)))

    model = Shared()

    def before(step):
        model.between.on = step == 4

    assert trained(model, 4, 5, before)[0] == [("between", 4)]


@pytest.mark.parametrize("seed", seeds.drawn(3))
def test_a_weight_that_was_set_to_nan_is_named(seed, caplog):
    draw = seeded(seed)
    model, width = network(draw)
    place = draw.randrange(DEPTH)

    def before(step):
        if step == 2:
            with torch.no_grad():
                model[place].linear.weight.view(-1)[0] = math.nan

    named, counts, _ = trained(model, width, 4, before)
    assert named == [(f"{place}.linear", 2)]
    assert counts[:2] == [0, 0]
    assert f"NaN or Inf already present when this step began: weights of '{place}.linear'" in caplog.text


def test_weights_that_broke_between_two_sampled_steps_are_said_to_have_changed_after_the_first_one(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def before_step(step):
        if step == 1:
            model[1].weight.grad.fill_(math.inf)

    [(_, step)], _, _ = trained(model, 3, 6, before_step=before_step, subsample=4)
    assert step == 4
    assert "(changed after step 0, the last one that was sampled before;" in caplog.text


def test_data_is_named(caplog):
    model, width = network(seeded(0))
    named, _, _ = trained(model, width, before=lambda step: torch.full((4, width), math.nan) if step else None)
    assert named == [(None, 1)]
    assert "produced by the input data" in caplog.text


def test_a_function_between_modules_is_not_a_module(caplog):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.other(torch.log(-self.one(x).abs()))

    named, _, _ = trained(Between(), 5, 1)
    assert named == [("other", 0)]
    assert "produced by an operation outside all modules, between 'one' and the call of 'other'" in caplog.text


def test_a_loss_is_named(caplog):
    class Loss(nn.Module):
        def forward(self, output, target):
            return (output - output.detach()).sum() / 0.0

    named, _, _ = trained(*network(seeded(0)), 1, loss=Loss())
    assert named == [(None, 0)]
    assert "produced by the loss function" in caplog.text


def test_the_backward_pass_of_a_loss_is_distinguished_from_that_of_a_layer(caplog):
    class Loss(nn.Module):
        def forward(self, output, target):
            return (output - output.detach()).abs().sqrt().sum()

    named, _, _ = trained(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 3, 1, loss=Loss())
    assert named == [("1", 0)]
    assert "produced by the backward pass of the loss, or of an operation after '1'" in caplog.text


def test_a_gradient_of_a_parameter_alone(caplog):
    """The tensors of later layers are finite: only the weight's own gradient overflows."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.register_hook(lambda grad: grad * math.inf)
    named, _, _ = trained(model, 3, 1)
    assert named == [("1", 0)]
    assert "produced by the backward pass of '1', in the gradient of its parameter" in caplog.text


def test_a_sum_of_gradients_that_overflows_is_no_forward_pass(caplog):
    """Each of the two gradients of the weight is finite, and so is everything else."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.register_hook(lambda grad: torch.full_like(grad, 3e38))

    def accumulate(step):
        nn.functional.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 3)).backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(posinf=0.0)  # as a loop that throws infinite gradients away

    named, _, _ = trained(model, 3, 1, before_step=accumulate)
    assert named == [("1", 0)]
    assert "produced by the backward pass of '1', in the gradient of its parameter" in caplog.text


def test_parameters_are_not_measured_one_by_one():
    """Only what is called has an order of its own."""
    metric = NonFiniteSubscriber()
    seen, measure = set(), metric.measure
    metric.measure = lambda message: (seen.add(message.kind), measure(message))[1]
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(metric)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert seen == {"input_data", "layer_inputs", "activations", "layer_gradients", "loss"}


def test_clipping_is_named_where_it_is_to_blame(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def clip(step):
        for parameter in model.parameters():
            parameter.grad.mul_(math.nan if step == 1 else 1.0)

    named, _, _ = trained(model, 3, before_step=clip)
    assert named == [("0", 1)]
    assert "accumulation, unscaling or clipping of the gradients, at weight_gradients of '0'" in caplog.text


def test_an_optimizer_is_named(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            model[2].bias.div_(0.0)

    optimizer = Broken(model.parameters(), lr=0.1)
    named, _, _ = trained(model, 3, 2, step_of=lambda: optimizer.step())
    assert named == [("2", 0)]
    assert "produced by the optimizer, in its step of bias_updates of '2'" in caplog.text


def test_after_a_finite_step_another_can_be_named():
    model, width = network(seeded(3))
    model[2].fault, model[9].fault = Faulty(math.nan, "forward"), Faulty(math.inf, "forward")
    spare = [p.detach().clone() for p in model.parameters()]

    def before(step):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), spare, strict=True):
                parameter.copy_(value)
        model[2].fault.on, model[9].fault.on = step in (1, 2), step == 4

    assert trained(model, width, 6, before)[0] == [("2.fault", 1), ("9.fault", 4)]


def test_a_gradient_scaler_that_searches_a_scale_has_no_producer(caplog):
    recording, model = RecordingBackend(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        exporter.message_bus.register_subscriber(NonFiniteSubscriber(backend=recording))
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss(model(1e3 * torch.ones(2, 3)), torch.zeros(2, 1))).backward()
            scaler.step(optimizer)
            scaler.update()
    found = curves(recording)
    assert any(found["nonfinite_tensors", None])
    assert not [name for kind, name in found if kind == "nonfinite_producer"]
    assert not caplog.text


def test_the_text_is_shown_and_the_flag_can_be_subscribed_to():
    from ikkuna.export.subscriber import MessageMeanSubscriber

    model, width = network(seeded(5))
    model[4].fault = fault = Faulty(math.nan, "forward")
    fault.on = True
    _, _, recording = trained(model, width, 1)
    [(_, text, _)] = recording.texts
    assert text == "Step 0: the first NaN or Inf was produced by the forward pass of '4.fault'."
    bus = MessageBus()
    bus.register_subscriber(NonFiniteSubscriber(backend="null"))
    bus.register_subscriber(MessageMeanSubscriber("nonfinite_producer", backend="null"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_finiteness_of_every_dtype(dtype):
    from ikkuna.numerics.elements import all_finite

    for value in (math.nan, math.inf, -math.inf):
        x = torch.ones(3, 4, dtype=dtype)
        assert all_finite(x).item() is True
        assert all_finite(spoilt(x, value)).item() is False
    assert all_finite(torch.empty(0, dtype=dtype)).item() is True
    assert all_finite(torch.ones(2, dtype=dtype, device="meta")) is None
