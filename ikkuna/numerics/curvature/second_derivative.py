r"""Versions of operations that have a cheap second derivative.

With the mean :math:`\mu` and the variance :math:`\sigma^2` fixed,
:math:`y = w (x - \mu) / \sqrt{\sigma^2 + \epsilon} + b` is a scale and a shift of each channel.
Torch differentiates its backward pass like that of batch statistics, in 24 passes over the input; this version needs
four.

A convolution is linear in its input x and in its kernel w, and its gradients are linear in the gradient g of its
output. With vectors :math:`v_x` and :math:`v_w`, the product with its second derivative has three parts:
:math:`v_x * w + x * v_w` with respect to g, the gradient of the input for g and :math:`v_w` with respect to x, and the
gradient of the kernel for g and :math:`v_x` with respect to w.
Torch computes the last one as a convolution with a kernel as large as the image, which has no fast algorithm.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ikkuna.numerics.elements import is_plain
from ikkuna.support.torch_internals import saves_tensors_elsewhere

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
        return (*_BatchNormBackward.apply(*gradients, *ctx.saved_tensors, ctx.eps, wanted), None, None, None)  # type: ignore[no-untyped-call]


class _BatchNormBackward(torch.autograd.Function):
    """The gradients with respect to input, weight and bias; each is linear in the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, wanted: list[bool]
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, var)
        ctx.eps = eps
        none = mean.new_empty(0)  # the statistics of a batch; CUDA takes no ``None``
        return _aten.native_batch_norm_backward(g, x, weight, mean, var, none, none, False, eps, wanted)

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
            zero, none = torch.zeros_like(mean), mean.new_empty(0)
            by_weight = (
                _aten.native_batch_norm_backward(  # of a weight whose input is the vector: sum of g times vector
                    g, of_x, weight, zero, var, none, none, False, ctx.eps, [False, True, False]
                )[1]
            )
        return by_g, by_x, by_weight, None, None, None, None


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    output: Tensor = _aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return output


def _times(slope: Tensor, weight: Tensor | None) -> Tensor:
    return slope if weight is None else slope * weight.view_as(slope)


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
        return (*_ConvolutionBackward.apply(*gradients, *ctx.saved_tensors, ctx.options, wanted), None)  # type: ignore[no-untyped-call]


class _ConvolutionBackward(torch.autograd.Function):
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
    :mod:`~ikkuna.numerics.curvature.second_derivative` and :mod:`~ikkuna.numerics.curvature.second_derivative`, with the same values
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
