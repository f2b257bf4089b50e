"""Get at the numbers of a tensor, whatever its type and layout."""

import torch
from torch import Tensor

__all__ = ["CHUNK", "all_finite", "flatten", "has_numbers", "in_memory_order", "is_plain", "readable"]

CHUNK = 131_072
"""Elements that stay in cache while several reductions look at them."""


def has_numbers(x: Tensor) -> bool:
    """Whether there are numbers to read: not in a meta, fake, nested or functorch-wrapped tensor.

    Examples
    --------
    >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
    (True, False)
    """
    return not (
        x.is_meta
        or x.is_nested
        or type(x).__name__ == "FakeTensor"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Say whether all are dense tensors of one dtype, float32 or float64, with elements, and nobody wraps them.

    Casts of autocast, function transforms and subclasses have derivatives of their own.

    Examples
    --------
    >>> is_plain(torch.ones(2), None), is_plain(torch.ones(2), torch.ones(2, dtype=torch.float64)), is_plain(torch.ones(0))
    (True, False, False)
    """
    given = [t for t in tensors if t is not None]
    return all(
        type(t) in (Tensor, torch.nn.Parameter)
        and t.dtype == given[0].dtype
        and t.dtype in (torch.float32, torch.float64)
        and t.layout is torch.strided
        and has_numbers(t)
        and t.numel() > 0
        and not torch.is_autocast_enabled(t.device.type)
        for t in given
    )


def readable(x: Tensor) -> tuple[Tensor, int] | None:
    """Return the stored numbers of `x` as a real strided tensor, with the number of zeros it does not store.

    Sparse tensors give their coalesced values, quantised ones are dequantised, complex ones give magnitudes,
    integers and booleans become float64, fp8 becomes float32.  ``None`` means that there are no numbers to read, see
    :func:`has_numbers`.
    """
    if not has_numbers(x):
        return None
    implied = 0
    if x.layout is not torch.strided:
        total = x.numel()
        x = x.coalesce().values() if x.layout is torch.sparse_coo else _values(x)
        implied = total - x.numel()
    if x.is_quantized:
        x = x.dequantize()
    if x.is_complex():
        x = x.abs()
    if not x.is_floating_point():
        x = x.double()
    elif x.element_size() == 1:
        x = x.float()
    return x, implied


def all_finite(x: Tensor) -> Tensor | None:
    """Return whether no element is NaN or infinite, 0-d and on the device of `x`; ``None`` for a tensor without numbers.

    The extremes tell: one pass and no copy, where ``isfinite().all()`` costs as much as twenty sums.
    True for no element.

    Examples
    --------
    >>> all_finite(torch.tensor([1.0, 3e38])), all_finite(torch.tensor([1.0, torch.nan]))
    (tensor(True), tensor(False))
    """
    if (read := readable(x.detach())) is None:
        return None
    if not read[0].numel():
        return torch.ones((), dtype=torch.bool, device=read[0].device)
    low, high = torch.aminmax(read[0])
    return torch.isfinite(low) & torch.isfinite(high)


def _values(x: Tensor) -> Tensor:
    return x.values() if hasattr(x, "values") and x.layout is not torch._mkldnn else x.to_dense()  # type: ignore[attr-defined]


def in_memory_order(x: Tensor) -> Tensor:
    """Return `x` with its axes in the order in which they lie in memory, as contiguous as it can be without a copy.

    Examples
    --------
    >>> in_memory_order(torch.ones(2, 3).t()).is_contiguous()
    True
    """
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))


def flatten(x: Tensor) -> Tensor:
    """Return the elements of `x` as one axis, in whatever order needs no copy; expanded tensors are copied."""
    if x.is_contiguous():
        return x.view(-1)
    ordered = in_memory_order(x)
    return ordered.view(-1) if ordered.is_contiguous() else x.reshape(-1)
