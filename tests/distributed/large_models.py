"""Metrics of large models on several ranks: attention scores, z-loss, signs of momentum, share of weight decay."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ikkuna
from ikkuna.export import subscriber as installed
from tests.distributed import loops


class Attending(nn.Module):
    """Attends with two heads over the three pairs of numbers of a row, and observes the scores."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        rows = self.first(x.unflatten(-1, (3, 2))).unflatten(-1, (2, 4)).transpose(1, 2)
        scores = 4 * rows @ rows.mT
        ikkuna.observe("block.scores", scores)
        return self.last((scores.softmax(-1) @ rows).transpose(1, 2).flatten(2).mean(1))


def attending():
    torch.manual_seed(1)
    return Attending()


def metrics():
    return [
        installed.AttentionScoresSubscriber(backend="null"),
        installed.ZLossSubscriber(backend="null"),
        installed.SignAgreementSubscriber(backend="null"),
        installed.WeightDecaySubscriber(backend="null"),
    ]


adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def published_of(model, inputs, labels):
    return loops.published_of(model, inputs, labels, metrics(), lambda m: adamw(m.parameters()))


def large_model_metrics(rank, size):
    """Return what is published with DDP and with FSDP2."""
    rows = loops.local(*loops.data(), rank, size)
    return [published_of(model(attending()), *rows) for model in (DistributedDataParallel, fully_shard)]
