"""Runs a model over data without an effect on training."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.numerics.elements import on_device
from ikkuna.undisturbed import run_undisturbed

__all__ = ["run"]


def run(
    model: nn.Module,
    loss: nn.Module | None,
    batches: Iterable[Any],
    visit: Callable[[Any, Any], object] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Run the model over batches and restore its state and all random states afterwards.

    Parameters
    ----------
    model : nn.Module
        The model; it runs in evaluation mode.
    loss : nn.Module, optional
        Called with outputs and labels.
    batches : iterable
        Pairs ``(inputs, labels)``, or inputs.
    visit : callable, optional
        Called with outputs and labels.
    call : callable, optional
        ``call(model, inputs)`` returns the outputs; by default a tuple or dict of inputs becomes the arguments of the model.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def visit_all() -> None:
        for batch in batches:
            pair = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
            inputs, labels = (_to(part, device) for part in pair)
            outputs = (call or _call)(model, inputs)
            if loss is not None and isinstance(outputs, Tensor) and isinstance(labels, Tensor):
                loss(outputs, labels)
            if visit is not None:
                visit(outputs, labels)

    run_undisturbed(visit_all, model, batches)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return on_device(value, device) if value.is_cpu else value.to(device)
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to(part, device) for part in value)
    return value
