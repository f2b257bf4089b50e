"""Mistakes planted at random places of random networks are found, each by its check and in its module."""

import math
import random
from functools import partial

import pytest
import torch
from torch import nn

import ikkuna
from tests.diagnosis.healthy_models import Recurrent, Transformer, conv_block, images, stack, tokens, vectors

pytestmark = pytest.mark.slow


def mlp(draw):
    norm = draw.choice([None, nn.BatchNorm1d, nn.LayerNorm])
    widths = [20, *[draw.choice([32, 64])] * draw.randint(2, 4), 10]
    return stack(widths, draw.choice([nn.ReLU, nn.GELU, nn.Tanh]), norm, draw.choice([0.0, 0.2])), vectors()


def conv_net(draw):
    width, blocks = draw.choice([8, 16]), draw.randint(1, 3)
    if draw.random() < 0.5:
        layers = [conv_block(3, width), *(conv_block(width, width) for _ in range(blocks))]
    else:
        inner = [part for _ in range(blocks) for part in (nn.Conv2d(width, width, 3), nn.ReLU())]
        layers = [nn.Conv2d(3, width, 3), nn.ReLU(), *inner]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * width, 10)]
    return nn.Sequential(*layers, *head), images(size=16)


def transformer(draw):
    return Transformer(norm_first=draw.random() < 0.5), tokens()


def recurrent(draw):
    layers = draw.randint(1, 2)
    cell = draw.choice([nn.LSTM, nn.GRU])
    return Recurrent(cell, num_layers=layers, bidirectional=draw.random() < 0.5), tokens()


FAMILIES = {function.__name__: function for function in (mlp, conv_net, transformer, recurrent)}


def layers_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.RNNBase)]


class Run:
    """A healthy run, of which a fault changes a part."""

    def __init__(self, family, seed):
        self.draw = random.Random(f"{family} {seed}")
        torch.manual_seed(seed)
        self.model, (self.x, self.y) = FAMILIES[family](self.draw)
        self.loss = nn.CrossEntropyLoss()
        self.make, self.left_out, self.optimizers, self.module = torch.optim.Adam, [], [], None

    def layer(self, last=True):
        names = layers_of(self.model)
        self.module = self.draw.choice(names if last else names[:-1])
        return self.model.get_submodule(self.module)

    def findings(self):
        parameters = [p for p in self.model.parameters() if not any(p is q for q in self.left_out)]
        optimizers = [self.make(parameters), *self.optimizers]
        return ikkuna.preflight(self.model, (self.x, self.y), self.loss, optimizers)


def layer_in_no_optimizer(run):
    run.left_out = list(run.layer().parameters())
    return {"not_in_optimizer"}


def layer_in_two_optimizers(run):
    run.optimizers = [torch.optim.SGD(run.layer().parameters(), 0.1)]
    return {"parameter_in_two_groups"}


def learning_rate_of_zero(run):
    run.left_out = list(run.layer().parameters())
    run.optimizers = [torch.optim.Adam(run.left_out, lr=0.0)]
    return {"learning_rate_zero"}


def detached_output(run):
    def detach(module, args, output):
        return tuple(map(detach_one, output)) if isinstance(output, tuple) else detach_one(output)

    def detach_one(value):
        if value is None:
            return None
        return tuple(v.detach() for v in value) if isinstance(value, tuple) else value.detach()

    run.layer(last=False).register_forward_hook(detach)
    if run.module.endswith("out_proj"):  # attention does not call it
        run.module = run.module.removesuffix(".out_proj")
        run.model.get_submodule(run.module).register_forward_hook(detach)
    return {"no_gradient"}


def constant_weights(run):
    layer = run.layer()
    for name, parameter in layer.named_parameters():
        if name.startswith("weight"):
            nn.init.constant_(parameter, 0.02)
    return {"identical_units"}


def nan_in_a_weight(run):
    next(run.layer().parameters()).detach().view(-1)[0] = math.nan
    return {"nonfinite"}


def large_initial_weights(run):
    run.module = None
    with torch.no_grad():
        head = run.model.get_submodule(layers_of(run.model)[-1])
        head.weight.mul_(25 / run.model.eval()(run.x).std())
        run.model.train()
    return {"loss_at_init", "signal_scale"}


def evaluation_mode(run):
    run.model.add_module("last_dropout", nn.Dropout(0.1))
    run.model.eval()
    return {"evaluation_mode"}


def second_softmax(run):
    run.model = nn.Sequential(run.model, nn.Softmax(-1))
    return {"softmax_twice"}


def sum_over_the_batch(run):
    run.loss = nn.CrossEntropyLoss(reduction="sum")
    run.make = partial(torch.optim.SGD, lr=0.5)  # a rate for the mean; Adam does not depend on the scale of the loss
    return {"loss_scale"}


def label_out_of_range(run):
    run.y = run.y.clone()
    run.y[run.draw.randrange(len(run.y))] = run.draw.choice([-1, 10, 1000])
    return {"label_range"}


def labels_of_another_dtype(run):
    run.y = run.y.to(run.draw.choice([torch.float32, torch.float64, torch.int32]))
    return {"label_dtype"}


def input_ignored(run):
    name = layers_of(run.model)[-1]
    run.model.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    return {"ignores_input", "signal_lost"}


def mean_over_the_batch(run):
    name = layers_of(run.model)[-1]
    run.model.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    return {"batch_leak"}


FAULTS = [
    *(layer_in_no_optimizer, layer_in_two_optimizers, learning_rate_of_zero, detached_output, constant_weights),
    *(nan_in_a_weight, large_initial_weights, evaluation_mode, second_softmax, sum_over_the_batch),
    *(label_out_of_range, labels_of_another_dtype, input_ignored, mean_over_the_batch),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_mistake_at_a_random_place_is_found(fault, family, seed):
    run = Run(family, seed)
    expected = fault(run)
    found = [finding for finding in run.findings() if finding.severity != "info"]
    assert len(found) == 1, found
    assert found[0].rule in expected
    if run.module is not None:
        assert found[0].module == run.module


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_found_without_a_mistake(family, seed):
    assert not Run(family, 100 + seed).findings()
