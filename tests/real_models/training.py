"""Trains a model of another project three times: alone, observed by ikkuna, and by the reference; and compares them."""

import copy
import importlib.util
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import MeanSubscriber, MinMaxSubscriber, NormSubscriber, VarianceSubscriber
from ikkuna.testing import RecordingBackend
from tests.real_models.comparison import (
    RELATIVE_ERROR,
    differences,
    errors,
    logged,
    others_may_warn,
    published,
    require_none,
)
from tests.real_models.reference import KINDS, Reference

__all__ = ["RealModel", "Run", "check"]

Batch = Mapping[str, Any]


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().square().mean()
    loss = output["loss"] if isinstance(output, Mapping) else output.loss
    assert isinstance(loss, Tensor)
    return loss


@dataclass(frozen=True)
class RealModel:
    """A model of another project, and how it is trained.

    Parameters
    ----------
    make : callable
        Returns the model, with few parameters.
    batch : callable
        Returns the keyword arguments of one call of the model.
    loss : callable
        Returns the loss from the output; by default its attribute ``loss``, or the mean square of a tensor.
    optimizer : callable
        Returns the optimizer of some parameters.
    needs : tuple of str
        The packages that it needs beyond those of the ordinary tests.
    told : tuple of str
        Beginnings of the log lines that are expected.
    skipped : int
        Number of tensors without numbers.
    tolerance : float
        The relative error of norms, means and variances.
    steps : int
        The number of steps.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor] = _loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    needs: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    skipped: int = 0
    tolerance: float = RELATIVE_ERROR
    steps: int = 3


@dataclass
class Run:
    """Results of a training run.

    Parameters
    ----------
    losses : list of Tensor
        The loss of each step.
    state : dict
        Weights, buffers and optimizer state.
    gradients : list
        The gradients of the last step.
    random : Tensor
        The state of the random generator.
    """

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    gradients: list[Tensor | None] = field(default_factory=list)
    random: Tensor | None = None


def _train(case: RealModel, watch: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> tuple[Run, Any]:
    """Train with a seed of its own; ``watch`` is called before the first step, and what it returns is returned."""
    _seed(7)
    model = case.make().train()
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    _seed(8)
    watcher, run = watch(model, optimizer), Run()
    for _ in range(case.steps):
        batch = case.batch()
        optimizer.zero_grad()
        loss = case.loss(model(**batch))
        loss.backward()
        optimizer.step()
        run.losses.append(loss.detach().clone())
    run.state = copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]})
    run.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    run.random = torch.get_rng_state()
    return run, watcher


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # some models mask their inputs with it
    torch.manual_seed(seed)


def _exporter(model: nn.Module, backend: RecordingBackend) -> Exporter:
    bus = MessageBus("real model")
    exporter = Exporter(message_bus=bus)
    exporter.add_modules(model)
    for kind in KINDS:
        for make in (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber):
            bus.register_subscriber(make(kind, backend=backend))
    return exporter


def check(case: RealModel) -> None:
    """Train a model alone, observed by ikkuna and by the reference, and compare bits and numbers.

    The warnings of other projects are ignored; one that ikkuna causes is an error.
    """
    with others_may_warn():
        _check(case)


def _check(case: RealModel) -> None:
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install --no-deps --requirement requirements-slow.txt")
    alone, _ = _train(case, lambda model, optimizer: None)
    backend = RecordingBackend()
    with logged() as lines:
        watched, exporter = _train(case, lambda model, optimizer: _exporter(model, backend))
        exporter.close()
    health = exporter.health()
    expected, reference = _train(case, Reference)
    require_none(differences(vars(expected), vars(alone)), "bits that the reference changes")
    require_none(differences(vars(watched), vars(alone)), "bits that ikkuna changes")
    require_none([line for line in lines if not line.startswith(case.told or ("\0",))], "log lines")
    assert (health.errors, health.dropped, health.disabled, health.skipped) == (0, 0, (), case.skipped)
    assert health.steps == case.steps
    found = published(backend)
    require_none(reference.seen.keys() - found.keys(), "missing series")
    require_none(found.keys() - reference.seen.keys(), "series of nothing")
    require_none(
        [line for key, seen in reference.seen.items() for line in errors(key, seen, found[key], case.tolerance)],
        "errors",
    )
