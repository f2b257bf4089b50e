"""The modules of torch, each with the inputs that torch's own tests sample."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ikkuna.export import Exporter
from ikkuna.export.attachment import Health
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import MinMaxSubscriber, NormSubscriber
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

__all__ = ["check_evaluation", "check_training", "module_infos"]

STEPS = 2
_STATISTICS = ("norm2", "min", "max")


@cache
def module_infos() -> dict[str, Any]:
    """Return torch's list of modules, by name."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


class _Holder(nn.Module):
    """Holds the sampled module, and a parameter, because not every module has one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        return self.inner(*args, **kwargs), self.gain * 1.0


@dataclass
class _Run:
    """Results of a run of a module: outputs, the state of the module, and the gradients of parameters and inputs."""

    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    random: Tensor | None = None


def _samples(name: str, training: bool) -> list[Any]:
    info = module_infos()[name]
    torch.manual_seed(0)
    made: list[Any] = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=training, training=training
    )
    return made


def _sampled(name: str, training: bool, most: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each input three times, with tensors of its own, because modules may change them; some of more than `most`."""
    three = list(zip(*(_samples(name, training) for _ in range(3)), strict=True))
    yield from three[:: -(-len(three) // most)]


def _module(name: str, sample: Any) -> nn.Module:
    torch.manual_seed(1)
    made = sample.constructor_input
    module: nn.Module = module_infos()[name].module_cls(*made.args, **made.kwargs)
    return _Holder(module.to(torch.float32))


def _train(name: str, sample: Any, watch: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> tuple[_Run, Any]:
    model = _module(name, sample).train()
    inputs = tree_map(_leaf, (sample.forward_input.args, sample.forward_input.kwargs))
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    watcher, run = watch(model, optimizer), _Run()
    for _ in range(STEPS):
        optimizer.zero_grad()
        output, loss = model(*tree_map(_not_a_leaf, inputs))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                loss = loss + tensor.abs().square().mean()
        loss.backward()
        optimizer.step()
        run.outputs.append(tree_map(_copy, output))
        run.gradients.append(tree_map(_copy, [x.grad for x in (*model.parameters(), *leaves)]))
    run.state = copy.deepcopy(dict(model.state_dict()))
    run.random = torch.get_rng_state()
    return run, watcher


def _leaf(value: Any) -> Any:
    """Return an input without the graph that has computed it."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def _not_a_leaf(value: Any) -> Any:
    """Return a copy of an input, because some modules change their inputs in place."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _exporter(model: nn.Module, backend: RecordingBackend, tag: str) -> Exporter:
    bus = MessageBus("torch's modules")
    exporter = Exporter(message_bus=bus)
    exporter.add_modules(model)
    for kind in KINDS:
        for make in (NormSubscriber, MinMaxSubscriber):
            bus.register_subscriber(make(kind, backend=backend, tag=tag))
    return exporter


def _compare(backend: RecordingBackend, health: Health, reference: Reference) -> None:
    assert (health.errors, health.dropped, health.disabled, health.skipped) == (0, 0, (), reference.unreadable)
    found = published(backend)
    require_none(reference.seen.keys() - found.keys(), "missing series")
    require_none(found.keys() - reference.seen.keys(), "series of nothing")
    wrong = (errors(key, seen, found[key], RELATIVE_ERROR, _STATISTICS) for key, seen in reference.seen.items())
    require_none([line for lines in wrong for line in lines], "errors")


def check_training(name: str, most: int) -> None:
    """Train a module on at most `most` of its sampled inputs, and compare bits and numbers."""
    with others_may_warn():
        for samples in _sampled(name, True, most):
            _check_training(name, *samples)


def _check_training(name: str, one: Any, other: Any, third: Any) -> None:
    alone, _ = _train(name, one, lambda model, optimizer: None)
    backend = RecordingBackend()
    with logged() as lines:
        watched, exporter = _train(name, other, lambda model, optimizer: _exporter(model, backend, "training"))
        exporter.close()
    require_none(differences(vars(watched), vars(alone)), f"bits that ikkuna changes with input {one.desc!r}")
    require_none(lines, "log lines")
    assert exporter.health().steps == STEPS
    _compare(backend, exporter.health(), _train(name, third, Reference)[1])


def _evaluate(name: str, sample: Any, watch: Callable[[nn.Module], Any]) -> tuple[_Run, Any]:
    model = _module(name, sample).eval()
    watcher, run = watch(model), _Run()
    with torch.no_grad():
        output, _ = model(sample.forward_input.args, sample.forward_input.kwargs)
    run.outputs.append(tree_map(_copy, output))
    run.state = copy.deepcopy(dict(model.state_dict()))
    run.random = torch.get_rng_state()
    return run, watcher


def check_evaluation(name: str, most: int) -> None:
    """Run a module on at most `most` of its sampled inputs in evaluation mode, and compare bits and numbers."""
    with others_may_warn():
        for samples in _sampled(name, False, most):
            _check_evaluation(name, *samples)


def _check_evaluation(name: str, one: Any, other: Any, third: Any) -> None:
    alone, _ = _evaluate(name, one, lambda model: None)
    backend = RecordingBackend()

    def watch(model: nn.Module) -> Exporter:
        exporter = _exporter(model, backend, "testing")
        exporter.test()
        return exporter

    with logged() as lines:
        watched, exporter = _evaluate(name, other, watch)
        exporter.close()
    require_none(differences(vars(watched), vars(alone)), f"bits that ikkuna changes with input {one.desc!r}")
    require_none(lines, "log lines")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    _compare(backend, exporter.health(), _evaluate(name, third, lambda model: Reference(model, optimizer))[1])
