"""Rules that read what subscribers with arguments of the user's own publish, in real training runs."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import AttentionSubscriber, RouterSubscriber
from tests.diagnosis import networks


def findings_of(model, subscriber, batch, loss, change, rule, steps=60):
    """Train; `change(model)` is called in the middle."""
    bus = MessageBus("diagnosis")
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(subscriber)
        exporter.apply_rules([rule], every=5, backend="null")
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for step in range(steps):
            if step == steps // 2:
                change(model)
            x, y = batch()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert exporter.findings.judged == (rule,)
    return [(finding.rule, finding.module) for finding in exporter.findings]


def sharpen(model):
    """Multiply queries and keys, as an exploded learning rate would."""
    for layer in (model.blocks[1].q, model.blocks[1].k):
        layer.weight.data.mul_(60)


def nothing(model):
    pass


@pytest.mark.parametrize(("change", "found"), [(sharpen, [("attention_collapse", "blocks.1")]), (nothing, [])])
def test_attention_that_collapses_is_named(change, found):
    torch.manual_seed(0)
    ids = networks.text()
    probe = torch.stack([ids[i : i + 32] for i in range(0, 256, 32)])

    def batch():
        begin = torch.randint(0, len(ids) - 33, (4,))
        window = ids[begin[:, None] + torch.arange(33)]
        return window[:, :-1], window[:, 1:].flatten()

    subscriber = AttentionSubscriber(probe, every=5, backend="null")
    model = networks.Transformer(60)
    assert findings_of(model, subscriber, batch, nn.CrossEntropyLoss(), change, "attention_collapse") == found


class Mixture(nn.Module):
    """Experts of which each row uses two; `imbalance` is the loss of Switch transformers that balances the load."""

    def __init__(self, number=8):
        super().__init__()
        self.gate = nn.Linear(64, number)
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(number))

    def forward(self, x):
        x = x.flatten(1)
        shares = self.gate(x).softmax(1)
        weights, chosen = shares.topk(2)
        load = torch.bincount(chosen.flatten(), minlength=len(self.experts)) / len(x)
        self.imbalance = len(self.experts) / 2 * (load * shares.mean(0)).sum()
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[..., None] * outputs.take_along_dim(chosen[..., None], 1)).sum(1)


def train_mixture(model, balance, rule, change=nothing):
    """Train a mixture of experts on digits."""
    (images, labels), _ = networks.digits()

    def batch():
        chosen = torch.randint(0, len(images), (48,))
        return images[chosen], labels[chosen]

    def loss(outputs, y):
        return nn.functional.cross_entropy(outputs, y) + balance * model.imbalance

    subscriber = RouterSubscriber(2, subsample=5, window=3, backend="null")
    return findings_of(model, subscriber, batch, loss, change, rule)


@pytest.mark.parametrize(("balance", "found"), [(0.0, [("idle_experts", "gate")]), (1.0, [])])
def test_experts_without_tokens_are_named(balance, found):
    """Without a loss that balances the load, most experts of this network receive no row after 45 steps."""
    torch.manual_seed(0)
    assert train_mixture(Mixture(), balance, "idle_experts") == found


def prefer_an_expert(model):
    model.gate.bias.data[3] = 20.0


@pytest.mark.parametrize(("change", "found"), [(prefer_an_expert, [("overloaded_experts", "gate")]), (nothing, [])])
def test_an_expert_that_receives_all_tokens_is_named(change, found):
    """Each row uses one of 16 experts beside the one that all rows use: its load is 8 times the mean."""
    torch.manual_seed(0)
    assert train_mixture(Mixture(16), 1.0, "overloaded_experts", change) == found
