"""Compute the loss of a model, given by a function or guessed from shapes that allow only one loss."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ikkuna.errors import ConfigError
from ikkuna.probe.capture import first_tensor

__all__ = ["as_tensor", "compute_loss", "run_model"]


def as_tensor(value: Any, model: nn.Module) -> Any:
    """Return arrays, lists and numbers as tensors on the device of the model, and other values unchanged.

    Floating-point data gets the dtype of the model's parameters.
    """
    if isinstance(value, Tensor) or not (hasattr(value, "__array__") or isinstance(value, list | int | float)):
        return value
    tensor = torch.as_tensor(value)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return tensor
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def run_model(model: nn.Module, x: Any) -> Any:
    """Return ``model(x)``; a tuple is passed as several arguments, a dictionary as named arguments."""
    if isinstance(x, dict):
        return model(**{name: as_tensor(value, model) for name, value in x.items()})
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return model(*(as_tensor(value, model) for value in x))
    return model(as_tensor(x, model))


def compute_loss(output: Any, y: Any, loss_fn: Callable[..., Any] | None, sample_weight: Any = None) -> Tensor:
    """Return the loss of the `output` of a model.

    Without a `loss_fn`, integer targets mean cross entropy, targets with the shape of the output mean the mean squared
    error, and an output with a single element is itself the loss.

    Parameters
    ----------
    output : Any
        The output of the model.
    y : Any
        The targets, or ``None``.
    loss_fn : callable, optional
        Called with the output, and with `y` if that is given.
    sample_weight : sequence of float, optional
        (sample,).  The result is the mean over all elements, each multiplied by the weight of its sample.

    Raises
    ------
    ConfigError
        If no loss can be guessed, if the loss has more than one element, or if it cannot be weighted.
    """
    if loss_fn is None:
        loss_fn, output = _guess(output, y)
    if sample_weight is not None:
        loss = _weighted(loss_fn, output, y, sample_weight)
    else:
        loss = loss_fn(output) if y is None else loss_fn(output, y)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the loss must be a tensor with one number, got {got}")
    return loss.reshape(())


def _guess(output: Any, y: Any) -> tuple[Callable[..., Any], Tensor]:
    first = first_tensor(output)
    if y is None:
        if first.numel() == 1:
            return lambda value: value, first
        raise ConfigError("the output of the model is not a loss; give loss_fn, targets y or a closure")
    if isinstance(y, Tensor) and not y.is_floating_point():
        if y.shape == first.shape[:-1]:
            return _last_axis_cross_entropy, first
        if y.shape == first.shape[:1] + first.shape[2:]:
            return functional.cross_entropy, first
    elif isinstance(y, Tensor) and y.shape == first.shape:
        return functional.mse_loss, first
    shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
    raise ConfigError(f"no loss can be guessed for output {tuple(first.shape)} and targets {shape}; give loss_fn")


def _last_axis_cross_entropy(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    loss = functional.cross_entropy(output.flatten(0, -2), y.flatten(), reduction=reduction)
    return loss.view(y.shape) if reduction == "none" else loss


def _weighted(loss_fn: Callable[..., Any], output: Any, y: Any, sample_weight: Any) -> Tensor:
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        single = copy.copy(loss_fn)
        single.__dict__["reduction"] = "none"
        losses = single(output, y)
    elif "reduction" in inspect.signature(loss_fn).parameters:
        losses = loss_fn(output, y, reduction="none")
    else:
        losses = loss_fn(output) if y is None else loss_fn(output, y)
    weight = torch.as_tensor(sample_weight)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != weight.shape[0]:
        raise ConfigError("sample_weight needs a loss_fn that returns shape (sample, …) or has an argument `reduction`")
    weight = weight.to(losses.device, losses.dtype).view(-1, *[1] * (losses.ndim - 1))
    return (losses * weight).mean()
