"""Each check before the first step finds its planted mistake and nothing else, and leaves the model as it was."""

import copy
import math
import random
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ikkuna
from ikkuna.diagnosis import mistakes
from ikkuna.diagnosis.findings import Findings
from ikkuna.errors import ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.store.finding import Finding
from ikkuna.testing import RecordingBackend
from tests.diagnosis import healthy_timm
from tests.diagnosis.healthy_models import CASES, LanguageModel, Transformer, images, resnet, stack, tokens, vectors
from tests.diagnosis.healthy_transformers import CASES as TRANSFORMERS
from tests.diagnosis.test_exact_tests import FAULTS

MISTAKES = {}


def mistake(*expected):
    """Register a function that returns the arguments of a preflight, which must find `expected` and nothing else."""

    def register(function):
        MISTAKES[function.__name__] = (function, list(expected))
        return function

    return register


def classifier(batch=None, loss=None, optimizer=True, **options):
    model = stack([20, 64, 64, 10], **options)
    optimizer = torch.optim.Adam(model.parameters()) if optimizer is True else optimizer
    return model, vectors() if batch is None else batch, nn.CrossEntropyLoss() if loss is None else loss, optimizer


def with_optimizer(model, batch, loss):
    return model, batch, loss, torch.optim.Adam(model.parameters())


# -- the optimizer


@mistake(("not_in_optimizer", "error", "2"))
def one_layer_in_no_optimizer():
    model, batch, loss, _ = classifier()
    return model, batch, loss, torch.optim.Adam([*model[0].parameters(), *model[4].parameters()])


@mistake(("not_in_optimizer", "error", None))
def optimizer_of_a_copy():
    model, batch, loss, optimizer = classifier()
    return copy.deepcopy(model), batch, loss, optimizer


@mistake(("not_in_optimizer", "error", "margin"))
def trainable_parameter_of_the_loss():
    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, labels):
            return functional.cross_entropy(self.scale * output, labels)

    return classifier(loss=Margin())


@mistake(("parameter_in_two_groups", "warning", "4"))
def two_optimizers_of_one_layer():
    model, batch, loss, optimizer = classifier()
    return model, batch, loss, [optimizer, torch.optim.SGD(model[4].parameters(), 0.1)]


class Listed(nn.Module):
    """A model with layers in a list, and with a parameter that it gets from outside."""

    def __init__(self, layers, prompt=None):
        super().__init__()
        self.layers, self.head = layers, nn.Linear(64, 10)
        self.read = lambda x: x if prompt is None else x + prompt

    def forward(self, x):
        x = self.read(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@mistake(("unregistered_parameters", "error", "layers"))
def layers_in_a_plain_list():
    return with_optimizer(Listed([nn.Linear(20, 64), nn.ReLU()]), vectors(), nn.CrossEntropyLoss())


@mistake(("unregistered_parameters", "error", "head"))
def layer_that_is_created_in_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(20, 64)

        def forward(self, x):
            torch.manual_seed(0)
            self.head = nn.Linear(64, 10)
            return self.head(self.body(x).relu())

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


def test_parameters_of_an_optimizer_need_no_registration():
    prompt = nn.Parameter(torch.zeros(20))
    model = Listed(nn.ModuleList([nn.Linear(20, 64), nn.ReLU()]), prompt)
    for owned, expected in (([prompt], []), ([], ["unregistered_parameters"])):
        optimizer = torch.optim.Adam([*model.parameters(), *owned])
        found = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), optimizer)
        assert [(f.rule, f.module) for f in found] == [(rule, None) for rule in expected]


@mistake(("running_statistics_fixed", "warning", "1"))
def momentum_of_zero_in_a_batch_norm():
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64, momentum=0.0), nn.ReLU(), nn.Linear(64, 10))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("statistics_of_last_batches", "warning", "1"))
def momentum_of_another_library():
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64, momentum=0.99), nn.ReLU(), nn.Linear(64, 10))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@pytest.mark.parametrize("momentum", [None, 0.1, 0.5])
def test_statistics_that_move_and_those_that_are_frozen_are_right(momentum):
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64, momentum=momentum), nn.ReLU(), nn.Linear(64, 10))
    assert not ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss())
    model[1].momentum = 0.0
    model[1].eval().requires_grad_(False)
    assert not ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 3)

    def forward(self, x):
        return self.head((self.embedding(x) * (x != 0).unsqueeze(2)).sum(1))


@mistake(("padding_inside", "warning", "embedding"))
def padding_index_that_is_a_word():
    x = torch.randint(1, 50, (16, 12))
    x[3:, 5] = 0
    return with_optimizer(Words(), (x, torch.randint(3, (16,))), nn.CrossEntropyLoss())


@pytest.mark.parametrize("side", [slice(0, 4), slice(-4, None)])
def test_padding_at_an_end_is_right(side):
    x = torch.randint(1, 50, (16, 12))
    x[3:, side] = 0
    x[5] = 0
    found = ikkuna.preflight(Words(), (x, torch.randint(3, (16,))), nn.CrossEntropyLoss())
    assert "padding_inside" not in {f.rule for f in found}


@mistake(("labels_out_of_reach", "warning", "1"))
def softmax_for_several_labels():
    model = nn.Sequential(stack([20, 64, 5]), nn.Softmax(1))
    return with_optimizer(model, (torch.randn(32, 20), torch.rand(32, 5).round()), nn.BCELoss())


def test_a_softmax_reaches_labels_that_are_a_distribution():
    model, y = nn.Sequential(stack([20, 64, 5]), nn.Softmax(1)), torch.rand(32, 5).softmax(1)
    for labels in (y, functional.one_hot(y.argmax(1), 5).float()):
        assert not ikkuna.preflight(model, (torch.randn(32, 20), labels), nn.BCELoss())


@mistake(("learning_rate_zero", "error", "0"))
def learning_rate_of_zero_for_a_group():
    model, batch, loss, _ = classifier()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2:].parameters()}]
    return model, batch, loss, torch.optim.Adam(groups)


@mistake(("frozen_in_optimizer", "info", "0"))
def frozen_layer_in_the_optimizer():
    model, batch, loss, optimizer = classifier()
    model[0].requires_grad_(False)
    return model, batch, loss, optimizer


@mistake(("frozen_output_layer", "warning", "4"))
def new_output_layer_that_was_frozen_with_the_body():
    model, batch, loss, _ = classifier()
    model.requires_grad_(False)[0].bias.requires_grad_(True)
    return model, batch, loss, torch.optim.Adam(p for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("prepare", ["of_its_own_optimizer", "loaded", "of_another_distribution", "the_only_layer"])
def test_an_output_layer_may_be_frozen(prepare):
    model, batch, loss, _ = classifier()
    head, body = model[4], model[:4]
    head.requires_grad_(False)
    optimizers = [torch.optim.Adam(body.parameters())]
    if prepare == "of_its_own_optimizer":  # as a discriminator while the generator trains
        optimizers.append(torch.optim.Adam(head.parameters()))
    elif prepare == "loaded":
        head.weight.data += 0.02 * torch.randn_like(head.weight)
    elif prepare == "of_another_distribution":
        nn.init.normal_(head.weight, std=0.02)
    else:
        body.requires_grad_(False)
    found = {finding.rule for finding in ikkuna.preflight(model, batch, loss, optimizers)}
    assert "frozen_output_layer" not in found


# -- the model


@mistake(("evaluation_mode", "warning", None))
def whole_model_in_evaluation_mode():
    model, *rest = classifier(dropout=0.1)
    return model.eval(), *rest


@mistake(("evaluation_mode", "warning", "1.body.0.1"))
def part_of_the_model_in_evaluation_mode():
    model = resnet(False)
    model[1].eval()
    return with_optimizer(model, images(), nn.CrossEntropyLoss())


@mistake(("untied_weights", "error", "head"))
def tied_weights_that_a_copy_has_separated():
    model = Transformer(causal=True, norm_first=True, tied=True)
    model.head = copy.deepcopy(model.head)
    x = torch.randint(50, (8, 13))
    return with_optimizer(model, (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss())


@mistake(("untied_weights", "error", "lm_head"))
def tied_weights_of_transformers_that_differ():
    model, batch = TRANSFORMERS["gpt2"]()
    model.lm_head.weight = nn.Parameter(0.02 * torch.randn_like(model.lm_head.weight))
    return with_optimizer(model, batch, None)


@mistake(("identical_units", "error", "2"))
def constant_weights():
    model, *rest = classifier()
    nn.init.constant_(model[2].weight, 0.01)
    return model, *rest


@mistake(("nonfinite", "error", "2"))
def parameter_with_nan():
    model, *rest = classifier()
    model[2].weight.detach()[0, 0] = math.nan
    return model, *rest


# -- the batch


@mistake(("input_scale", "info", None))
def raw_pixels():
    x, y = images()
    return with_optimizer(resnet(False), (x * 60 + 120, y), nn.CrossEntropyLoss())


@mistake(("target_scale", "info", None))
def targets_that_are_not_normalised():
    x, _ = vectors()
    return with_optimizer(stack([20, 64, 1]), (x, 50 + 30 * torch.randn(32, 1)), nn.L1Loss())


@mistake(("nonfinite", "error", None))
def input_with_infinity():
    x, y = vectors()
    x[3, 3] = math.inf
    return classifier((x, y))


@mistake(("first_step_runs", "error", "embedding"))
def token_outside_of_the_vocabulary():
    x, y = tokens()
    x[0, 0] = 50
    return with_optimizer(Transformer(), (x, y), nn.CrossEntropyLoss())


@mistake(("first_step_runs", "error", "0"))
def inputs_in_double_precision():
    x, y = vectors()
    return classifier((x.double(), y))


@mistake(("label_range", "error", None))
def labels_from_one():
    x, y = vectors()
    return classifier((x, (y % 9 + 1).index_fill(0, torch.tensor([0]), 10)))


@mistake(("label_range", "error", None))
def negative_labels_of_a_model_that_computes_its_loss():
    model, batch = TRANSFORMERS["bert_tags"]()
    batch["labels"][0, 0] = -1
    return with_optimizer(model, batch, None)


@mistake(("label_dtype", "error", None))
def labels_as_floats():
    x, y = vectors()
    return classifier((x, y.float()))


@mistake(("label_dtype", "error", None))
def labels_as_integers_for_a_regression():
    model = stack([20, 64, 1])
    return with_optimizer(model, (torch.randn(32, 20), torch.randint(2, (32, 1))), nn.BCEWithLogitsLoss())


@mistake(("label_shape", "error", None))
def labels_as_a_column():
    x, y = vectors()
    return classifier((x, y.unsqueeze(-1)))


@mistake(("label_shape", "error", None))
def broadcast_in_the_squared_error():
    return with_optimizer(stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32)), nn.MSELoss())


@mistake(("label_shape", "error", None))
def broadcast_in_a_loss_by_hand():
    loss = lambda output, labels: (output - labels).square().mean()  # noqa: E731
    return with_optimizer(stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32)), loss)


@mistake(("label_shape", "error", None))
def broadcast_of_outputs_that_are_all_zero():
    loss = lambda output, labels: (output - labels).square().mean()  # noqa: E731
    model = stack([20, 64, 1])
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return with_optimizer(model, (torch.randn(32, 20), torch.randn(32)), loss)


@pytest.mark.parametrize(("bias", "number"), [(False, "1 parameter"), (True, "2 parameters")])
def test_the_parameters_behind_a_cut_are_counted(bias, number):
    model = nn.ModuleDict({"first": nn.Linear(4, 4, bias=bias), "last": nn.Linear(4, 1)})

    def objective(model, x):
        return model["last"](model["first"](x).detach()).square().mean()

    [found] = [
        each for each in ikkuna.preflight(model, torch.randn(8, 4), objective=objective) if each.rule == "no_gradient"
    ]
    assert f"depends on {number} without a gradient, the last one in first." in found.message


def test_labels_that_only_scale_the_loss_are_not_broadcast():
    """The loss is divided by the number of objects, which a changed label changes."""

    def loss(output, labels):
        chances, objects = output.sigmoid()[:, 0], labels.eq(1).float()
        right, wrong = objects * (1 - chances).square() * chances.log(), (1 - objects) * (1 - chances).log()
        return -(right + (1 - labels).pow(4) * chances.square() * wrong).sum() / objects.sum()

    torch.manual_seed(0)
    model, labels = nn.Conv2d(1, 1, 3, padding=1), 0.9 * torch.rand(8, 6, 6)
    labels[:, 3, 3], labels[0, 0, 0] = 1.0, 0.0
    assert not ikkuna.preflight(model, (torch.randn(8, 1, 6, 6), labels), loss, torch.optim.Adam(model.parameters()))


# -- the loss


@mistake(("softmax_twice", "error", "1"))
def softmax_before_cross_entropy():
    model = nn.Sequential(stack([20, 64, 10]), nn.Softmax(-1))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("softmax_twice", "error", None))
def functional_softmax_before_cross_entropy_by_hand():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([20, 64, 10])

        def forward(self, x):
            return functional.softmax(self.net(x), -1)

    return with_optimizer(Model(), vectors(), lambda output, labels: functional.cross_entropy(output, labels))


@mistake(("softmax_twice", "info", None))
def log_softmax_before_cross_entropy():
    model = nn.Sequential(stack([20, 64, 10]), nn.LogSoftmax(-1))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("no_log_softmax", "error", None))
def scores_for_a_loss_of_log_probabilities():
    return classifier(loss=nn.NLLLoss())


@mistake(("sigmoid_twice", "error", "1"))
def sigmoid_twice():
    model = nn.Sequential(stack([20, 64, 5]), nn.Sigmoid())
    return with_optimizer(model, (torch.randn(32, 20), torch.rand(32, 5).round()), nn.BCEWithLogitsLoss())


@mistake(("activation_before_loss", "warning", "1"))
def relu_after_the_last_layer():
    model = nn.Sequential(stack([20, 64, 10]), nn.ReLU())
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


def summed_classes(make):
    model, batch, *_ = classifier()
    return model, batch, nn.CrossEntropyLoss(reduction="sum"), make(model.parameters())


@mistake(("loss_scale", "warning", None))
def sum_in_place_of_the_mean():
    return summed_classes(lambda parameters: torch.optim.SGD(parameters, 0.5))


@mistake(("loss_scale", "info", None))
def sum_with_a_rate_for_sums():
    return summed_classes(lambda parameters: torch.optim.SGD(parameters, 0.5 / 32, momentum=0.9))


@mistake(("loss_scale", "info", None))
def sum_with_an_optimizer_that_ignores_the_scale():
    return summed_classes(torch.optim.Adam)


@mistake(("loss_scale", "warning", None))
def sum_of_squares_by_hand():
    loss = lambda output, labels: (output - labels).square().sum()  # noqa: E731
    model = stack([20, 64, 3])
    return model, (torch.randn(32, 20), torch.randn(32, 3)), loss, torch.optim.SGD(model.parameters(), 0.1)


@mistake(("first_step_runs", "error", None))
def loss_of_each_sample():
    return classifier(loss=nn.CrossEntropyLoss(reduction="none"))


@mistake(("no_activation", "warning", "1"))
def activation_with_a_slope_of_one():
    model = nn.Sequential(nn.Linear(20, 64), nn.LeakyReLU(True), nn.Linear(64, 10))
    return model, vectors(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)


@mistake(("loss_at_init", "warning", "4"))
def large_weights_in_the_last_layer():
    model, *rest = classifier()
    with torch.no_grad():
        model[4].weight.mul_(30)
    return model, *rest


@mistake(("nonfinite", "error", None))
def labels_that_are_all_ignored():
    x, y = vectors()
    return classifier((x, torch.full_like(y, -100)))


# -- signal and gradient


@mistake(("dead_units", "error", "1"))
def biases_far_below_zero():
    model, *rest = classifier(norm=None)
    model[0].bias.detach()[:63] = -30.0
    return model, *rest


@mistake(("dead_units", "error", "hidden"))
def functional_rectifier_with_dead_units():
    class Hidden(nn.Linear):
        def forward(self, x):
            return functional.relu(super().forward(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = Hidden(20, 64), nn.Linear(64, 10)
            self.hidden.bias.detach()[:62] = -30.0

        def forward(self, x):
            return self.head(self.hidden(x))

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


@mistake(("signal_lost", "error", "6"))
def small_weights():
    model = stack([20, *[64] * 5, 10], nn.Tanh)
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(0.1)
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


class NearestCode(nn.Module):
    """Replaces each row by one of two codes, the first of which is the nearest of all; gradients pass by."""

    def forward(self, x):
        codes = torch.stack([torch.zeros_like(x[0]), torch.full_like(x[0], 1e4)])
        return x + (codes[torch.cdist(x, codes).argmin(1)] - x).detach()


class Gone(NearestCode):
    """Replaces each row by the same one, and gradients do not pass."""

    def forward(self, x):
        return super().forward(x).detach() + 0 * x


@mistake(("signal_lost", "info", "2"))
def one_code_for_all_rows_with_gradients_that_pass():
    return with_optimizer(
        nn.Sequential(nn.Linear(20, 8), NearestCode(), nn.Linear(8, 10)), vectors(), nn.CrossEntropyLoss()
    )


@mistake(("signal_lost", "error", "2"))
def one_code_for_all_rows_without_gradients():
    return with_optimizer(nn.Sequential(nn.Linear(20, 8), Gone(), nn.Linear(8, 10)), vectors(), nn.CrossEntropyLoss())


@mistake(("signal_scale", "warning", "2"))
def large_weights():
    model, *rest = classifier()
    with torch.no_grad():
        model[2].weight.mul_(200)
    return model, *rest


@mistake(("vanishing_gradient", "warning", "1"))
def gradients_that_vanish():
    class Damping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 0.01 * gradient

    class Damped(nn.Module):
        def forward(self, x):
            return Damping.apply(x)

    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), Damped())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 32), *layers, nn.Linear(32, 10))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("exploding_gradient", "warning", "0"))
def gradients_that_explode():
    model = stack([20, *[64] * 16, 10], nn.Tanh)
    with torch.no_grad():
        for layer in model[:-1:2]:
            layer.weight.mul_(30)
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("signal_lost", "error", "11"))
def sigmoids_of_many_layers():
    model = nn.Sequential(nn.Flatten(), *stack([20, *[64] * 12, 10], nn.Sigmoid))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("input_scale", "warning", None))
def raw_pixels_without_a_normalisation():
    model = nn.Sequential(nn.Flatten(), stack([192, 64, 10]))
    x, y = images(size=8)
    return with_optimizer(model, (x * 60 + 120, y), nn.CrossEntropyLoss())


@mistake(("no_gradient", "error", "1"))
def detached_layer():
    class Detach(nn.Module):
        def forward(self, x):
            return x.detach()

    model, batch, loss, _ = classifier()
    model.insert(1, Detach())
    return with_optimizer(model, batch, loss)


@mistake(("no_gradient", "error", "inner.1.1"))
def branch_without_autograd_behind_a_normalisation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(20), nn.LSTM(20, 20, batch_first=True)) for _ in range(2)
            )
            self.other, self.head = nn.Linear(20, 20), nn.Linear(20, 10)

        def forward(self, x):
            h = x.unsqueeze(1)
            with torch.no_grad():
                for layer in self.inner:
                    h = h + layer(h)[0]
            return self.head(self.other(x) + h[:, 0])

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


@mistake(("no_gradient", "info", "extra"))
def layer_that_the_loss_does_not_use():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.extra = stack([20, 64, 10]), nn.Linear(20, 5)

        def forward(self, x):
            return self.head(x), self.extra(x)

    loss = lambda output, labels: functional.cross_entropy(output[0], labels)  # noqa: E731
    return with_optimizer(Model(), vectors(), loss)


@mistake(("no_gradient", "error", "4"), ("frozen_in_optimizer", "info", None))
def everything_frozen():
    model, *rest = classifier()
    return model.requires_grad_(False), *rest


@mistake(("no_gradient", "error", None))
def loss_without_a_gradient():
    loss = lambda output, labels: functional.cross_entropy(output.detach(), labels)  # noqa: E731
    return classifier(loss=loss)


@mistake(("zero_gradient", "error", "2"))
def two_layers_of_zeros():
    model, *rest = classifier()
    for layer in (model[2], model[4]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model, *rest


@mistake(("zero_gradient", "error", "adapter.0"))
def an_adapter_of_zeros():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.adapter = nn.Sequential(nn.Linear(20, 4, bias=False), nn.Linear(4, 20, bias=False))
            self.net = stack([20, 64, 10])

        def forward(self, x):
            return self.net(x + self.adapter(x))

    model, *rest = with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())
    for layer in model.adapter:
        nn.init.zeros_(layer.weight)
    return model, *rest


@mistake(("duplicate_rows", "warning", None))
def one_row_with_many_labels():
    x, y = vectors()
    return classifier((x[:1].expand_as(x).clone(), y))


# -- what the output depends on


@mistake(("ignores_input", "error", None))
def input_multiplied_by_zero():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([20, 64, 10])

        def forward(self, x):
            return self.net(x * 0)

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


@mistake(("batch_leak", "error", None))
def softmax_over_the_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.value, self.head = nn.Linear(20, 32), nn.Linear(20, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.gate(x).softmax(0) * self.value(x))

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


@mistake(("batch_leak", "error", "rnn"))
def reshape_in_place_of_transpose():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(50, 16), nn.GRU(16, 16), nn.Linear(16, 5)

        def forward(self, x):
            h = self.embedding(x).reshape(x.shape[1], x.shape[0], -1)  # mixes samples and positions
            return self.head(self.rnn(h)[0][-1])

    return with_optimizer(Model(), tokens(), nn.CrossEntropyLoss())


@mistake(("time_leak", "error", "encoder.layers.0.self_attn"))
def language_model_without_a_mask():
    class Model(Transformer):
        def forward(self, x):
            return self.head(self.encoder(self.embedding(x) + self.position)).flatten(0, 1)

    x = torch.randint(50, (8, 13))
    return with_optimizer(Model(causal=True), (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss())


@mistake(("time_leak", "error", "rnn"))
def bidirectional_language_model():
    model = LanguageModel()
    model.rnn, model.head = nn.LSTM(32, 32, batch_first=True, bidirectional=True), nn.Linear(64, 50)
    x = torch.randint(50, (8, 13))
    loss = lambda output, labels: functional.cross_entropy(output.transpose(1, 2), labels)  # noqa: E731
    return with_optimizer(model, (x[:, :-1], x[:, 1:]), loss)


@mistake(("random_output", "warning", "0"))
def functional_dropout_without_the_mode():
    class Layer(nn.Linear):
        def forward(self, x):
            return functional.dropout(super().forward(x), 0.2)

    model = nn.Sequential(Layer(20, 64), nn.ReLU(), nn.Linear(64, 10))
    return with_optimizer(model, vectors(), nn.CrossEntropyLoss())


@mistake(("random_output", "warning", "attention"))
def dropout_of_attention_without_the_mode():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.attention, self.head = nn.Embedding(50, 16), Attention(), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.attention(self.embedding(x)).mean(1))

    return with_optimizer(Model(), tokens(), nn.CrossEntropyLoss())


@mistake(("random_output", "info", None))
def model_that_samples_in_evaluation_mode():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.head = nn.Linear(20, 16), nn.Linear(16, 10)

        def forward(self, x):
            mean = self.mean(x)
            return self.head(mean + 0.1 * torch.randn_like(mean))

    return with_optimizer(Model(), vectors(), nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_nothing_else(name):
    make, expected = MISTAKES[name]
    found = ikkuna.preflight(*make())
    assert [(finding.rule, finding.severity, finding.module) for finding in found] == expected, str(found)
    assert all(finding.message.endswith(".") or finding.rule == "first_step_runs" for finding in found)
    assert all(finding.advice and not finding.advice.endswith(".") for finding in found)


ROOT = Path(__file__).parents[2]


def found_before_the_first_step():
    """Return the declared mistakes that checks refer to; the others show while the program runs."""
    checks = "".join(path.read_text("utf-8") for path in ROOT.glob("ikkuna/diagnosis/preflight_checks/*.py"))
    declared = {name: each for name, each in vars(mistakes).items() if isinstance(each, mistakes.Mistake)}
    return {each.name for name, each in declared.items() if re.search(rf"\b{name}\b", checks)}


def test_the_page_lists_the_mistakes():
    page = (ROOT / "sphinx/source/preflight.rst").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^   \* - ``(\w+)``$", page, re.MULTILINE)) == sorted(found_before_the_first_step())


def test_each_declared_mistake_is_found():
    planted = {rule for _, expected in MISTAKES.values() for rule, *_ in expected}
    assert found_before_the_first_step() <= planted | {rule for _, expected in FAULTS.values() for rule in expected}


# -- no false alarms

FACTS = {  # true, and no mistake: findings of the severity "info"
    "resnet_without_normalisation_of_inputs": ["input_scale"],
    "xlnet": ["no_gradient"],
    "pegasus": ["frozen_in_optimizer"],
    "wav2vec2_ctc": ["loss_scale"],
}
QUICK = [
    "mlp",
    "plain_conv_net",
    "resnet_small",
    "lstm",
    "rnn_with_time_first",
    "transformer_language_model",
    "language_model_that_keeps_its_state",
    "residual_branches_and_scores_that_begin_at_zero",
]
QUICK_TRANSFORMERS = ["bert_masked", "gpt2", "t5"]


def findings_of_healthy_model(name, seed):
    torch.manual_seed(seed)
    if name in TRANSFORMERS and name not in CASES:
        model, batch = TRANSFORMERS[name]()
        loss, optimizer = None, None
    else:
        model, batch, loss, *options = CASES[name]()
        optimizer = options[0]["optimizer"] if options else None
    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
    return ikkuna.preflight(model, batch, loss, optimizer)


def assert_no_alarm(name, seed):
    found = findings_of_healthy_model(name, seed)
    assert all(finding.severity == "info" for finding in found), str(found)
    assert [finding.rule for finding in found] == FACTS.get(name, []), str(found)


@pytest.mark.parametrize("name", [*QUICK, *QUICK_TRANSFORMERS])
def test_no_finding_for_a_healthy_model(name):
    assert_no_alarm(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", [*CASES, *TRANSFORMERS])
def test_no_finding_for_any_healthy_model(name, seed):
    assert_no_alarm(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("name", healthy_timm.NAMES)
def test_no_alarm_for_an_unmodified_model_of_timm(name, classes):
    if find_spec("timm") is None:
        pytest.skip("requires timm; run with `make test-slow`")
    torch.manual_seed(classes)
    model, batch = healthy_timm.make(name, classes)
    found = ikkuna.preflight(model, batch, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    # csatv2 has a layer normalisation over one channel, whose result is always its bias
    expected = {("stages.3.4.attn.attn.norm2", "constant_result")} if name == "csatv2" else set()
    assert {(finding.module, finding.rule) for finding in found if finding.severity != "info"} == expected, str(found)
    assert {finding.rule for finding in found if finding.severity == "info"} <= {"loss_at_init", "signal_scale"}


class LastWeights(nn.Module):
    """A classifier whose scores are products with its last weights, or cosines times a scale."""

    def __init__(self, is_cosine):
        super().__init__()
        self.body, self.last, self.is_cosine = nn.Linear(8, 16), nn.Linear(16, 5, bias=False), is_cosine
        nn.init.normal_(self.last.weight, std=3.0)

    def forward(self, x):
        if self.is_cosine:
            return 32 * nn.functional.normalize(self.body(x)) @ nn.functional.normalize(self.last.weight).T
        return self.last(self.body(x))


@pytest.mark.parametrize(("is_cosine", "severity"), [(False, "warning"), (True, "info")])
def test_large_last_weights_are_blamed_where_smaller_ones_lower_the_loss(is_cosine, severity):
    torch.manual_seed(0)
    model, batch = LastWeights(is_cosine), (torch.randn(64, 8), torch.randint(0, 5, (64,)))
    before = copy.deepcopy(model.state_dict())
    found = ikkuna.preflight(model, batch, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    assert [finding.severity for finding in found if finding.rule == "loss_at_init"] == [severity], str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class NetworkOfTimm(nn.Module):
    """Three habits of timm: a head scaled by its outputs, a gated branch that begins at zero, and a growing residual stream."""

    def __init__(self, norm=True):
        super().__init__()
        self.stem, self.branch = nn.Linear(20, 64), nn.Linear(64, 64)
        self.squeeze, self.expand = nn.Linear(64, 16), nn.Linear(16, 64)
        self.positions = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64) if norm else nn.Identity()
        self.head = nn.Linear(64, 2)
        nn.init.zeros_(self.branch.weight)
        nn.init.zeros_(self.branch.bias)
        nn.init.zeros_(self.squeeze.bias)
        nn.init.normal_(self.positions.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=1.0)

    def forward(self, x):
        x = functional.relu(self.stem(x))
        y = self.branch(x)
        x = x + y * torch.sigmoid(self.expand(functional.relu(self.squeeze(y))))
        for _ in range(6):
            x = x + self.positions(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("seed", range(3))
def test_the_habits_of_timm_are_no_alarm(seed):
    torch.manual_seed(seed)
    model = NetworkOfTimm()
    x, y = vectors()
    found = ikkuna.preflight(model, (x, y % 2), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    assert {finding.rule: finding.severity for finding in found} == {"signal_scale": "info"}, str(found)
    assert found[0].consequences == ("loss_at_init",)


def test_a_growing_signal_that_nothing_normalises_is_an_alarm():
    torch.manual_seed(0)
    model = NetworkOfTimm(norm=False)
    x, y = vectors()
    found = ikkuna.preflight(model, (x, y % 2), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    assert [(finding.rule, finding.severity, finding.module) for finding in found] == [
        ("signal_scale", "warning", "positions")
    ]


# -- nothing changes


class Everything(nn.Module):
    """A model with state of every kind: buffers, dropout, RNNs, frozen and unused parameters, hooks of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.rnn = nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        self.head, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)
        self.head.bias.requires_grad_(False)
        self.norm.eval()
        self.fails = ""

    def forward(self, x):
        x = self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))
        x = x.clone().mul_(1 + random.random() * np.random.rand())
        h = self.spectral(self.rnn(x)[0][:, -1])
        if self.fails == "forward":
            raise RuntimeError("on purpose")
        return self.head(h.detach() if self.fails == "detach" else h)


def state(model, *others):
    owners = [model, *others]
    modules = [module for owner in owners for module in owner.modules()]
    parameters = [p for owner in owners for p in owner.parameters()]
    return {
        "values": [value.clone() for owner in owners for value in owner.state_dict().values()],
        "identities": [id(p) for p in parameters] + [id(b) for owner in owners for b in owner.buffers()],
        "versions": [p._version for p in parameters],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in parameters],
        "trained": [p.requires_grad for p in parameters],
        "modes": [module.training for module in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "hooks": [[len(value) for name, value in sorted(vars(m).items()) if name.endswith("_hooks")] for m in modules],
        "weights of recurrent layers": [[id(w) for w in m._flat_weights] for m in modules if isinstance(m, nn.RNNBase)],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        "modes of torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


def same(a, b):
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


class NoisyLoss(nn.Module):
    """A loss with state that draws random numbers and changes its arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.fails = ""

    def forward(self, output, labels):
        self.calls += 1
        if self.fails == "loss":
            raise RuntimeError("on purpose")
        return functional.mse_loss(output + torch.rand(()), labels.mul_(0.5) * self.weight)


@pytest.mark.parametrize("fails", ["", "forward", "loss", "detach"])
def test_nothing_changes(fails):
    model, loss = Everything(), NoisyLoss()
    model(torch.randn(8, 5, 4)).sum().backward()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()])
    batch = torch.randn(8, 5, 4), torch.randn(8, 2)
    kept = [tensor.clone() for tensor in batch]
    before = state(model, loss)
    model.fails = loss.fails = fails
    found = ikkuna.preflight(model, batch, loss, optimizer)
    after = state(model, loss)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert all(torch.equal(a, b) for a, b in zip(batch, kept, strict=True))
    assert not optimizer.state
    expected = {"forward": "first_step_runs", "loss": "first_step_runs", "detach": "no_gradient"}
    assert expected.get(fails, "evaluation_mode") in [finding.rule for finding in found], str(found)


def test_nothing_changes_when_a_check_raises(monkeypatch):
    def broken(trial):
        with trial.running(as_training=True):
            trial.model.norm.running_mean.add_(1)
            torch.rand(3)
            raise ZeroDivisionError("on purpose")
        yield

    monkeypatch.setattr("ikkuna.diagnosis.preflight.CHECKS", (broken,))
    model, batch = Everything(), torch.randn(8, 5, 4)
    before = state(model)
    found = ikkuna.preflight(model, batch)
    after = state(model)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert dict(found.skipped) == {"broken": "the check raised ZeroDivisionError: on purpose"}


def test_an_interrupt_reaches_the_user_and_nothing_changes():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.BatchNorm1d(4)

        def forward(self, x):
            self.net(x)
            raise KeyboardInterrupt

    model, batch = Interrupted(), torch.randn(8, 4)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        ikkuna.preflight(model, batch, lambda output: output.sum())
    assert all(same(before[name], state(model)[name]) for name in before)


def test_an_optimizer_that_steps_in_the_backward_pass_does_not_step():
    model = stack([20, 64, 10])
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = state(model)
    assert not ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), list(optimizers.values()))
    assert same(before["values"], state(model)["values"])


def test_a_model_that_initialises_itself_and_counts_its_calls_stays_new():
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.initialised, self.calls = nn.Parameter(torch.zeros(20)), False, 0
            self.net = stack([20, 64, 10])

        def forward(self, x):
            self.calls += 1
            if not self.initialised:
                self.bias.detach().copy_(-x.mean(0))
                self.initialised = True
                self.register_buffer("cache", x.clone())
            self.last = self.net(x + self.bias)
            return self.last

    model = ActNorm()
    batch, loss, optimizer = vectors(), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())
    before = state(model)
    assert not ikkuna.preflight(model, batch, loss, optimizer)
    after = state(model)
    assert [name for name in before if name != "versions" and not same(before[name], after[name])] == []
    assert (model.initialised, model.calls, dict(model.named_buffers())) == (False, 0, {})


def test_a_few_forwards_suffice():
    class Counted(LanguageModel):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)

    model, x = Counted(flat=True), torch.randint(50, (8, 13))
    assert not ikkuna.preflight(model, (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss())
    # first step, its graph, evaluation, copies of one sample, another order, another future, exchanged samples; a gradient and five losses
    assert Counted.calls == 13


@pytest.mark.parametrize(("sign", "least", "most"), [(1, 20, 100), (-1, 250, 350)])
def test_a_loss_is_minimised_as_long_as_it_falls(sign, least, most):
    calls = 0

    def loss(output, labels):
        nonlocal calls
        calls += 1
        return sign * functional.cross_entropy(output, labels)

    found = ikkuna.preflight(nn.Linear(20, 10), vectors(), loss)
    assert ("wrong_optimum" in {finding.rule for finding in found}) == (sign < 0)
    assert least < calls < most


def test_a_watched_model_gives_the_same_values():
    def values(checked):
        torch.manual_seed(0)
        model, batch, loss, optimizer = classifier(dropout=0.2)
        backend = RecordingBackend()
        with Exporter(message_bus=MessageBus("watched")) as exporter:
            exporter.add_modules(model)
            exporter.set_loss(loss)
            for kind in ("activations", "weight_gradients", "weight_updates", "layer_gradients"):
                exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=backend))
            for step in range(4):
                if checked and step in (0, 2):
                    assert not ikkuna.preflight(model, batch, loss, optimizer)
                optimizer.zero_grad()
                loss(model(batch[0]), batch[1]).backward()
                if checked and step == 3:
                    ikkuna.preflight(model, batch, loss, optimizer)
                optimizer.step()
        return backend.values, [p.detach().clone() for p in model.parameters()]

    (expected, weights), (found, same_weights) = values(False), values(True)
    assert len(expected) > 50
    assert [(series.kind, series.name, step, value) for series, value, step in found] == [
        (series.kind, series.name, step, value) for series, value, step in expected
    ]
    assert same(weights, same_weights)


def test_a_compiled_model_is_checked_and_not_compiled():
    model, batch, loss, _ = classifier()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters())
    assert not ikkuna.preflight(compiled, batch, loss, optimizer)
    model.insert(5, nn.Softmax(-1))
    (finding,) = ikkuna.preflight(compiled, batch, loss, torch.optim.Adam(compiled.parameters()))
    assert finding.rule == "softmax_twice"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_no_mistake(reentrant):
    model, batch = TRANSFORMERS["gpt2"]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    found = ikkuna.preflight(model, batch, None, torch.optim.Adam(model.parameters()))
    assert not found
    assert ("no_gradient" in found.skipped) == reentrant


# -- bad input


def test_a_model_on_the_meta_device_is_judged_in_part():
    with torch.device("meta"):
        model = stack([20, 64, 10])
    found = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), torch.optim.Adam(model[0].parameters()))
    assert [finding.rule for finding in found] == ["not_in_optimizer"]
    assert found.skipped["no_gradient"] == "the model is on the meta device, where tensors have no values"


def test_a_model_with_lazy_parameters_is_judged_in_part():
    found = ikkuna.preflight(nn.Sequential(nn.LazyLinear(3)), vectors(), nn.CrossEntropyLoss())
    assert not found
    assert found.skipped["no_gradient"] == "the model has lazy parameters; call it once before"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (None, "no batch was given"),
        ((torch.zeros(0, 20), torch.zeros(0, dtype=torch.long)), "the batch is empty"),
        ((), "the batch contains no tensor"),
        ({}, "the batch contains no tensor"),
        (("text", torch.zeros(3)), "the batch contains no tensor"),
    ],
)
def test_a_batch_without_data_is_named(batch, reason):
    model, _, loss, optimizer = classifier()
    found = ikkuna.preflight(model, batch, loss, optimizer)
    assert not found
    assert found.skipped["first_step_runs"] == reason
    assert "not_in_optimizer" in found.judged


def test_an_output_without_tensors_is_named():
    class Generates(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(20, 3)

        def forward(self, x):
            yield self.net(x)

    found = ikkuna.preflight(Generates(), torch.randn(4, 20), lambda output: next(output).sum())
    assert found.skipped["ignores_input"] == "the output of the model contains no floating-point tensor"
    assert not found.errors


def test_a_loss_that_returns_no_tensor_is_named():
    model, batch, _, optimizer = classifier()
    (finding,) = ikkuna.preflight(model, batch, lambda output, labels: 1.0, optimizer)
    assert (
        finding.message
        == "The first step does not run: The loss raises TypeError: the loss function returned a float instead of a tensor"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("model",), "model must be a torch.nn.Module, got str"),
        ((nn.Linear(2, 2), None, 3), "loss must be a function of output and labels, got int"),
        ((nn.Linear(2, 2), None, None, 3), "optimizer must be a torch.optim.Optimizer, got int"),
        ((nn.Linear(2, 2), iter([])), "batch must be one batch, got a list_iterator"),
        ((nn.Linear(2, 2), torch.utils.data.DataLoader([1])), "batch must be one batch, got a DataLoader"),
    ],
)
def test_wrong_types_are_refused(arguments, text):
    with pytest.raises(ConfigTypeError, match=text):
        ikkuna.preflight(*arguments)


def test_other_forms_of_batches_are_understood():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([20, 32, 10])

        def forward(self, values):
            return {"scores": self.net(values)}

    x, y = vectors()
    loss = lambda output, labels: functional.cross_entropy(output["scores"], labels)  # noqa: E731
    for batch in ({"values": x, "labels": y}, [{"values": x}, y]):
        found = ikkuna.preflight(Named(), batch, loss)
        assert not found
        assert "loss_at_init" in found.judged


def test_findings_print_as_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    model, batch, loss, _ = classifier()
    text = str(ikkuna.preflight(model, batch, loss, torch.optim.Adam(model[0].parameters())))
    assert "error     not_in_optimizer  -       -     No optimizer owns this parameter" in text
    assert "Try: pass it to the optimizer" in text


def test_findings_are_sorted_by_severity_and_can_be_copied():
    made = [Finding("a", "info", "A."), Finding("b", "error", "B."), Finding("c", "warning", "C.")]
    found = copy.deepcopy(Findings(made, ["a"], {"d": "no loss"}))
    assert [finding.rule for finding in found] == ["b", "c", "a"]
    assert (found.judged, found.skipped) == (("a",), {"d": "no loss"})


def test_a_model_with_complex_parameters_is_checked():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wave, self.head = nn.Linear(20, 16, dtype=torch.cfloat), nn.Linear(16, 10)

        def forward(self, x):
            return self.head(self.wave(x.to(torch.cfloat)).abs())

    model = Model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    assert not found
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_prepared_for_quantisation_is_left_as_it_was():
    """Its observers measure ranges in evaluation mode, and resize their buffers in place."""
    quantisation = torch.ao.quantization
    model = nn.Sequential(quantisation.QuantStub(), stack([20, 64, 10]), quantisation.DeQuantStub())
    model.qconfig = quantisation.get_default_qat_qconfig("x86")
    quantisation.prepare_qat(model.train(), inplace=True)
    before = copy.deepcopy(model.state_dict())
    found = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    assert not [finding for finding in found if finding.severity != "info"]
    after = model.state_dict()
    assert {name for name in after if before[name].shape != after[name].shape} == set()
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_a_model_that_runs_only_without_hooks_is_not_accused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.other = nn.Linear(20, 16), nn.Linear(16, 10), nn.Linear(16, 10)

        def forward(self, x):
            return torch.cond(x.new_ones(()) > 0, self.one, self.other, (torch.relu(self.body(x)),))

    model = Model()
    found = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    assert not found
    assert "not while these checks observe it" in found.skipped["first_step_runs"]


@pytest.mark.parametrize(("reads", "severity"), [(False, "info"), (True, "error")])
def test_outputs_of_minus_infinity_that_the_loss_does_not_read_are_an_info(reads, severity):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = stack([20, 64, 6])

        def forward(self, x, allowed):
            return self.body(x).masked_fill(~allowed, -math.inf)

    torch.manual_seed(0)
    model, labels, allowed = Policy(), torch.randint(6, (32,)), torch.rand(32, 6) < 0.6
    allowed[torch.arange(32), labels] = True
    allowed[0, labels[0]] = not reads
    optimizer = torch.optim.Adam(model.parameters())
    found = ikkuna.preflight(model, (torch.randn(32, 20), allowed, labels), nn.CrossEntropyLoss(), optimizer)
    assert [(each.rule, each.severity) for each in found] == [("nonfinite", severity)]


def test_no_warning_of_torch_reaches_the_user():
    """A sum over the batch is judged by the first step of the optimizer."""
    torch.manual_seed(0)
    model = stack([20, 64, 10])
    optimizer, before = torch.optim.SGD(model.parameters(), 1e-4), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        [found] = ikkuna.preflight(model, vectors(), nn.CrossEntropyLoss(reduction="sum"), optimizer)
    finally:
        torch.set_warn_always(before)
    assert (found.rule, found.severity) == ("loss_scale", "info")
