r"""The statistics of a set of numbers as floats.

A :class:`Record` holds counts, extrema and central moments of the elements of one or more tensors.
Records merge exactly, so a value over several calls, micro-batches, chunks or ranks is the value over all elements together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, EMPTY, Values, merge_rows

__all__ = ["EXACT_COUNTS", "FIELDS", "HISTOGRAMS", "Record", "closure", "merge", "record_of"]

FIELDS = (
    *("n", "mean", "m2", "m3", "m4", "min", "max", "finite_min", "finite_max"),
    *("l1", "sumsq", "zeros", "nans", "infs", "codes", "sampled_codes"),
)
"""Every statistic a :class:`Record` can hold; a subscriber names those it needs in its ``fields``."""

HISTOGRAMS = frozenset(("codes", "sampled_codes"))
"""The statistics that are arrays of counts."""

_ATTRIBUTE = {"mean": "center"}
_NEEDS = {"mean": (), "m2": ("mean",), "m3": ("mean", "m2"), "m4": ("mean", "m2", "m3")}
EXACT_COUNTS = "exact_counts"
"""Stands beside fields: how many elements are not finite is wanted, rather than whether there are any."""

_SCREENED = frozenset(("mean", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs", "finite_min", "finite_max"))


def closure(fields: Iterable[str]) -> frozenset[str]:
    """Return `fields` with those they are computed from, and ``n``.

    A sum over elements needs to know whether all are finite, so ``nans`` and ``infs`` are added.

    Raises
    ------
    ConfigError
        If a name is not one of :data:`FIELDS`.

    Examples
    --------
    >>> sorted(closure(["m2"]))
    ['infs', 'm2', 'mean', 'n', 'nans']
    """
    return _closure(frozenset(fields))


@cache
def _closure(fields: frozenset[str]) -> frozenset[str]:
    if unknown := fields - set(FIELDS):
        raise ConfigError(f"unknown statistics field {sorted(unknown)[0]!r}; known: {', '.join(FIELDS)}")
    needed = fields.union(*(_NEEDS.get(field, ()) for field in fields), ("n",))
    return needed | {"nans", "infs"} if needed & _SCREENED else needed


@dataclass(slots=True)
class Record:
    r"""Statistics of `n` numbers :math:`x_i`, as floats.

    Sums run over the finite elements, of which there are :math:`k = n - \mathrm{nans} - \mathrm{infs}`.
    A field that was not measured is ``None``; a property that needs it raises `ConfigError`.

    Parameters
    ----------
    n : int
        Number of elements.
    center : float
        :math:`\bar x`, mean of the finite elements.
    m2, m3, m4 : float
        Sums :math:`\sum (x_i - \bar x)^p`.
    min, max : float
        Extrema, infinities included; NaN if an element is NaN.
    finite_min, finite_max : float
        Extrema of the finite elements; NaN if there is none.
    l1 : float
        :math:`\sum |x_i|`
    sumsq : float
        :math:`\sum x_i^2`
    zeros : int
        Number of elements equal to 0.
    nans, infs : int
        Number of elements that are NaN, or infinite.
    codes : array of int64
        Float-code histogram.
    sampled_codes : array of int64
        Float-code histogram of a random sample, scaled to the number of elements.
    finite_only : bool
        Whether properties describe the finite elements alone.
        Otherwise a mean, variance or norm of data with a NaN or Inf is NaN, so that an exploded layer never draws a healthy curve.
    ranks : tuple of Record or None
        The record of each rank before the merge, ``None`` for a rank without one.
        Empty in one process, and unless a subscriber sets ``per_rank``.

    Examples
    --------
    >>> a, b = Record(n=2, center=1.0, m2=2.0, nans=0, infs=0), Record(n=1, center=4.0, m2=0.0, nans=0, infs=0)
    >>> merge(a, b).mean, merge(a, b).variance()      # of 0, 2 and 4
    (2.0, 2.6666666666666665)
    """

    n: int = 0
    center: float | None = None
    m2: float | None = None
    m3: float | None = None
    m4: float | None = None
    min: float | None = None
    max: float | None = None
    finite_min: float | None = None
    finite_max: float | None = None
    l1: float | None = None
    sumsq: float | None = None
    zeros: int | None = None
    nans: int | None = None
    infs: int | None = None
    codes: Any = None
    sampled_codes: Any = None
    finite_only: bool = False
    ranks: "tuple[Record | None, ...]" = ()

    @classmethod
    def of(cls, value: float) -> "Record":
        """Return the record of one number, with every moment known."""
        x = value
        if not math.isfinite(x):
            nan, inf = int(math.isnan(x)), int(math.isinf(x))
            return cls(1, 0.0, 0.0, 0.0, 0.0, x, x, math.nan, math.nan, 0.0, 0.0, 0, nan, inf)
        return cls(1, x, 0.0, 0.0, 0.0, x, x, x, x, abs(x), x * x, int(x == 0), 0, 0)

    def _known(self, value: float | None, field: str) -> float:
        if value is None:
            raise ConfigError(f"the field {field!r} was not measured; name it in the subscriber's `fields`")
        if self.nans is not None and self.infs is not None and self.nans + self.infs and not self.finite_only:
            return math.nan
        return value

    @property
    def count(self) -> int:
        """Number of finite elements; of all elements if ``nans`` and ``infs`` were not measured."""
        return self.n - (self.nans or 0) - (self.infs or 0)

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        if self.nans is None or self.infs is None:
            raise ConfigError("the fields 'nans' and 'infs' were not measured; name them in the subscriber's `fields`")
        return self.nans + self.infs

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN for no element."""
        return self._known(self.center, "mean") if self.count else math.nan

    def variance(self, correction: int = 0) -> float:
        """Return the sum of squared deviations over ``count - correction``; NaN where that is not positive."""
        m2 = self._known(self.m2, "m2")
        return m2 / (self.count - correction) if self.count > correction else math.nan

    @property
    def skewness(self) -> float:
        r"""Fisher's :math:`g_1 = \sqrt k\, m_3 / m_2^{3/2}`; NaN for constant data."""
        m2, m3 = self._known(self.m2, "m2"), self._known(self.m3, "m3")
        return math.sqrt(self.count) * (m3 / m2) / math.sqrt(m2) if m2 > 0 else math.nan

    @property
    def kurtosis(self) -> float:
        r"""Excess kurtosis :math:`g_2 = k\, m_4 / m_2^2 - 3`; NaN for constant data."""
        m2, m4 = self._known(self.m2, "m2"), self._known(self.m4, "m4")
        return self.count * (m4 / m2) / m2 - 3.0 if m2 > 0 else math.nan

    @property
    def l0_norm(self) -> float:
        """Number of elements that are not 0."""
        return self.count - self._known(self.zeros, "zeros")

    @property
    def l1_norm(self) -> float:
        """Sum of magnitudes."""
        return self._known(self.l1, "l1")

    @property
    def l2_norm(self) -> float:
        """Root of the sum of squares."""
        return math.sqrt(self._known(self.sumsq, "sumsq"))

    @property
    def linf_norm(self) -> float:
        """Largest magnitude; NaN for no element.  With `finite_only` that of the finite elements."""
        if not self.n:
            return math.nan
        if self.finite_only:
            return max(-self._known(self.finite_min, "finite_min"), self._known(self.finite_max, "finite_max")) + 0.0
        return max(-self._known(self.min, "min"), self._known(self.max, "max")) + 0.0  # never -0.0

    @property
    def rms(self) -> float:
        """Root of the mean square; NaN for no element."""
        return math.sqrt(self._known(self.sumsq, "sumsq") / self.count) if self.count else math.nan

    @property
    def sparsity(self) -> float:
        """Share of elements equal to 0; NaN for no element."""
        if self.zeros is None:
            raise ConfigError("the field 'zeros' was not measured; name it in the subscriber's `fields`")
        return self.zeros / self.n if self.n else math.nan

    def repeated(self, times: int) -> "Record":
        """Return the record of every element repeated `times`."""
        scale = ("n", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs", "codes", "sampled_codes")
        values = {name: getattr(self, name) for name in self.__slots__}
        return Record(**{k: v * times if k in scale and v is not None else v for k, v in values.items()})


def record_of(row: Values, fields: frozenset[str]) -> Record:
    """Return the `fields` of a row of a table, see `ikkuna.numerics.statistics.table`.

    If a sum or a power of finite elements exceeds float64, the mean or moment is infinite.

    Examples
    --------
    >>> record = record_of(np.array([3.0, 0, 1, 0, 5, *[0] * 9]), frozenset(("n", "l1", "nans", "infs")))
    >>> record.n, record.infs, record.l1, record.zeros
    (3, 1, 5.0, None)
    """
    values: list[Any] = row.tolist()
    n, k = values[0], values[0] - values[1] - values[2]
    if not n:
        values[10] = values[11] = math.nan
    if (
        total := values[6] + values[7] + values[8] + values[9]
    ) != total:  # one of them is NaN, or they have infinite terms
        values[6:10] = [math.inf if value != value else value for value in values[6:10]]
    if not k:
        values[6] = values[12] = values[13] = math.nan
    for i in _unwanted(fields):
        values[i] = None
    _, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4, low, high, finite_low, finite_high = values
    counts = _whole(zeros), _whole(nans), _whole(infs)
    return Record(int(n), mean, m2, m3, m4, low, high, finite_low, finite_high, l1, sumsq, *counts)


@cache
def _unwanted(fields: frozenset[str]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(COLUMNS) if name not in fields)


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)


def merge(*records: Record) -> Record:
    """Return the record of all elements of `records` together; without any, a record with ``n = 0``.

    Records must hold the same fields; one held by only some of them is dropped.
    """
    some = [record for record in records if record.n]
    if len(some) < 2:
        return some[0] if some else records[0] if records else Record()
    columns = tuple(name for name in COLUMNS if all(getattr(r, _ATTRIBUTE.get(name, name)) is not None for r in some))
    rows = [[_column(record, name) for name in columns] for record in some]
    row = EMPTY.copy()
    with np.errstate(all="ignore"):
        row[[COLUMNS.index(name) for name in columns]] = merge_rows(np.array(rows, np.float64), columns)
    merged = record_of(row, frozenset(columns))
    for name in HISTOGRAMS:
        if all(getattr(record, name) is not None for record in some):
            setattr(merged, name, sum(getattr(record, name) for record in some))
    merged.finite_only = some[0].finite_only
    return merged


def _column(record: Record, name: str) -> Any:
    """Return what a row has in a column; a record without finite elements has NaN as their extrema."""
    value = getattr(record, _ATTRIBUTE.get(name, name))
    return EMPTY[COLUMN[name]] if name in ("finite_min", "finite_max") and math.isnan(value) else value
