"""A mistake of the whole network is named in the modules where it arises, as far as that can be measured."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.diagnosis import Judge, get_rules
from tests.diagnosis.rows import NETWORK


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def checked(rule, model, batch, loss=None, optimizer=None):
    """Return the finding of a check before the first step."""
    found = ikkuna.preflight(model, batch, loss or nn.CrossEntropyLoss(), optimizer)
    return next(finding for finding in found if finding.rule == rule)


def layers(*sizes, activation=nn.ReLU):
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*parts[:-1])


def pictures():
    return torch.randn(24, 12), torch.randint(0, 4, (24,))


# -- a signal that fades or grows


def test_a_signal_that_one_layer_loses_is_lost_in_this_layer():
    model = layers(12, 16, 16, 16, 4)
    model[4].weight.data.mul_(1e-6)
    found = checked("signal_lost", model, pictures())
    assert (found.module, found.modules) == ("4", ())
    assert "This layer is the first." in found.message


def test_a_signal_that_fades_with_each_layer_is_lost_in_all_of_them():
    model = layers(12, *[16] * 8, 4, activation=nn.Identity)
    for part in list(model)[
        2:-2:2
    ]:  # each adds a half, and multiplies by a tenth between the fourth and the twelfth part
        part.weight.data.copy_(torch.eye(16) * (0.1 if part in list(model)[4:14] else 1.0))
        part.bias.data.fill_(0.5 if part in list(model)[4:14] else 0.0)
    found = checked("signal_lost", model, pictures())
    assert found.modules[0] == "2"
    assert found.modules[-1] == "12"
    assert found.module in found.modules
    assert "it fades with each behind 2, up to 12." in found.message


def test_a_scale_that_one_layer_makes_is_that_of_this_layer():
    model = layers(12, 16, 16, 4)
    model[2].weight.data.mul_(400)
    found = checked("signal_scale", model, pictures())
    assert (found.module, found.modules) == ("2", ())


def test_a_scale_that_grows_with_each_layer_is_made_by_all_of_them():
    model = layers(12, 16, 16, 16, 16, 4)
    for part in list(model)[2:8:2]:
        part.weight.data.mul_(14)
    found = checked("signal_scale", model, pictures())
    assert found.module == "6"
    assert found.modules == ("2", "4", "6")  # the first layer does not double the scale of the inputs
    assert "No layer makes it alone" in found.message


# -- a first loss that is too high


@pytest.mark.parametrize("large", [("4",), ("0", "4"), ("0", "2", "4")])
def test_each_layer_with_weights_that_are_too_large_is_named(large):
    model = layers(128, 128, 128, 4, activation=nn.Tanh)
    for name in large:
        nn.init.normal_(model.get_submodule(name).weight)
    found = checked("loss_at_init", model, (torch.randn(64, 128), torch.randint(0, 4, (64,))))
    assert found.module == "4"
    assert found.modules == (large if len(large) > 1 else ())
    assert ("So are those of" in found.message) == (len(large) > 1)


# -- gradients that end


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return None


class Custom(nn.Module):
    def forward(self, x):
        return _Nothing.apply(x)


class Detaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x.detach() * self.scale


class Rounding(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize("module", [Custom(), Detaching(), Rounding()])
def test_a_gradient_ends_in_the_module_whose_inputs_get_none(module):
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), module, nn.ReLU(), nn.Linear(16, 4))
    found = checked("no_gradient", model, pictures())
    assert found.module == "2"
    assert "The gradient ends in 2" in found.message
    assert "in this module" in found.advice


def test_a_gradient_that_ends_between_modules_is_that_of_the_last_parameters_without_one():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.body(x).detach())

    found = checked("no_gradient", Between(), pictures())
    assert found.module == "body"
    assert "behind it" in found.advice


def test_a_module_with_one_input_that_needs_no_gradient_is_not_blamed():
    """The second layer gets a gradient by its first input."""

    class Gated(nn.Module):
        def forward(self, x, gate):
            return x * gate.detach().sigmoid()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate, self.both, self.head = nn.Linear(12, 16), nn.Linear(12, 16), Gated(), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.both(self.body(x), gate=self.gate(x)))

    assert checked("no_gradient", Two(), pictures()).module == "gate"


def test_without_a_trainable_parameter_the_last_layer_is_named():
    model = layers(12, 16, 4).requires_grad_(False)
    found = checked("no_gradient", model, pictures())
    assert found.module == "2"
    assert "not even those of the last layer, 2" in found.message


# -- dropout as a function


class Dropped(nn.Module):
    def __init__(self, inside=False):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)
        self.inner = Dropped() if inside else None

    def forward(self, x):
        return self.inner(x) if self.inner else self.second(F.dropout(self.first(x).relu(), 0.5))


@pytest.mark.parametrize(("inside", "module"), [(False, "first"), (True, "inner")])
def test_dropout_in_the_forward_of_the_model_is_behind_the_module_that_ended_last(inside, module):
    assert checked("random_output", Dropped(inside), pictures()).module == module


def test_dropout_of_the_inputs_has_no_module_before_it():
    class Inputs(Dropped):
        def forward(self, x):
            return self.second(self.first(F.dropout(x, 0.5)))

    assert checked("random_output", Inputs(), pictures()).module == "inputs"


# -- sums beside means


def test_a_sum_beside_a_mean_is_named_in_the_layer_that_it_is_of(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.made = nn.Linear(12, 6), nn.Linear(6, 12)

        def forward(self, x):
            code = self.code(x)
            return self.made(code), code

    model, x = Pair(), torch.randn(24, 12)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for _ in range(8):
            optimizer.zero_grad()
            made, code = model(x)
            (F.mse_loss(made, x) + code.square().sum()).backward()
            optimizer.step()
    assert {f.rule: f.module for f in exporter.findings}["mixed_reduction"] == "code"


# -- a decay that is all that changes a weight


def decaying(**ratios):
    (rule,) = get_rules("decay_dominates")
    judge = Judge([rule], NETWORK)
    for step in range(0, 100, 10):
        judge.add("optimizer_weight_decay", None, step, 10.0)
        judge.add("learning_rate", None, step, 1e-3)
        for name, ratio in ratios.items():
            judge.add("weight_updates_weights_ratio", name, step, ratio)
        judge.finish_step(step)
    (found,) = judge.findings
    return found


def test_a_weight_that_only_decays_is_named():
    found = decaying(fc0=0.01, fc1=0.01, head=0.013)
    assert found.modules == ("fc0", "fc1")
    assert "requires_grad_(False)" in found.advice


@pytest.mark.parametrize("ratios", [(0.012, 0.011, 0.013), (0.01, 0.01, 0.01)])
def test_a_decay_of_all_weights_is_one_of_the_network(ratios):
    found = decaying(**dict(zip(("fc0", "fc1", "head"), ratios, strict=True)))
    assert found.module is None
    assert "lower the weight decay" in found.advice
