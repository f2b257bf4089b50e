"""Restores what a forward pass of the user's code can change in a model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["restored"]

_CONTAINERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def restored(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Restore attributes, parameters and buffers of every module in `owners` after the body.

    Some modules initialise their parameters from the first batch, count their calls, or keep tensors for later.
    Attributes are restored by identity; a change inside a user's list or dictionary stays.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> with restored([model]):
    ...     model.calls = 3
    ...     _ = nn.init.zeros_(model.weight)
    >>> hasattr(model, "calls"), bool(model.weight == 0)
    (False, False)
    """
    modules = {id(module): module for owner in owners for module in owner.modules()}.values()
    attributes = [(module, dict(vars(module)), _contents(module)) for module in modules]
    tensors = {id(t): t for module in modules for t in module._parameters.values() if t is not None}.values()
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for module, before, contents in attributes:
            _restore(vars(module), before)
            for name, content in contents.items():
                _restore(before[name], content)
        for tensor, value in values:
            _restore_values(tensor, value)


def _contents(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)[name]) for name in _CONTAINERS}


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
        now.clear()
        now.update(before)


def _restore_values(tensor: Tensor, value: Tensor) -> None:
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, value))
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.nan_to_num(), b.nan_to_num()):
        with torch.no_grad():
            tensor.copy_(value)
