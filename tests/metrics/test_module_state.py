"""Flags of modules: tied weights that come apart."""

import copy

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from tests.diagnosis import networks


class LanguageModel(networks.Transformer):
    """A language model whose output layer has the weight of its embedding."""

    def __init__(self):
        super().__init__(60)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.tok.weight


def tied():
    return LanguageModel()


def copied():
    """Return a model whose head is a copy, as some wrappers make one."""
    model = LanguageModel()
    model.head = copy.deepcopy(model.head)
    return model


def separate():
    return networks.Transformer(60)


def give_the_head_a_weight_of_its_own(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def nothing(model):
    pass


def findings_of(model, change):
    exporter = Exporter(message_bus=MessageBus("tied"), on_error="raise")
    exporter.add_modules(model)
    loss = nn.CrossEntropyLoss()
    exporter.set_loss(loss)
    exporter.apply_rules(["untied_weights"], every=2, backend="null")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with exporter:
        for step in range(8):
            if step == 4:
                change(model)
            x = torch.randint(60, (4, 9))
            optimizer.zero_grad()
            loss(model(x[:, :-1]), x[:, 1:].flatten()).backward()
            optimizer.step()
    assert exporter.findings.judged == (("untied_weights",) if model.head.bias is None else ())
    return [(finding.rule, finding.module, finding.step) for finding in exporter.findings]


@pytest.mark.parametrize(
    ("make", "change", "found"),
    [
        (tied, nothing, []),
        (tied, give_the_head_a_weight_of_its_own, [("untied_weights", "head", 4)]),
        (copied, nothing, [("untied_weights", "head", 0)]),
        (separate, nothing, []),
    ],
)
def test_tied_weights_that_come_apart_are_named(make, change, found):
    torch.manual_seed(0)
    assert findings_of(make(), change) == found
