"""A small training with a planted mistake, for the demo and for the test measurement."""

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.export.watch import watch


def _data() -> tuple[Tensor, Tensor]:
    """Return four clusters of points in 16 dimensions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4, device="cpu").repeat(128)
    centres = torch.randn(4, 16, generator=generator, device="cpu")
    return centres[labels] + 0.4 * torch.randn(512, 16, generator=generator, device="cpu"), labels


def _model() -> nn.Module:
    """Return a network with one layer whose units are all dead: its bias is too negative."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = (16, 64, 64, 64, 64)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    layers["classifier"] = nn.Linear(64, 4)
    model = nn.Sequential(layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
        layers["hidden3"].get_parameter("bias").fill_(-20.0)
    return model


def train_sample(log_dir: Path, steps: int = 200, **options: Any) -> None:
    """Train a network with a dead layer, watched with its loss.

    Parameters
    ----------
    log_dir : Path
        The directory of the runs.
    steps : int
        The number of steps.
    **options : Any
        Further arguments of `ikkuna.watch`.
    """
    model, loss = _model(), nn.CrossEntropyLoss()
    points, labels = _data()
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(1), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, loss=loss, log_dir=log_dir, **options):
        for step in range(steps):
            rows = order[torch.arange(step * 32, step * 32 + 32, device="cpu") % len(order)]
            optimizer.zero_grad()
            loss(model(points[rows]), labels[rows]).backward()
            optimizer.step()
