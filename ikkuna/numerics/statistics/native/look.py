"""What a look of the compiled kernels fills, and what it says."""

import ctypes
import math
from functools import cache
from typing import Any

from ikkuna.numerics.statistics.record import Record

__all__ = ["Look", "record_of"]

_ORDER = ("n", "nans", "infs", "zeros", "l1", "sumsq", "mean", "m2", "m3", "m4", "min", "max")


class Look(ctypes.Array[ctypes.c_double]):
    """The kernels' own record, to which they add what they see; a new one has seen nothing."""

    _type_ = ctypes.c_double
    _length_ = len(_ORDER)


def record_of(look: Look, fields: frozenset[str]) -> Record | None:
    """Return the `fields` of what was seen; ``None`` if that is nothing.

    Examples
    --------
    >>> record = record_of(Look(3, 0, 1, 0, 5.0), frozenset(("n", "l1", "nans", "infs")))
    >>> record.n, record.infs, record.l1, record.zeros
    (3, 1, 5.0, None)
    """
    values: list[Any] = look[:]
    if not values[0]:
        return None
    count = values[0] - values[1] - values[2]
    for i in _unwanted(fields):
        values[i] = None
    n, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4, low, high = values
    if mean is not None and not count:
        mean = math.nan
    return Record(int(n), mean, m2, m3, m4, low, high, l1, sumsq, _whole(zeros), _whole(nans), _whole(infs))


@cache
def _unwanted(fields: frozenset[str]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(_ORDER) if name not in fields)


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)
