"""Read a tensor once and say what was seen: the host-side kernels behind every statistic."""

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, readable
from ikkuna.numerics.statistics import native
from ikkuna.numerics.statistics.eager import measure_eagerly
from ikkuna.numerics.statistics.float_code import codes, sampled_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, merge

__all__ = ["measure"]

_COUNTED = HISTOGRAMS | {"n"}


def measure(
    x: Tensor, fields: frozenset[str], generator: torch.Generator | None = None, *, compiled: bool = True
) -> Record | None:
    """Return the `fields` (see :func:`~ikkuna.numerics.statistics.record.closure`) of the elements of `x`.

    Parameters
    ----------
    x : Tensor
        Any shape, dtype and layout, on the host, detached from the graph.
    fields : frozenset of str
        What to measure; only that is computed.
    generator : torch.Generator, optional
        What ``sampled_codes`` draws from; by default one with seed 0.
    compiled : bool
        Use `ikkuna.numerics.statistics.native` where it is to be had, rather than numpy; values agree to 1e-6.

    Returns
    -------
    Record or None
        ``None`` for a tensor without numbers (meta, fake, nested).

    Examples
    --------
    >>> from ikkuna.numerics.statistics.record import closure
    >>> record = measure(torch.tensor([3.0, -4.0, 0.0]), closure(["sumsq", "zeros", "min"]))
    >>> record.l2_norm, record.sparsity, record.min
    (5.0, 0.3333333333333333, -4.0)
    """
    kernels = native.library() if compiled else None
    if kernels is not None and kernels.takes(x):
        record = kernels.measure(x, fields) if fields - _COUNTED else Record(x.numel())
    elif (read := readable(x)) is not None:
        record = _measure_stored(*read, fields, kernels)
    else:
        return None
    if "codes" in fields:
        record.codes = codes(x, compiled=compiled).numpy()
    if "sampled_codes" in fields:
        record.sampled_codes = sampled_codes(x, generator, compiled=compiled).numpy()
    return record


def _measure_stored(
    values: Tensor, implied_zeros: int, fields: frozenset[str], kernels: native.Library | None
) -> Record:
    flat = flatten(values)
    take = kernels.measure if kernels is not None and kernels.takes(flat) else measure_eagerly
    record = take(flat, fields)
    if implied_zeros:
        record = merge(record, measure_eagerly(values.new_zeros(1), fields).repeated(implied_zeros))
    return record
