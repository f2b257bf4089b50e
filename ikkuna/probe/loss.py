"""The loss a user means: given, or guessed from the shapes where only one makes sense."""

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
    """Return arrays and lists as tensors on the model's device, of its dtype if they hold fractions; others as is."""
    if isinstance(value, Tensor) or not (hasattr(value, "__array__") or isinstance(value, list | int | float)):
        return value
    tensor = torch.as_tensor(value)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return tensor
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def run_model(model: nn.Module, x: Any) -> Any:
    """Return ``model(x)``; a tuple is taken for several arguments, a dictionary for named ones."""
    if isinstance(x, dict):
        return model(**{name: as_tensor(value, model) for name, value in x.items()})
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return model(*(as_tensor(value, model) for value in x))
    return model(as_tensor(x, model))


def compute_loss(output: Any, y: Any, loss_fn: Callable[..., Any] | None, sample_weight: Any = None) -> Tensor:
    """Return the loss of a model's `output`.

    A `loss_fn` is called with the output, and with `y` if that is given.  Without one, whole-number targets mean cross
    entropy, targets of the output's shape the mean squared error, and an output that is one number is itself the loss.
    With `sample_weight`: (sample,) it is the mean over all elements, each multiplied by its sample's weight.

    Raises
    ------
    ConfigError
        If no loss can be guessed, it is not one number, or it cannot be weighted.
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
        raise ConfigError("give loss_fn, or targets y, or a closure: the model's output is not a loss")
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
        raise ConfigError(
            "sample_weight needs a loss for each sample: of shape (sample, …), or with a `reduction` argument"
        )
    weight = weight.to(losses.device, losses.dtype).view(-1, *[1] * (losses.ndim - 1))
    return (losses * weight).mean()
