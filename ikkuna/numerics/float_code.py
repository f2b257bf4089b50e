r"""A histogram whose bins are the leading bits of a float: no range to agree on, fixed size, merged by addition.

The bits of a float32 are sign, exponent and mantissa, and magnitudes are ordered as these bits are.
With :math:`u` the bits of :math:`x`, :math:`K = 256 \cdot 2^m` and :math:`\mu = (u \mathbin\& \mathtt{7fffffff}_{16})
\gg (23 - m)`,
the code of :math:`x` is :math:`K + \mu` for a positive sign bit and :math:`K - 1 - \mu` for a negative one.
Codes never decrease in :math:`x`; a bin is :math:`2^{-m}` of its value wide.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import CHUNK, flatten, readable

__all__ = ["bin_edges", "codes", "half_size", "sample"]

_DEVICE_CHUNK = 1 << 22  # bounds the int64 index a device needs to 32 MiB


def codes(x: Tensor, m: int = 3) -> Tensor:
    r"""Count the float codes of the elements of `x`.

    Parameters
    ----------
    x : Tensor
        Any shape, dtype and layout.  float16 and bfloat16 are exact; float64 is rounded to float32 first, so that
        magnitudes
        beyond 3.4e38 are counted as infinite and those below 7e-46 as zero.  Complex numbers give their magnitudes.
    m : int
        Number of mantissa bits, 1 to 7.  Seven bits are the exact distribution of a bfloat16 tensor.

    Returns
    -------
    Tensor
        ``counts: (2K,)``, int64, on the device of `x`; sums of such tensors are the counts of all elements together.
        No element, or a tensor without numbers (meta, fake): all zero.

    Raises
    ------
    ConfigError
        If `m` is out of range.

    Notes
    -----
    Costs about 10 sums of `x` on a CPU.  Elsewhere it does not synchronise, and needs 12 bytes for each of at most
    2**22 elements.

    Examples
    --------
    >>> codes(torch.tensor([1.0, -1.0, 0.0, 1.1])).nonzero().flatten()      # 1.1 is within 1/8 of 1.0
    tensor([1031, 2048, 3064])
    """
    half = half_size(m)
    read = readable(x.detach())
    if read is None:
        return torch.zeros(2 * half, dtype=torch.int64)
    values, implied_zeros = read
    flat = flatten(values)
    on_host = flat.device.type == "cpu" and not torch.compiler.is_compiling()
    counts = _count_on_host(flat, m, half) if on_host else _count_on_device(flat, m, half)
    counts[:half] = counts[:half].flip(0)  # negative numbers were counted by rising magnitude
    if implied_zeros:
        counts[half] += implied_zeros
    return counts


def _count_on_host(flat: Tensor, m: int, half: int) -> Tensor:
    chunks = torch.split(flat, CHUNK) if flat.numel() > CHUNK else (flat,)
    first, *others = (torch.bincount(_leading_bits(chunk, m).add_(half), minlength=2 * half) for chunk in chunks)
    for counts in others:
        first += counts
    return first


def _count_on_device(flat: Tensor, m: int, half: int) -> Tensor:
    """Count without ``bincount``, which waits for the device to learn the largest code."""
    counts = torch.zeros(2 * half, dtype=torch.int64, device=flat.device)
    for chunk in torch.split(flat, _DEVICE_CHUNK):
        index = (_leading_bits(chunk, m) + half).long()
        counts.scatter_add_(0, index, counts.new_ones(()).expand(index.numel()))
    return counts


def half_size(m: int) -> int:
    """Return K, the number of codes of either sign."""
    if not 1 <= m <= 7:
        raise ConfigError(f"m, the number of mantissa bits of a float code, is 1 to 7, got {m!r}")
    return 256 << m


def _leading_bits(x: Tensor, m: int) -> Tensor:
    """Return sign, exponent and `m` mantissa bits as an integer: the magnitude, less K for a negative number."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).int() >> (7 - m)
    return x.float().view(torch.int32) >> (23 - m)  # this shift keeps the sign


def bin_edges(m: int = 3) -> NDArray[np.float64]:
    """Return the ``2K + 1`` edges of the bins, rising; bins of NaN and infinity lie between infinite edges.

    Examples
    --------
    >>> bin_edges()[3064:3067].tolist()
    [1.0, 1.125, 1.25]
    """
    magnitude = (np.arange((255 << m) + 1, dtype=np.uint32) << (23 - m)).view(np.float32).astype(np.float64)
    magnitude[-1] = 2.0**128  # these bits read as infinity, but they end the last finite bin
    positive = np.concatenate([magnitude, np.full(half_size(m) - len(magnitude) + 1, np.inf)])
    return np.concatenate([-positive[:0:-1], positive])


def sample(x: Tensor, generator: torch.Generator | None = None, size: int = 65_536) -> Tensor:
    r"""Return `size` elements of `x` drawn uniformly with replacement, or all of them if there are no more.

    The share of a sample below the true quantile :math:`q` has standard deviation :math:`\sqrt{q (1-q) / size}`,
    at most 0.2 % for 65,536.

    Parameters
    ----------
    x : Tensor
        Any shape and layout with numbers to read; otherwise the result is empty.
    generator : torch.Generator, optional
        Where randomness comes from, on the device of `x`; by default a new one with seed 0.  The global one is never
        used.
    size : int
        Number of elements to draw.

    Returns
    -------
    Tensor
        ``(min(size, numel),)``, detached, on the device of `x`; a view where nothing was drawn.  Zeros that a sparse
        tensor does not
        store are not drawn.

    Examples
    --------
    >>> sample(torch.arange(10.0), torch.Generator().manual_seed(1), size=3).shape
    torch.Size([3])
    """
    read = readable(x.detach())
    if read is None:
        return torch.empty(0)
    flat = flatten(read[0])
    if flat.numel() <= size:
        return flat
    generator = generator or torch.Generator(flat.device).manual_seed(0)
    return flat[torch.randint(flat.numel(), (size,), generator=generator, device=flat.device)]
