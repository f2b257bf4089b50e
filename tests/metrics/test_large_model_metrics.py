"""z-loss, attention scores, signs of momentum and weight decay: in training, against numpy in float64."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    AttentionScoresSubscriber,
    SignAgreementSubscriber,
    WeightDecaySubscriber,
    ZLossSubscriber,
)
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves

STEPS = 4


class Attending(nn.Module):
    """Returns a loss and logits; observes causal scores of two heads."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 5)
        self.scores, self.logits = [], []

    def forward(self, x):
        q, k = (
            self.first(x).unflatten(-1, (2, 4)).transpose(1, 2),
            self.first(x + 1).unflatten(-1, (2, 4)).transpose(1, 2),
        )
        scores = q @ k.mT * 4
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        ikkuna.observe("block.scores", scores)
        mixed = (scores.softmax(-1) @ k).transpose(1, 2).flatten(2)
        logits = self.last(mixed)
        self.scores.append(scores.detach().double().numpy())
        self.logits.append(logits.detach().double().numpy())
        return {"loss": logits.square().mean(), "logits": logits}


def entropy(scores):
    """Return the mean over queries of the entropy of each head."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).mean((0, 2))


def trained(makers, optimizer, micro_batches=1):
    """Train under subscribers; return the model, (kind, name) → values, and the tensors of each weight around each step."""
    torch.manual_seed(0)
    model, recording, bus, steps = Attending(), RecordingBackend(), MessageBus(), []
    optimizer = optimizer(model.parameters())
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for make in makers:
            bus.register_subscriber(make(backend=recording))
        for step in range(STEPS):
            for micro in range(micro_batches):
                generator = torch.Generator().manual_seed(10 * step + micro)
                model(torch.randn(6, 7, 3, generator=generator))["loss"].backward()
            before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
            gradients = {name: p.grad.double().numpy() for name, p in model.named_parameters()}
            optimizer.step()
            states = {name: {**optimizer.state[p]} for name, p in model.named_parameters()}
            after = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
            steps.append(
                (before, gradients, after, {n: {k: _copied(v) for k, v in s.items()} for n, s in states.items()})
            )
            optimizer.zero_grad()
    return model, curves(recording), steps


def _copied(value):
    return value.double().numpy().copy() if isinstance(value, torch.Tensor) else value


sgd = partial(torch.optim.SGD, lr=0.05)
adamw = partial(torch.optim.AdamW, lr=0.01)


def test_the_z_loss_of_structured_outputs():
    model, found, _ = trained([ZLossSubscriber], sgd, micro_batches=2)
    assert set(found) == {("network_output_z_loss", "logits")}
    by_step = [np.concatenate(model.logits[i : i + 2]) for i in range(0, 2 * STEPS, 2)]
    expected = [(np.log(np.exp(z).sum(-1)) ** 2).mean() for z in by_step]
    assert found["network_output_z_loss", "logits"] == pytest.approx(expected, rel=1e-5)


def test_the_z_loss_of_a_layer():
    model, found, _ = trained([partial(ZLossSubscriber, "activations", modules="last")], sgd)
    expected = [(np.log(np.exp(z).sum(-1)) ** 2).mean() for z in model.logits]
    assert found == {("activations_z_loss", "last"): pytest.approx(expected, rel=1e-5)}


def test_observed_attention_scores_of_each_head():
    model, found, _ = trained([AttentionScoresSubscriber], sgd, micro_batches=2)
    assert set(found) == {(f"scores_{what}", f"block.scores:head_{h}") for what in ("max", "entropy") for h in (0, 1)}
    for head in (0, 1):
        pairs = [model.scores[i : i + 2] for i in range(0, 2 * STEPS, 2)]
        largest = [max(scores[:, head].max() for scores in pair) for pair in pairs]
        least = [min(entropy(scores)[head] for scores in pair) for pair in pairs]
        assert found["scores_max", f"block.scores:head_{head}"] == pytest.approx(largest, rel=1e-5)
        assert found["scores_entropy", f"block.scores:head_{head}"] == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize("name", ["exp_avg", "momentum_buffer"])
def test_the_signs_of_gradient_and_momentum(name):
    optimizer = adamw if name == "exp_avg" else partial(sgd, momentum=0.9)
    _, found, steps = trained([partial(SignAgreementSubscriber, name)], optimizer)
    for layer in ("first", "last"):
        products = [gradients[f"{layer}.weight"] * states[f"{layer}.weight"][name] for _, gradients, _, states in steps]
        expected = [(p > 0).sum() / (p != 0).sum() for p in products]
        assert found["gradient_momentum_agreement", layer] == pytest.approx(expected)
        assert expected[0] == 1.0
        assert min(expected) < 1.0


def test_a_field_that_the_optimizer_lacks_shows_no_agreement():
    assert not trained([SignAgreementSubscriber], sgd)[1]
    with pytest.raises(ConfigError, match="needs a field such as 'exp_avg', got ''"):
        SignAgreementSubscriber("")


def decays(optimizer, weight, state):
    """Return the part of weight decay in an update, written out for each optimizer."""
    if optimizer is torch.optim.AdamW:
        return -0.01 * 0.1 * weight
    if optimizer is torch.optim.SGD:
        return -0.01 * 0.1 * weight
    return -0.01 * 0.1 * weight / (np.sqrt(state["exp_avg_sq"] / (1 - 0.999 ** state["step"])) + 1e-8)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_share_of_weight_decay(optimizer):
    _, found, steps = trained([WeightDecaySubscriber], partial(optimizer, lr=0.01, weight_decay=0.1))
    assert set(found) == {("weight_decay_share", "first"), ("weight_decay_share", "last")}
    for layer in ("first", "last"):
        expected = []
        for before, _, after, states in steps:
            key = f"{layer}.weight"
            part, update = decays(optimizer, before[key], states[key]), after[key] - before[key]
            size, rest = np.linalg.norm(part), np.linalg.norm(update - part)
            expected.append(size / (size + rest))
        assert min(expected) > 0.0001
        assert found["weight_decay_share", layer] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_weight_without_gradient_has_no_share_of_decay(optimizer):
    model, recording, bus = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)]), RecordingBackend(), MessageBus()
    optimizer = optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(WeightDecaySubscriber(backend=recording))
        model[0](torch.ones(4, 3)).sum().backward()
        optimizer.step()
    [used], [unused] = (curves(recording)["weight_decay_share", name] for name in "01")
    assert 0 < used < 0.1
    assert math.isnan(unused)  # no optimizer changes a weight without gradient, so its decay has not acted


def test_weights_without_decay_or_of_an_unknown_optimizer_have_no_share():
    assert not trained([WeightDecaySubscriber], sgd)[1]
    assert not trained([WeightDecaySubscriber], partial(torch.optim.RMSprop, weight_decay=0.1))[1]


def test_groups_have_decays_of_their_own():
    def optimizer(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "weight_decay": 0.0}, {"params": others}], weight_decay=0.1)

    assert set(trained([WeightDecaySubscriber], optimizer)[1]) == {("weight_decay_share", "last")}
