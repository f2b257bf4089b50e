"""Replacement of operations by versions that have a cheap second derivative."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ikkuna.numerics.curvature.batch_norm import batch_norm
from ikkuna.numerics.curvature.convolution import convolution
from ikkuna.torch_internals import saves_tensors_elsewhere

__all__ = ["twice_differentiable"]

_Replacement = Callable[..., Tensor | None]
_REPLACEMENTS: dict[Callable[..., Any], _Replacement] = {
    functional.batch_norm: batch_norm,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    torch.conv3d: convolution,
}


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Replace operations inside a ``with`` block by versions that have a cheap second derivative.

    Attention runs in its plain form, because the fused kernels have no second derivative.
    Calls of :func:`torch.nn.functional.batch_norm` and of convolutions are replaced by those of
    :mod:`~ikkuna.numerics.curvature.batch_norm` and :mod:`~ikkuna.numerics.curvature.convolution`, with the same values
    and gradients. No module is changed.  Use it around the forward pass, the backward pass and products, because
    checkpoints recompute their forward pass.  Operations inside checkpoints are not replaced.

    Examples
    --------
    >>> x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    >>> with twice_differentiable():
    ...     value = functional.conv1d(x, x).sum() ** 2  # (x·x)², with the gradient 4 (x·x) x
    ...     gradient = torch.autograd.grad(value, x, create_graph=True)[0]
    >>> gradient.flatten().tolist()
    [20.0, 40.0]
    >>> torch.autograd.grad(gradient[0, 0, 0], x)[0].flatten().tolist()  # 4 (x·x) + 8 x_1², and 8 x_1 x_2
    [28.0, 16.0]
    """
    with sdpa_kernel(SDPBackend.MATH), _Replacing():
        yield


class _Replacing(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # the second run of a checkpoint must save the same tensors as its first; inside of torch.autograd.grad torch calls no mode for it
        replacement = None if saves_tensors_elsewhere() else _REPLACEMENTS.get(func)
        output = replacement(*args, **(kwargs or {})) if replacement else None
        return func(*args, **(kwargs or {})) if output is None else output
