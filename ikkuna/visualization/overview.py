"""The extremes and the median over all modules of what is measured of each."""

import math

__all__ = ["STATISTICS", "overview"]

STATISTICS = ("min", "median", "max")


def overview(values: "list[float]") -> tuple[float, float, float]:
    """Return minimum, median and maximum of at least one value; all are NaN if one of the values is.

    A layer that has exploded must not disappear among healthy ones.

    Examples
    --------
    >>> overview([4.0, 1.0, 2.0, 3.0])
    (1.0, 2.5, 4.0)
    >>> overview([4.0, float("nan")])
    (nan, nan, nan)
    """
    if any(map(math.isnan, values)):
        return math.nan, math.nan, math.nan
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return ordered[0], low if low == high else low / 2 + high / 2, ordered[-1]
