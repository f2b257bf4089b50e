r"""A histogram whose bins are the leading bits of a float: it has no range and a fixed size, and merges by addition.

The bits of a float32 are sign, exponent and mantissa, and magnitudes are ordered as these bits are.
With :math:`u` the bits of :math:`x`, :math:`K = 256 \cdot 2^m` and :math:`\mu = (u \mathbin\& \mathtt{7fffffff}_{16})
\gg (23 - m)`,
the code of :math:`x` is :math:`K + \mu` for a positive sign bit and :math:`K - 1 - \mu` for a negative one.
Codes never decrease in :math:`x`; a bin is :math:`2^{-m}` of its value wide.
"""

from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import (
    CHUNK,
    flatten,
    has_numbers,
    in_memory_order,
    is_special,
    pieces,
    readable,
    stored,
    without_repeats,
)
from ikkuna.numerics.statistics.native import Library, library

SAMPLE = 65_536
"""Number of elements in a sample."""

_SAMPLE_BITS = 16

WORTH_SAMPLING = 2 * SAMPLE
"""Kernels count so many elements in the time that drawing a sample takes."""

_DEVICE_CHUNK = 1 << 22  # bounds the int64 index a device needs to 32 MiB
_CONVERTED_CHUNK = 1 << 20  # elements that are converted to float64 or float32 first


def codes(x: Tensor, m: int = 3, *, native: bool = True) -> Tensor:
    r"""Count the float codes of the elements of `x`.

    Parameters
    ----------
    x : Tensor
        Any shape, dtype and layout.  float16 and bfloat16 are exact; float64 is rounded to float32 first, so that
        magnitudes beyond 3.4e38 are counted as infinite and those below 7e-46 as zero.  Complex numbers give their magnitudes.
    m : int
        Number of mantissa bits, 1 to 7.  Seven bits are the exact distribution of a bfloat16 tensor.
    native : bool
        Whether to use the C++ kernels if they are available.

    Returns
    -------
    Tensor
        ``counts: (2K,)``, int64, on the device of `x`; sums of such tensors are the counts of all elements together.
        All zero for no elements, or for a tensor without numbers (meta, fake).

    Raises
    ------
    ConfigError
        If `m` is out of range.

    Notes
    -----
    Costs 2 to 7 sums of a large `x` on a CPU, 8 to 12 without a compiler.
    Elsewhere it does not synchronise, and needs 12 bytes for each of at most 2**22 elements.

    Examples
    --------
    >>> codes(torch.tensor([1.0, -1.0, 0.0, 1.1])).nonzero().flatten()      # 1.1 is within 1/8 of 1.0
    tensor([1031, 2048, 3064])
    """
    half = half_size(m)
    x = x.detach()
    if _needs_copy(x):
        few, times = without_repeats(x)
        if times > 1:
            return codes(few, m, native=native) * times
        return reduce(torch.add, (codes(part, m, native=native) for part in _parts(few)))
    found = _numbers(x, native)
    return torch.zeros(2 * half, dtype=torch.int64, device="cpu") if found is None else _count(*found, m)


def sampled_codes(x: Tensor, generator: torch.Generator | None = None, m: int = 3, *, native: bool = True) -> Tensor:
    r"""Count the float codes of 65,536 random elements, scaled to the number of elements; a small tensor is counted completely.

    The share of a sample below the true quantile :math:`q` has standard deviation :math:`\sqrt{q (1-q) / 65536}`, at most 0.2 %.
    The native kernel draws one element from each of 65,536 equal runs, which has a smaller error.
    Because of the scaling, counts of tensors of different sizes can be added; the rounding error is smaller than that of the sample.

    Parameters
    ----------
    x, m, native
        See `codes`.
    generator : torch.Generator, optional
        Source of randomness, on the host; by default the seed is 0.  The global one is never used.

    Returns
    -------
    Tensor
        ``counts: (2K,)``, int64, on the device of `x`.

    Examples
    --------
    >>> int(sampled_codes(torch.ones(1_000_000))[3064])
    1000000
    """
    half = half_size(m)
    x = x.detach()
    if _needs_copy(x):
        few, times = without_repeats(x)
        return sampled_codes(few, generator, m, native=native) * times if times > 1 else codes(few, m, native=native)
    found = _numbers(x, native)
    if found is None:
        return torch.zeros(2 * half, dtype=torch.int64, device="cpu")
    flat, implied_zeros, kernels = found
    if flat.numel() <= (SAMPLE if kernels is None else WORTH_SAMPLING):
        return _count(*found, m)
    if kernels is None:
        own = torch.Generator(flat.device).manual_seed(draw_seed(generator))
        drawn = _count_with_operators(sample(flat, own), m)
        counts = _scaled(drawn, flat.numel())
    else:
        counts = torch.empty(2 * half, dtype=torch.int64, device="cpu")
        kernels.sampled_codes(flat, m, counts, draw_seed(generator))
    if implied_zeros:
        counts[half] += implied_zeros
    return counts


def _scaled(drawn: Tensor, n: int) -> Tensor:
    """Return counts of a sample of `n` elements times ``n / SAMPLE``, ties rounded to even; integers need no float64."""
    product = drawn * n
    counts = product >> _SAMPLE_BITS
    twice = (product & (SAMPLE - 1)) * 2 + (counts & 1)
    return counts + (twice > SAMPLE)


def draw_seed(generator: torch.Generator | None) -> int:
    """Return 32 random bits of a generator on the host; 0 without a generator."""
    if generator is None:
        return 0
    drawn = torch.randint(2**32, (), generator=generator, device="cpu")
    return int(drawn.numpy())  # which raises for a tensor of a device, and never waits


def add_codes(
    counts: dict[str, Tensor],
    x: Tensor,
    fields: frozenset[str],
    generator: torch.Generator | None = None,
    *,
    native: bool = True,
) -> None:
    """Add the counts of `x` to those of ``codes`` and ``sampled_codes``, if `fields` name them."""
    if "codes" in fields:
        add_counts(counts, "codes", codes(x, native=native))
    if "sampled_codes" in fields:
        add_counts(counts, "sampled_codes", sampled_codes(x, generator, native=native))


def add_counts(counts: dict[str, Any], name: str, found: Any) -> None:
    """Add a histogram, a Tensor or an array, to those by their names."""
    counts[name] = counts[name] + found if name in counts else found


def merge_codes(counts: dict[int, dict[str, Any]], more: dict[int, dict[str, Any]]) -> None:
    """Add other histograms, Tensors or arrays, to those of each row and field."""
    for row, found in more.items():
        known = counts.setdefault(row, {})
        for name, added in found.items():
            add_counts(known, name, added)


def _needs_copy(x: Tensor) -> bool:
    """Return whether the elements of a large tensor would be copied, because they are broadcast, overlap or are converted."""
    if torch.compiler.is_compiling() or x.numel() <= CHUNK or x.layout is not torch.strided or not has_numbers(x):
        return False
    return not in_memory_order(x).is_contiguous() or (x.numel() > _CONVERTED_CHUNK and _is_converted(x))


def _is_converted(x: Tensor) -> bool:
    """Return whether `readable` makes another tensor of a dense one."""
    return not (x.is_quantized or is_special(x)) and not (x.is_floating_point() and x.element_size() > 1)


def _parts(x: Tensor) -> Iterator[Tensor]:
    for part in pieces(x):
        yield from part.split(_CONVERTED_CHUNK) if _is_converted(x) and part.ndim == 1 else (part,)


def _numbers(x: Tensor, native: bool) -> tuple[Tensor, int, Library | None] | None:
    """Return the stored elements of `x` on one axis, the number of zeros that are not stored, and the kernels if they apply."""
    kernels = library() if native and not torch.compiler.is_compiling() else None
    if kernels is not None and kernels.accepts(x):
        return x, 0, kernels
    if (read := readable(x)) is None:
        return None
    flat = flatten(read[0])
    return flat, read[1], kernels if kernels is not None and kernels.accepts(flat) else None


def _count(flat: Tensor, implied_zeros: int, kernels: Library | None, m: int) -> Tensor:
    if kernels is None:
        counts = _count_with_operators(flat, m)
    else:
        counts = torch.empty(2 * half_size(m), dtype=torch.int64, device="cpu")
        kernels.codes(flat, m, counts)
    if implied_zeros:
        counts[half_size(m)] += implied_zeros
    return counts


def _count_with_operators(flat: Tensor, m: int) -> Tensor:
    half = half_size(m)
    on_host = flat.device.type == "cpu" and not torch.compiler.is_compiling()
    counts = _count_on_host(flat, m, half) if on_host else _count_on_device(flat, m, half)
    counts[:half] = counts[:half].flip(0)  # negative numbers were counted by rising magnitude
    return counts


def _count_on_host(flat: Tensor, m: int, half: int) -> Tensor:
    chunks = torch.split(flat, CHUNK) if flat.numel() > CHUNK else (flat,)
    first, *others = (torch.bincount(_leading_bits(chunk, m).add_(half), minlength=2 * half) for chunk in chunks)
    for counts in others:
        first += counts
    return first


def _count_on_device(flat: Tensor, m: int, half: int) -> Tensor:
    """Count without ``bincount``, which synchronises with the device to find the largest code."""
    counts = torch.zeros(2 * half, dtype=torch.int64, device=flat.device)
    one = counts.new_ones(())
    for chunk in torch.split(flat, _DEVICE_CHUNK):
        counts.scatter_add_(0, _leading_bits(chunk, m).add_(half).long(), one.expand(chunk.numel()))
    return counts


def half_size(m: int) -> int:
    """Return K, the number of codes of either sign."""
    if not 1 <= m <= 7:
        raise ConfigError(f"m, the number of mantissa bits of a float code, is 1 to 7, got {m!r}")
    return 256 << m


def _leading_bits(x: Tensor, m: int) -> Tensor:
    """Return sign, exponent and `m` mantissa bits as an integer: the magnitude, less K for a negative number."""
    x = stored(x)
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).int() >> (7 - m)
    return x.float().view(torch.int32) >> (23 - m)  # this shift keeps the sign


@cache
def bin_edges(m: int = 3) -> NDArray[np.float64]:
    """Return the ``2K + 1`` rising edges of the bins, read-only; bins of NaN and infinity lie between infinite edges.

    Examples
    --------
    >>> bin_edges()[3064:3067].tolist()
    [1.0, 1.125, 1.25]
    """
    magnitude = (np.arange((255 << m) + 1, dtype=np.uint32) << (23 - m)).view(np.float32).astype(np.float64)
    magnitude[-1] = 2.0**128  # these bits read as infinity, but they end the last finite bin
    positive = np.concatenate([magnitude, np.full(half_size(m) - len(magnitude) + 1, np.inf)])
    edges = np.concatenate([-positive[:0:-1], positive])
    edges.flags.writeable = False  # the array is shared by all callers
    return edges


def sample(x: Tensor, generator: torch.Generator | None = None, size: int = SAMPLE) -> Tensor:
    r"""Return `size` elements of `x` drawn uniformly with replacement, or all of them if there are no more.

    The share of a sample below the true quantile :math:`q` has standard deviation :math:`\sqrt{q (1-q) / size}`,
    at most 0.2 % for 65,536.

    Parameters
    ----------
    x : Tensor
        Any shape and layout; for a tensor without numbers the result is empty.
    generator : torch.Generator, optional
        Source of randomness, on the device of `x`; by default a new one with seed 0.  The global one is never used.
    size : int
        Number of elements to draw.

    Returns
    -------
    Tensor
        ``(min(size, numel),)``, detached, on the device of `x`; a view if all elements are returned.  Zeros that a sparse
        tensor does not store are not drawn.

    Examples
    --------
    >>> sample(torch.arange(10.0), torch.Generator().manual_seed(1), size=3).shape
    torch.Size([3])
    """
    read = readable(x.detach())
    if read is None:
        return torch.empty(0, device="cpu")
    flat = flatten(read[0])
    if flat.numel() <= size:
        return flat
    generator = generator or torch.Generator(flat.device).manual_seed(0)
    return flat[torch.randint(flat.numel(), (size,), generator=generator, device=flat.device)]
