r"""Batch norm in evaluation mode with a cheap second derivative.

With the mean :math:`\mu` and the variance :math:`\sigma^2` fixed,
:math:`y = w (x - \mu) / \sqrt{\sigma^2 + \epsilon} + b` is a scale and a shift of each channel.
Torch differentiates its backward pass like that of batch statistics, in 24 passes over the input; this version needs
four.
"""

from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.elements import is_plain

__all__ = ["batch_norm"]

_aten = torch.ops.aten


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Return the same as :func:`torch.nn.functional.batch_norm`, or ``None`` if torch's own version must be used.

    That is the case if the statistics are those of the batch or require a gradient, or if a tensor is not plain (see
    :func:`~ikkuna.numerics.elements.is_plain`).

    Examples
    --------
    >>> batch_norm(torch.tensor([[3.0], [5.0]]), torch.tensor([1.0]), torch.tensor([4.0]), eps=0.0)
    tensor([[1.],
            [2.]])
    """
    if (
        training
        or running_mean is None
        or running_var is None
        or running_mean.requires_grad
        or running_var.requires_grad
    ):
        return None
    if not is_plain(input, running_mean, running_var, weight, bias):
        return None
    output: Tensor = _BatchNorm.apply(input, weight, bias, running_mean, running_var, eps)  # type: ignore[no-untyped-call]
    return output


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps = eps
        return _scaled(x, weight, bias, mean, var, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = list(ctx.needs_input_grad[:3])
        return (*_Backward.apply(*gradients, *ctx.saved_tensors, ctx.eps, wanted), None, None, None)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """The gradients with respect to input, weight and bias; each is linear in the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, wanted: list[bool]
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, var)
        ctx.eps = eps
        return _aten.native_batch_norm_backward(g, x, weight, mean, var, None, None, False, eps, wanted)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor | None) -> Any:
        of_x, of_weight, of_bias = vectors
        g, x, weight, mean, var = ctx.saved_tensors
        need_g, need_x, need_weight = ctx.needs_input_grad[:3]
        by_g = by_x = by_weight = None
        slope = (var + ctx.eps).rsqrt().view(-1, *[1] * (x.ndim - 2))
        if need_g and of_weight is None and of_bias is None:
            by_g = None if of_x is None else of_x * _times(slope, weight)
        elif need_g:
            scale = torch.zeros_like(mean) if of_weight is None else of_weight
            by_g = _scaled(x, scale, of_bias, mean, var, ctx.eps)
            by_g = by_g if of_x is None else by_g.addcmul_(of_x, _times(slope, weight))
        if need_x and of_weight is not None:
            by_x = g * _times(slope, of_weight)
        if need_weight and of_x is not None:
            zero = torch.zeros_like(mean)  # the gradient of a weight whose input is the vector: sum of g times vector
            by_weight = _aten.native_batch_norm_backward(
                g, of_x, weight, zero, var, None, None, False, ctx.eps, [False, True, False]
            )[1]
        return by_g, by_x, by_weight, None, None, None, None


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    output: Tensor = _aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return output


def _times(slope: Tensor, weight: Tensor | None) -> Tensor:
    return slope if weight is None else slope * weight.view_as(slope)
