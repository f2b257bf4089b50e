"""The data, networks and loops that the programs share; the training itself is as in the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

__all__ = [
    "Classifier",
    "Program",
    "RecurrentClassifier",
    "Transformer",
    "blobs",
    "classifier",
    "convolutional",
    "graph",
    "image_classifier",
    "images",
    "language_model",
    "loader",
    "many_labels",
    "masks",
    "mlp",
    "plain",
    "program",
    "recurrent",
    "regression",
    "regressor",
    "segmentation",
    "signals",
    "text",
    "token_loss",
]


def plain(program: Program) -> None:
    """Train in the common loop."""
    for _ in range(program.epochs):
        for inputs, labels in program.loader:
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            for scheduler in program.schedulers:
                scheduler.step()


@dataclass
class Program:
    """All that a training script has before its loop."""

    model: nn.Module
    loss: Callable[..., torch.Tensor] | None
    loader: Iterable[Any]
    optimizer: torch.optim.Optimizer
    epochs: int = 8
    loop: Callable[[Program], None] = plain
    schedulers: list[Any] = field(default_factory=list)
    #: further models that the script watches
    others: list[nn.Module] = field(default_factory=list)
    #: what the loop minimises, called with a program and the values of a batch, where it is a function
    objective: Callable[..., torch.Tensor] | None = None


def loader(*tensors: torch.Tensor, batch: int = 32, shuffle: bool = True, **options) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=batch, shuffle=shuffle, **options)


# --- data -------------------------------------------------------------------------------------------------------------


def blobs(rows: int = 768, features: int = 20, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around one centre for each class, and the classes."""
    labels = torch.randint(classes, (rows,))
    return 0.6 * torch.randn(classes, features)[labels] + torch.randn(rows, features) * 0.8, labels


def regression(rows: int = 768, features: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and a smooth function of them with some noise, of shape ``(rows, 1)``."""
    inputs = torch.randn(rows, features)
    hidden = torch.tanh(inputs @ torch.randn(features, 4) / 2)
    return inputs, hidden @ torch.randn(4, 1) + 0.1 * torch.randn(rows, 1)


def many_labels(rows: int = 768, features: int = 20, labels: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and several labels of 0 or 1 for each; about a quarter of them are 1."""
    inputs = torch.randn(rows, features)
    return inputs, (
        inputs @ torch.randn(features, labels) / features**0.5 + 0.2 * torch.randn(rows, labels) > 0.7
    ).float()


def images(rows: int = 512, channels: int = 1, size: int = 12, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images with a bright square in one of four places, which is the class."""
    labels = torch.randint(classes, (rows,))
    pixels = 0.5 * torch.randn(rows, channels, size, size)
    half = size // 2
    for row, label in enumerate(labels.tolist()):
        top, left = (label // 2) * half, (label % 2) * half
        pixels[row, :, top + 1 : top + 4, left + 1 : left + 4] += 1.2
    return pixels, labels


def masks(rows: int = 256, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of one bright rectangle, and its mask, both of shape ``(rows, 1, size, size)``."""
    mask = torch.zeros(rows, 1, size, size)
    for row in range(rows):
        top, left = torch.randint(1, size - 8, (2,)).tolist()
        mask[row, :, top : top + 6, left : left + 7] = 1
    return mask + 0.5 * torch.randn(rows, 1, size, size), mask


def text(rows: int = 384, length: int = 16, words: int = 20) -> torch.Tensor:
    """Return sequences of a Markov chain in which three words may follow a word."""
    following = torch.randint(1, words, (words, 3))
    tokens = torch.randint(1, words, (rows, length + 1))
    for time in range(length):
        tokens[:, time + 1] = following[tokens[:, time], torch.randint(3, (rows,))]
    return tokens


def signals(rows: int = 512, length: int = 14, features: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy waves of one of three frequencies, of shape ``(rows, length, features)``, and the frequency's number."""
    labels = torch.randint(3, (rows,))
    time = torch.arange(length).float()
    phase = torch.rand(rows, 1, features) * 6.28
    waves = torch.sin((labels[:, None, None] + 0.5) * 0.7 * time[None, :, None] + phase)
    return waves + 0.2 * torch.randn(rows, length, features), labels


def graph(nodes: int = 120, features: int = 16, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, a dense symmetric adjacency and the classes of the nodes of a graph with communities."""
    labels = torch.randint(classes, (nodes,))
    same = labels[:, None] == labels[None, :]
    edges = torch.rand(nodes, nodes) < torch.where(same, 0.15, 0.02)
    adjacency = (edges.triu(1) | edges.triu(1).T).float()
    return 0.5 * torch.randn(classes, features)[labels] + torch.randn(nodes, features), adjacency, labels


# --- networks ---------------------------------------------------------------------------------------------------------


def mlp(features: int, outputs: int, width: int = 48, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, width), act(), nn.Linear(width, width), act(), nn.Linear(width, outputs))


class Classifier(nn.Module):
    """Convolutions and a head."""

    def __init__(self, channels: int = 1, classes: int = 4):
        super().__init__()
        self.features = convolutional(channels)
        self.head = nn.Linear(16 * 9, classes)

    def forward(self, pixels):
        return self.head(self.features(pixels).flatten(1))


def convolutional(channels: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int, causal: bool = True, dim: int = -1):
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal, self.dim, self.scale = causal, dim, width**-0.5

    def mask(self, length: int) -> torch.Tensor:
        return torch.ones(length, length).triu(1).bool()

    def forward(self, x):
        queries, keys, values = self.mix(x).chunk(3, -1)
        scores = queries @ keys.transpose(-2, -1) * self.scale
        if self.causal:
            scores = scores.masked_fill(self.mask(x.shape[1]), -1e9)
        return self.out(scores.softmax(self.dim) @ values)


class Block(nn.Module):
    def __init__(self, width: int, **options):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, **options)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self, words: int = 20, width: int = 24, length: int = 16, layers: int = 2, **options):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RecurrentClassifier(nn.Module):
    def __init__(self, features: int = 3, classes: int = 3, kind: type[nn.Module] = nn.GRU):
        super().__init__()
        self.rnn, self.head = kind(features, 24, batch_first=True), nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- whole programs ---------------------------------------------------------------------------------------------------


def program(model, loss, data, rate: float, kind=torch.optim.Adam, **options) -> Program:
    return Program(model, loss, data, kind(model.parameters(), lr=rate), **options)


def classifier(model=None, data=None, rate: float = 3e-3, loss=None, **options) -> Program:
    model = mlp(20, 5) if model is None else model
    data = loader(*blobs()) if data is None else data
    return program(model, loss or nn.CrossEntropyLoss(), data, rate, **options)


def regressor(model=None, data=None, rate: float = 3e-3, loss=None, **options) -> Program:
    model = mlp(12, 1) if model is None else model
    data = loader(*regression()) if data is None else data
    return program(model, loss or nn.MSELoss(), data, rate, **options)


def image_classifier(model=None, data=None, rate: float = 3e-3, loss=None, **options) -> Program:
    model = Classifier() if model is None else model
    data = loader(*images()) if data is None else data
    return program(model, loss or nn.CrossEntropyLoss(), data, rate, **options)


def segmentation(model=None, data=None, rate: float = 3e-3, loss=None, **options) -> Program:
    if model is None:
        layers = [
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 1, 1),
        ]
        model = nn.Sequential(*layers)
    data = loader(*masks(), batch=16) if data is None else data
    return program(model, loss or nn.BCEWithLogitsLoss(), data, rate, **options)


def language_model(model=None, data=None, rate: float = 3e-3, loss=None, **options) -> Program:
    model = Transformer() if model is None else model
    if data is None:
        tokens = text()
        data = loader(tokens[:, :-1], tokens[:, 1:], batch=24)
    return program(model, loss or token_loss, data, rate, **options)


def recurrent(model=None, data=None, rate: float = 5e-3, loss=None, **options) -> Program:
    model = RecurrentClassifier() if model is None else model
    data = loader(*signals()) if data is None else data
    return program(model, loss or nn.CrossEntropyLoss(), data, rate, **options)
