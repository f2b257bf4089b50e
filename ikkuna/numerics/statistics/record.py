r"""The statistics of a set of numbers as floats.

A :class:`Record` holds counts, extrema and central moments of the elements of one or more tensors.
Records merge exactly, so a value over several calls, micro-batches, chunks or ranks is the value over all elements together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, EMPTY, Values, merge_rows, rows_of

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

NORMS: dict[float, tuple[tuple[str, ...], str]] = {
    0: (("zeros",), "l0_norm"),
    1: (("l1",), "l1_norm"),
    2: (("sumsq",), "l2_norm"),
    math.inf: (("min", "max", "finite_min", "finite_max"), "linf_norm"),
}
"""The orders of the norms that are statistics: their fields, and the property of a record."""

_Counts = Mapping[str, Sequence[NDArray[np.int64]]]
_N, _NANS, _INFS = (COLUMN[name] for name in ("n", "nans", "infs"))
_SCREENED = frozenset(("mean", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs", "finite_min", "finite_max"))


def needed_fields(fields: Iterable[str]) -> frozenset[str]:
    """Return `fields` with those they are computed from, and ``n``.

    A sum over elements needs to know whether all are finite, so ``nans`` and ``infs`` are added.

    Raises
    ------
    ConfigError
        If a name is not one of :data:`FIELDS`.

    Examples
    --------
    >>> sorted(needed_fields(["m2"]))
    ['infs', 'm2', 'mean', 'n', 'nans']
    """
    return _needed(frozenset(fields))


@cache
def _needed(fields: frozenset[str]) -> frozenset[str]:
    if unknown := fields - set(FIELDS):
        raise ConfigError(f"unknown statistics field {sorted(unknown)[0]!r}; known: {', '.join(FIELDS)}")
    needed = fields.union(*(_NEEDS.get(field, ()) for field in fields), ("n",))
    return needed | {"nans", "infs"} if needed & _SCREENED else needed


class _OfOne:
    """A property of `Records`, of a single one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, record: "Record", owner: type | None = None) -> float:
        with np.errstate(all="ignore"):
            return float(getattr(Records.of_record(record), self._name)[0])


@dataclass(slots=True)
class Record:
    r"""Statistics of `n` numbers :math:`x_i`, as floats.

    Its properties ``count``, ``nonfinite``, ``mean``, ``skewness``, ``kurtosis``, ``l0_norm``, ``l1_norm``, ``l2_norm``,
    ``linf_norm``, ``rms`` and ``sparsity`` are those of `Records`.
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

    @property
    def fields(self) -> frozenset[str]:
        """The columns of a table that were measured."""
        return frozenset(name for name in COLUMNS if getattr(self, _ATTRIBUTE.get(name, name)) is not None)

    count, nonfinite, mean, skewness, kurtosis = (_OfOne() for _ in range(5))
    l0_norm, l1_norm, l2_norm, linf_norm, rms, sparsity = (_OfOne() for _ in range(6))

    def variance(self, correction: int = 0) -> float:
        """Return the sum of squared deviations over ``count - correction``; NaN where that is not positive."""
        with np.errstate(all="ignore"):
            return float(Records.of_record(self).variance(correction)[0])


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


def _row_of(record: Record) -> Values:
    """Return the row of a record in a table; what was not measured is as in the row of no elements."""
    row = EMPTY.copy()
    for name in record.fields:
        row[COLUMN[name]] = _column(record, name)
    return row


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


_MOMENTS = frozenset(("mean", "m2", "m3", "m4"))
_OF_FINITE = frozenset(("mean", "finite_min", "finite_max"))


class _Column:
    """A column of the table, as `Record` has it as an attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, records: "Records", owner: type | None = None) -> Values:
        return records._column(self._name)


class Records:
    """The statistics of several tensors: each property is an array with one element for each tensor.

    The properties are those of `Record`, and each element equals the property of the record of that tensor.

    Parameters
    ----------
    values : array
        ``(tensors, columns)``, rows of a table, see `ikkuna.numerics.statistics.table`.
    fields : frozenset of str
        The statistics that were measured; a property that needs another one raises `ConfigError`.
    finite_only : bool
        See `Record`.
    counts : mapping of str to sequence of array, optional
        The float codes of each tensor: ``codes`` or ``sampled_codes`` of the fields.
    ranks : sequence of sequence of array or None, optional
        For each tensor the row of each rank, if a subscriber reads them; ``None`` for a rank without the tensor.
    is_finite : bool
        Whether it is known that no element is NaN or infinite.

    Attributes
    ----------
    n : array
        Numbers of elements.

    Examples
    --------
    >>> records = Records.of(np.array([3.0, -4.0]))
    >>> records.mean.tolist(), records.l2_norm.tolist()
    ([3.0, -4.0], [3.0, 4.0])
    """

    def __init__(
        self,
        values: Values,
        fields: frozenset[str],
        finite_only: bool = False,
        counts: _Counts | None = None,
        ranks: Sequence[Sequence[Values | None]] = (),
        is_finite: bool = False,
    ) -> None:
        self.table = values
        self.counts = counts or {}
        self.fields = fields
        self.finite_only = finite_only
        self.ranks = ranks
        self.n: Values = values[:, _N]
        self._is_counted = fields.issuperset(("nans", "infs"))
        self._nonfinite: Values | None = None  # if there are no such elements, or if they were not counted
        if self._is_counted and not is_finite:
            nonfinite = values[:, _NANS] + values[:, _INFS]
            self._nonfinite = nonfinite if nonfinite.any() else None

    m2, m3, m4 = _Column(), _Column(), _Column()
    min, max, finite_min, finite_max = _Column(), _Column(), _Column(), _Column()
    l1, sumsq, zeros, nans, infs = _Column(), _Column(), _Column(), _Column(), _Column()

    @classmethod
    def of(cls, values: Values) -> "Records":
        """Return the records of single numbers, with every statistic known."""
        return cls(rows_of(values), frozenset(COLUMN))

    @classmethod
    def of_record(cls, record: Record) -> "Records":
        """Return the records of one tensor."""
        row = _row_of(record)
        counts = {name: [counts] for name in HISTOGRAMS if (counts := getattr(record, name)) is not None}
        return cls(row[None], record.fields | counts.keys(), record.finite_only, counts)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Record:
        """Return the record of one tensor."""
        record = record_of(self.table[i], frozenset(self.fields))
        record.finite_only = self.finite_only
        for name, counts in self.counts.items():
            setattr(record, name, counts[i])
        if self.ranks:
            record.ranks = tuple(None if row is None else record_of(row, self.fields) for row in self.ranks[i])
        return record

    def select(self, positions: Any) -> "Records":
        """Return the records of some of the tensors."""
        counts = {name: [each[i] for i in np.arange(len(self))[positions]] for name, each in self.counts.items()}
        ranks = [self.ranks[i] for i in np.arange(len(self))[positions]] if self.ranks else ()
        return Records(self.table[positions], self.fields, self.finite_only, counts, ranks)

    def _column(self, name: str, screened: bool = False) -> Values:
        """Return a column as a record has it; raise `ConfigError` if it was not measured.

        If it is `screened`, it is NaN where elements are not finite, unless `finite_only` is set.
        """
        if name not in self.fields:
            raise ConfigError(f"the field {name!r} was not measured; name it in the subscriber's `fields`")
        values = self.table[:, COLUMN[name]]
        if name in _MOMENTS and np.isnan(values).any():  # sums that exceed float64 have infinite terms
            values = np.where(np.isnan(values), np.inf, values)
        empty = self.count if name in _OF_FINITE else self.n if name in ("min", "max") else None
        if empty is not None and not empty.all():
            values = np.where(empty == 0, np.nan, values)
        if screened and self._nonfinite is not None and not self.finite_only:
            values = np.where(self._nonfinite > 0, np.nan, values)
        return values

    @property
    def codes(self) -> Sequence[NDArray[np.int64]]:
        """The float codes of all elements of each tensor."""
        return self._counts_of("codes")

    @property
    def sampled_codes(self) -> Sequence[NDArray[np.int64]]:
        """The float codes of a sample of each tensor."""
        return self._counts_of("sampled_codes")

    def _counts_of(self, name: str) -> Sequence[NDArray[np.int64]]:
        if name not in self.counts:
            raise ConfigError(f"the field {name!r} was not measured; name it in the subscriber's `fields`")
        return self.counts[name]

    @property
    def count(self) -> Values:
        """Numbers of finite elements; of all elements if ``nans`` and ``infs`` were not measured."""
        return self.n if self._nonfinite is None else self.n - self._nonfinite

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite, as far as these were counted."""
        return self._nonfinite is None

    @property
    def nonfinite(self) -> Values:
        """Numbers of elements that are NaN or infinite."""
        if not self._is_counted:
            raise ConfigError("the fields 'nans' and 'infs' were not measured; name them in the subscriber's `fields`")
        return np.zeros(len(self)) if self._nonfinite is None else self._nonfinite

    @property
    def mean(self) -> Values:
        """Arithmetic means; NaN for no element."""
        return self._column("mean", screened=True)

    def variance(self, correction: int = 0) -> Values:
        """Return sums of squared deviations over ``count - correction``; NaN where that is not positive."""
        return _quotient(self._column("m2", screened=True), self.count - correction)

    @property
    def skewness(self) -> Values:
        r"""Fisher's :math:`g_1`; NaN for constant data."""
        m2 = self._column("m2", screened=True)
        return np.sqrt(self.count) * _quotient(self._column("m3"), m2) / np.sqrt(m2)

    @property
    def kurtosis(self) -> Values:
        r"""Excess kurtosis :math:`g_2`; NaN for constant data."""
        m2 = self._column("m2", screened=True)
        return self.count * _quotient(self._column("m4"), m2) / m2 - 3.0

    @property
    def l0_norm(self) -> Values:
        """Numbers of elements that are not 0."""
        return self.count - self._column("zeros", screened=True)

    @property
    def l1_norm(self) -> Values:
        """Sums of magnitudes."""
        return self._column("l1", screened=True)

    @property
    def l2_norm(self) -> Values:
        """Roots of the sums of squares."""
        return np.sqrt(self._column("sumsq", screened=True))

    @property
    def linf_norm(self) -> Values:
        """Largest magnitudes; NaN for no element.  With `finite_only` those of the finite elements."""
        low, high = ("finite_min", "finite_max") if self.finite_only else ("min", "max")
        return np.maximum(-self._column(low, screened=True), self._column(high)) + 0.0

    @property
    def rms(self) -> Values:
        """Roots of the mean squares; NaN for no element."""
        return np.sqrt(_quotient(self._column("sumsq", screened=True), self.count))

    @property
    def sparsity(self) -> Values:
        """Shares of elements equal to 0; NaN for no element."""
        return _quotient(self._column("zeros"), self.n)


def _quotient(a: Values, b: Values) -> Values:
    """Return ``a / b``; NaN where `b` is not positive."""
    quotient: Values = np.divide(a, b, out=np.full(b.shape, np.nan), where=b > 0)
    return quotient
