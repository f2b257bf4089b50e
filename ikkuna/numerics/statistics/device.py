r"""Read a tensor where it lives, without waiting for it: the device-side twin of `ikkuna.numerics.statistics.host`.

A row is a float64 vector of sums about a pivot :math:`p`, in the order of `SUMS`, followed by ``-min`` and ``max``.
Rows about one pivot merge by adding the sums and taking the maximum of the last two: on the device, over calls and ranks alike.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, readable
from ikkuna.numerics.statistics.float_code import codes, sampled_codes
from ikkuna.numerics.statistics.record import Record

__all__ = ["SUMS", "from_row", "from_vectors", "measure_row", "measure_vectors", "merge_rows", "merge_vectors"]

SUMS = ("n", "nans", "infs", "zeros", "l1", "sumsq", "s1", "s2", "s3", "s4")
"""Additive entries of a row; ``s1`` … ``s4`` are :math:`\\sum (x_i - p)^k` over finite elements."""


def measure_row(x: Tensor, fields: frozenset[str], pivot: float = 0.0) -> Tensor | None:
    """Return the row of `x` on its own device; entries nobody asked for are 0.

    Nothing here depends on the data, so nothing waits for the device.
    """
    read = readable(x)
    if read is None:
        return None
    values, implied = read
    x = flatten(values)
    x = x if x.dtype is torch.float64 else x.float()
    row = dict.fromkeys(SUMS, x.new_zeros((), dtype=torch.float64))
    row["n"] = x.new_full((), x.numel() + implied, dtype=torch.float64)
    finite = torch.isfinite(x)
    nan = torch.isnan(x)
    row["nans"], row["infs"] = _total(nan), _total(~finite & ~nan)
    clean = torch.where(finite, x, 0)
    if "zeros" in fields:
        row["zeros"] = _total(x == 0) + implied
    if "l1" in fields:
        row["l1"] = _total(clean.abs())
    if "sumsq" in fields:
        row["sumsq"] = _total(clean.double() ** 2)
    power = deviation = torch.where(finite, x.double() - pivot, 0)
    for order, name in enumerate(("mean", "m2", "m3", "m4"), start=1):
        if name in fields:
            row[f"s{order}"] = _total(power) + implied * (-pivot) ** order
            power = power * deviation
    low, high = torch.aminmax(x) if x.numel() else (x.new_full((), math.nan), x.new_full((), math.nan))
    if implied:
        low, high = low.clamp(max=0), high.clamp(min=0)
    return torch.stack([*row.values(), -low.double(), high.double()])


def merge_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return the row of the elements of both; the rows must have the same pivot."""
    return torch.cat([a[:-2] + b[:-2], torch.maximum(a[-2:], b[-2:])])


def _total(x: Tensor) -> Tensor:
    """Return the sum of the elements, in float64."""
    return x.sum(dtype=torch.float64)


def from_row(row: Sequence[float], fields: frozenset[str], pivot: float = 0.0) -> Record:
    """Return the record that a row stands for.

    Examples
    --------
    >>> fields = frozenset(("n", "mean", "m2", "max", "nans", "infs"))
    >>> record = from_row(measure_row(torch.tensor([1.0, 2.0, 6.0]), fields, pivot=2.0).tolist(), fields, pivot=2.0)
    >>> record.mean, record.variance(), record.max
    (3.0, 4.666666666666667, 6.0)
    """
    *sums, low, high = row
    got = dict(zip(SUMS, sums, strict=True))
    n, nans, infs = int(got["n"]), int(got["nans"]), int(got["infs"])
    record = Record(n=n, nans=nans, infs=infs)
    k = n - nans - infs
    delta = got["s1"] / k if k else 0.0
    if "mean" in fields:
        record.center = pivot + delta if k else math.nan
    if "m2" in fields:
        record.m2 = max(got["s2"] - k * delta**2, 0.0)
    if "m3" in fields:
        record.m3 = got["s3"] - 3 * delta * got["s2"] + 2 * k * delta**3
    if "m4" in fields:
        record.m4 = got["s4"] - 4 * delta * got["s3"] + 6 * delta**2 * got["s2"] - 3 * k * delta**4
    record.min = -low if "min" in fields else None
    record.max = high if "max" in fields else None
    record.l1 = got["l1"] if "l1" in fields else None
    record.sumsq = got["sumsq"] if "sumsq" in fields else None
    record.zeros = int(got["zeros"]) if "zeros" in fields else None
    return record


def measure_vectors(
    x: Tensor,
    fields: frozenset[str],
    pivot: float = 0.0,
    weight: int | Tensor = 1,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor] | None:
    """Return everything `fields` ask of `x` as vectors on its device: its ``row``, and float codes if they are wanted.

    `weight` is how many elements of a mean each of its elements stands for.
    """
    row = measure_row(x, fields, pivot)
    if row is None:
        return None
    vectors = {"row": torch.cat([row[:-2] * weight, row[-2:]])}
    if "codes" in fields:
        vectors["codes"] = codes(x)
    if "sampled_codes" in fields:
        vectors["sampled_codes"] = sampled_codes(x, generator)
    return vectors


def merge_vectors(name: str, a: Tensor, b: Tensor) -> Tensor:
    """Return the vector of that name of the elements of both."""
    return merge_rows(a, b) if name == "row" else a + b


def from_vectors(vectors: Mapping[str, Tensor], fields: frozenset[str], pivot: float = 0.0) -> Record:
    """Return the record that vectors on the host stand for."""
    record = from_row(vectors["row"].tolist(), fields, pivot)
    for name in ("codes", "sampled_codes"):
        if name in vectors:
            setattr(record, name, vectors[name].long().numpy())
    return record
