"""Access to the numbers of tensors of every dtype and layout."""

import torch
from torch import Tensor

__all__ = ["CHUNK", "all_finite", "flatten", "has_numbers", "in_memory_order", "is_plain", "readable", "stored"]

CHUNK = 131_072
"""The number of elements that stay in the cache during several reductions."""


def has_numbers(x: Tensor) -> bool:
    """Return whether `x` has numbers that can be read; a meta, fake, nested or functorch-wrapped tensor has none.

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
    """Return whether all are non-empty dense tensors of one dtype, float32 or float64, without a wrapper.

    Autocast, function transforms and subclasses have their own derivatives, so tensors under these are not plain.

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
    """Return the stored numbers of `x` as a real strided tensor, and the number of zeros that are not stored.

    The result of a sparse tensor is its coalesced values, of a complex tensor its magnitudes.
    Quantised tensors are dequantised; integers and booleans become float64, fp8 becomes float32.
    The result is ``None`` if there are no numbers, see :func:`has_numbers`.
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


def stored(x: Tensor) -> Tensor:
    """Return `x` with its elements in memory; a lazy negative and a lazy zero are copied.

    Examples
    --------
    >>> stored(torch.tensor([1 + 2j]).conj().imag).is_neg()
    False
    """
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def all_finite(x: Tensor) -> Tensor | None:
    """Return whether all elements are finite, 0-d and on the device of `x`; ``None`` for a tensor without numbers.

    It checks the extrema in one pass without a copy; ``isfinite().all()`` costs as much as twenty sums.
    An empty tensor is finite.

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
    """Return `x` with its axes in memory order, which is contiguous if that is possible without a copy.

    Examples
    --------
    >>> in_memory_order(torch.ones(2, 3).t()).is_contiguous()
    True
    """
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))


def flatten(x: Tensor) -> Tensor:
    """Return the elements of `x` as one axis, in an order that needs no copy; expanded tensors are copied."""
    if x.is_contiguous():
        return x.view(-1)
    ordered = in_memory_order(x)
    return ordered.view(-1) if ordered.is_contiguous() else x.reshape(-1)
