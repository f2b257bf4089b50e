"""Small networks and data sets of four families, on which faults are planted."""

import functools
from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


@functools.cache
def digits():
    """Return standardised images (1, 8, 8) and labels, as training and test data."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = ((images - images.mean()) / images.std())[order]
    labels = labels[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


@functools.cache
def topics(classes=8, vocabulary=120, length=24, number=2400):
    """Return bags of tokens that are drawn from distributions of their classes, and the classes."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(vocabulary, generator=generator) ** 2 + 0.02
    rare = [torch.where(torch.rand(vocabulary, generator=generator) < 0.12, 5.0, 1.0) for _ in range(classes)]
    weights = torch.stack([base * factor for factor in rare])
    labels = torch.randint(0, classes, (number,), generator=generator)
    tokens = torch.multinomial(weights[labels], length, replacement=True, generator=generator)
    cut = int(number * 0.8)
    return (tokens[:cut], labels[:cut]), (tokens[cut:], labels[cut:])


@functools.cache
def text(length=40_000, vocabulary=60):
    """Return characters of a Markov chain of second order with a skewed distribution: a generated text."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(vocabulary, vocabulary, 4, generator=generator).pow(4).mul(vocabulary).long()
    draws = torch.rand(length, generator=generator).pow(2).mul(4).long().tolist()
    rows, found = table.tolist(), [0, 1]
    for draw in draws:
        found.append(rows[found[-2] % 7][found[-1]][draw])
    return torch.tensor(found)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.ln2 = nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        batch, time, width = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))


class Transformer(nn.Module):
    """A language model of characters; its outputs are (batch * time, vocabulary)."""

    def __init__(self, vocabulary, width=32, depth=2, heads=4, time=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for module in (self.tok, self.pos):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        h = self.tok(x) + self.pos.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln(h)).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self, vocabulary, classes, hidden=48, cell=nn.GRU):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocabulary, 24), cell(24, hidden, batch_first=True)
        self.fc, self.act, self.head = nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, classes)

    def forward(self, x):
        out, _ = self.rnn(self.emb(x))
        return self.head(self.act(self.fc(out.mean(1))))


def mlp(widths, activation=nn.ReLU, norm=None, dropout=0.0, inputs=64, classes=10):
    layers, before = [("flat", nn.Flatten())], inputs
    for i, width in enumerate(widths):
        layers.append((f"fc{i}", nn.Linear(before, width)))
        if norm:
            layers.append((f"norm{i}", nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)))
        layers.append((f"act{i}", activation()))
        if dropout:
            layers.append((f"drop{i}", nn.Dropout(dropout)))
        before = width
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(before, classes))]))


def convnet(widths, activation=nn.ReLU, norm=None, dropout=0.0, classes=10):
    layers, before = [], 1
    for i, width in enumerate(widths):
        layers.append((f"conv{i}", nn.Conv2d(before, width, 3, padding=1)))
        if norm:
            layers.append((f"norm{i}", nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(4, width)))
        layers.append((f"act{i}", activation()))
        if i == 0:
            layers.append(("pool", nn.MaxPool2d(2)))
        before = width
    layers.append(("flat", nn.Flatten()))
    if dropout:
        layers.append(("drop", nn.Dropout(dropout)))
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(before * 16, classes))]))
