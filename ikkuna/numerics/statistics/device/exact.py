r"""Statistics of tensors of every dtype and magnitude on a device, in float64, with torch operators.

Each chunk is read twice: the mean first, then the powers of the deviations from it.  So no digits are lost to a large offset.
A chunk takes about 30 launches and 48 MiB.
"""

import torch
from torch import Tensor

from ikkuna.numerics.statistics.table import COLUMNS, EMPTY, merge_rows

__all__ = ["measure_exactly"]

_CHUNK = 1 << 20  # bounds each temporary tensor to 8 MiB


def measure_exactly(flat: Tensor, fields: frozenset[str]) -> Tensor:
    """Return the row ``(columns,)`` of a one-dimensional tensor that has elements, on its device.

    Columns that are not in `fields` are those of no elements.

    Examples
    --------
    >>> row = measure_exactly(torch.tensor([1.0, 3.0]), frozenset(("n", "nans", "infs", "mean", "m2")))
    >>> [row[COLUMNS.index(name)].item() for name in ("n", "mean", "m2")]
    [2.0, 2.0, 2.0]
    """
    rows = [_measure(chunk, fields) for chunk in flat.split(_CHUNK)]
    return merge_rows(torch.stack(rows)) if len(rows) > 1 else rows[0]


def _measure(x: Tensor, fields: frozenset[str]) -> Tensor:
    x = x.double()
    nan, finite = torch.isnan(x), torch.isfinite(x)
    found = {"n": x.new_full((), x.numel()), "nans": _total(nan)}
    k = _total(finite)
    found["infs"] = found["n"] - found["nans"] - k
    clean = torch.where(finite, x, 0.0)
    if "zeros" in fields:
        found["zeros"] = _total(x == 0)
    if "l1" in fields:
        found["l1"] = clean.abs().sum()
    if "sumsq" in fields:
        found["sumsq"] = (clean * clean).sum()
    if "mean" in fields:
        found["mean"] = clean.sum() / k.clamp(min=1)
    if "m2" in fields:
        deviation = torch.where(finite, x - found["mean"], 0.0)
        power = deviation * deviation
        found["m2"] = power.sum()
        if "m3" in fields:
            found["m3"] = (power * deviation).sum()
        if "m4" in fields:
            found["m4"] = (power * power).sum()
    if "min" in fields or "max" in fields:
        found["min"], found["max"] = torch.aminmax(x)
    if "finite_min" in fields or "finite_max" in fields:
        found["finite_min"] = torch.where(finite, x, torch.inf).amin()
        found["finite_max"] = torch.where(finite, x, -torch.inf).amax()
    empty = dict(zip(COLUMNS, EMPTY.tolist(), strict=True))
    missing = {name: x.new_full((), empty[name]) for name in COLUMNS if name not in found}
    return torch.stack([found.get(name, missing.get(name)) for name in COLUMNS])  # type: ignore[misc]


def _total(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)
