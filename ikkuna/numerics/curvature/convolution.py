r"""Convolutions whose second derivative uses the same operations as the first.

A convolution is linear in its input x and in its kernel w, and its gradients are linear in the gradient g of its
output. With vectors :math:`v_x` and :math:`v_w`, the product with its second derivative has three parts:
:math:`v_x * w + x * v_w` with respect to g, the gradient of the input for g and :math:`v_w` with respect to x, and the
gradient of the kernel for g and :math:`v_x` with respect to w.
Torch computes the last one as a convolution with a kernel as large as the image, which has no fast algorithm.
"""

from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.elements import is_plain

__all__ = ["convolution"]

_aten = torch.ops.aten
_Numbers = int | tuple[int, ...] | list[int]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Numbers = 1,
    padding: _Numbers | str = 0,
    dilation: _Numbers = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return the same as :func:`torch.conv1d`, ``conv2d`` or ``conv3d``, or ``None`` if torch's own version must be used.

    That is the case for inputs without a batch, for padding given as a string, and if a tensor is not plain (see
    :func:`~ikkuna.numerics.elements.is_plain`).

    Examples
    --------
    >>> convolution(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[1.0, 1.0]]]))
    tensor([[[3., 5.]]])
    """
    if isinstance(padding, str) or input.ndim != weight.ndim or not is_plain(input, weight, bias):
        return None
    axes = weight.ndim - 2
    options = (*(_each(n, axes) for n in (stride, padding, dilation)), False, [0] * axes, groups)
    output: Tensor = _Convolution.apply(input, weight, bias, options)  # type: ignore[no-untyped-call]
    return output


def _each(numbers: _Numbers, axes: int) -> list[int]:
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * axes if len(given) == 1 else given


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return _aten.convolution(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = list(ctx.needs_input_grad[:3])
        return (*_Backward.apply(*gradients, *ctx.saved_tensors, ctx.options, wanted), None)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """The gradients with respect to input, kernel and bias."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, options: Any, wanted: list[bool]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight)
        ctx.options = options
        return _gradients(g, x, weight, options, wanted)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor | None) -> Any:
        of_x, of_weight, of_bias = vectors
        g, x, weight = ctx.saved_tensors
        need_g, need_x, need_weight = ctx.needs_input_grad[:3]
        by_g = by_x = by_weight = None
        if need_g:
            pairs = [(of_x, weight)] * (of_x is not None) + [(x, of_weight)] * (of_weight is not None)
            parts = [_aten.convolution(*pair, None if i else of_bias, *ctx.options) for i, pair in enumerate(pairs)]
            if not parts and of_bias is not None:
                parts = [of_bias.view(-1, *[1] * (x.ndim - 2)).expand_as(g)]
            by_g = parts[0].add_(parts[1]) if len(parts) > 1 else parts[0]
        if need_x and of_weight is not None:
            by_x = _gradients(g, x, of_weight, ctx.options, [True, False, False])[0]
        if need_weight and of_x is not None:
            by_weight = _gradients(g, of_x, weight, ctx.options, [False, True, False])[1]
        return by_g, by_x, by_weight, None, None


def _gradients(g: Tensor, x: Tensor, weight: Tensor, options: Any, wanted: list[bool]) -> Any:
    return _aten.convolution_backward(g, x, weight, [weight.shape[0]], *options, wanted)
