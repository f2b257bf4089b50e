"""Trains a model of another project three times: alone, observed by ikkuna, and by the reference; and compares them."""

import copy
import importlib.util
import logging
import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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
from tests.real_models.reference import KINDS, Key, Reference

__all__ = ["RealModel", "Run", "check"]

STEPS = 3
_RELATIVE = 2e-6
_ROUNDED = 2.0**-23  # updates are differences in single precision

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
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor] = _loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    needs: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    skipped: int = 0
    tolerance: float = _RELATIVE


@dataclass
class Run:
    """What a training run leaves behind.

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
    for _ in range(STEPS):
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


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the log lines of ikkuna of level WARNING and above."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ikkuna")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _exporter(model: nn.Module, backend: RecordingBackend) -> Exporter:
    bus = MessageBus("real model")
    exporter = Exporter(message_bus=bus)
    exporter.add_modules(model)
    for kind in KINDS:
        for make in (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber):
            bus.register_subscriber(make(kind, backend=backend))
    return exporter


def _published(backend: RecordingBackend) -> dict[Key, dict[str, float]]:
    found: dict[Key, dict[str, float]] = {}
    for series, value, step in backend.values:
        kind, _, statistic = series.kind.rpartition("_")
        statistics = found.setdefault((kind, series.name, step), {})
        assert statistic not in statistics, "published twice"
        statistics[statistic] = value
    return found


def check(case: RealModel) -> None:
    """Train a model alone, observed by ikkuna and by the reference, and compare bits and numbers.

    The warnings of other projects are ignored; one that ikkuna causes is an error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="ikkuna")
        _check(case)


def _check(case: RealModel) -> None:
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install --no-deps --requirement requirements-slow.txt")
    alone, _ = _train(case, lambda model, optimizer: None)
    backend = RecordingBackend()
    with _logged() as lines:
        watched, exporter = _train(case, lambda model, optimizer: _exporter(model, backend))
        exporter.close()
    health = exporter.health()
    expected, reference = _train(case, Reference)
    _require_none(_differences(vars(expected), vars(alone)), "bits that the reference changes")
    _require_none(_differences(vars(watched), vars(alone)), "bits that ikkuna changes")
    _require_none([line for line in lines if not line.startswith(case.told or ("\0",))], "log lines")
    assert (health.errors, health.dropped, health.disabled, health.skipped) == (0, 0, (), case.skipped)
    assert health.steps == STEPS
    published = _published(backend)
    _require_none(reference.seen.keys() - published.keys(), "missing series")
    _require_none(published.keys() - reference.seen.keys(), "series of nothing")
    _require_none([line for key in reference.seen for line in _errors(case, key, reference, published[key])], "errors")


def _require_none(found: Collection[Any], what: str) -> None:
    assert not found, f"{len(found)} {what}: {sorted(map(str, found))[:10]}"


def _errors(case: RealModel, key: Key, reference: Reference, found: dict[str, float]) -> Iterator[str]:
    """Yield a line for each statistic that differs; the error of a mean is relative to the root mean square."""
    observation = reference.seen[key]
    expected = observation.statistics()
    assert found.keys() == expected.keys(), key
    for statistic, value in expected.items():
        shown = found[statistic]
        if statistic in ("min", "max"):
            allowed = _ROUNDED * abs(value) if key[0].endswith("_updates") else 0.0
        else:
            scale = {"mean": observation.scale, "norm2": value, "variance": value + 0.1 * observation.scale**2}
            allowed = case.tolerance * scale[statistic]
        if not (shown == value or abs(shown - value) <= allowed or (math.isnan(shown) and math.isnan(value))):
            yield f"{statistic} of {key} is {shown}, should be {value}"


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two nested structures differ by any bit."""
    if isinstance(one, Tensor):
        return [] if isinstance(other, Tensor) and _same_bits(one, other) else [path]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [path]
        return [line for key in one for line in _differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in _differences(*pair, f"{path}.{i}")
        ]
    return [] if one == other else [path]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if hasattr(one, "tensor_impl"):  # quantised by torchao, which cannot compare
        one, other = one.dequantize(), other.dequantize()
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal = equal | (one.isnan() & other.isnan())
    return bool(equal.all())
