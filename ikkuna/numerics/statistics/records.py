"""The statistics of several tensors as arrays, with the properties of a record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics.record import Record, record_of
from ikkuna.numerics.statistics.table import COLUMN, Values, rows_of

__all__ = ["Records"]

_Counts = Mapping[str, Sequence[NDArray[np.int64]]]
_N, _NANS, _INFS = (COLUMN[name] for name in ("n", "nans", "infs"))
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
        self, values: Values, fields: frozenset[str], finite_only: bool = False, counts: _Counts | None = None
    ) -> None:
        self.table = values
        self.counts = counts or {}
        self.fields = fields
        self.finite_only = finite_only
        self.n: Values = values[:, _N]
        self._is_counted = fields.issuperset(("nans", "infs"))
        self._nonfinite: Values | None = None  # if there are no such elements, or if they were not counted
        if self._is_counted:
            nonfinite = values[:, _NANS] + values[:, _INFS]
            self._nonfinite = nonfinite if nonfinite.any() else None

    m2, m3, m4 = _Column(), _Column(), _Column()
    min, max, finite_min, finite_max = _Column(), _Column(), _Column(), _Column()
    l1, sumsq, zeros, nans, infs = _Column(), _Column(), _Column(), _Column(), _Column()

    @classmethod
    def of(cls, values: Values) -> "Records":
        """Return the records of single numbers, with every statistic known."""
        return cls(rows_of(values), frozenset(COLUMN))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Record:
        """Return the record of one tensor."""
        record = record_of(self.table[i], self.fields)
        record.finite_only = self.finite_only
        for name, counts in self.counts.items():
            setattr(record, name, counts[i])
        return record

    def select(self, positions: Any) -> "Records":
        """Return the records of some of the tensors."""
        counts = {name: [each[i] for i in np.arange(len(self))[positions]] for name, each in self.counts.items()}
        return Records(self.table[positions], self.fields, self.finite_only, counts)

    def only_finite(self) -> "Records":
        """Return the records with `finite_only` set."""
        return self if self.finite_only else Records(self.table, self.fields, True, self.counts)

    def _column(self, name: str) -> Values:
        """Return a column as a record has it; raise `ConfigError` if it was not measured."""
        if name not in self.fields:
            raise ConfigError(f"the field {name!r} was not measured; name it in the subscriber's `fields`")
        values = self.table[:, COLUMN[name]]
        if name in _MOMENTS and np.isnan(values).any():  # sums that exceed float64 have infinite terms
            values = np.where(np.isnan(values), np.inf, values)
        empty = self.count if name in _OF_FINITE else self.n if name in ("min", "max") else None
        return values if empty is None or empty.all() else np.where(empty == 0, np.nan, values)

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

    def _known(self, name: str) -> Values:
        """Return a column that is NaN where elements are not finite, unless `finite_only` is set."""
        values = self._column(name)
        if self.finite_only or self._nonfinite is None:
            return values
        return np.where(self._nonfinite > 0, np.nan, values)

    @property
    def count(self) -> Values:
        """Numbers of finite elements; of all elements if ``nans`` and ``infs`` were not measured."""
        return self.n if self._nonfinite is None else self.n - self._nonfinite

    @property
    def nonfinite(self) -> Values:
        """Numbers of elements that are NaN or infinite."""
        if not self._is_counted:
            raise ConfigError("the fields 'nans' and 'infs' were not measured; name them in the subscriber's `fields`")
        return np.zeros(len(self)) if self._nonfinite is None else self._nonfinite

    @property
    def mean(self) -> Values:
        """Arithmetic means; NaN for no element."""
        return self._known("mean")

    def variance(self, correction: int = 0) -> Values:
        """Return sums of squared deviations over ``count - correction``; NaN where that is not positive."""
        return _quotient(self._known("m2"), self.count - correction)

    @property
    def skewness(self) -> Values:
        r"""Fisher's :math:`g_1`; NaN for constant data."""
        m2, m3 = self._known("m2"), self._known("m3")
        return np.where(m2 > 0, np.sqrt(self.count) * _quotient(m3, m2) / np.sqrt(np.where(m2 > 0, m2, 1.0)), np.nan)

    @property
    def kurtosis(self) -> Values:
        r"""Excess kurtosis :math:`g_2`; NaN for constant data."""
        m2, m4 = self._known("m2"), self._known("m4")
        return self.count * _quotient(m4, m2) / np.where(m2 > 0, m2, 1.0) - 3.0

    @property
    def l0_norm(self) -> Values:
        """Numbers of elements that are not 0."""
        return self.count - self._known("zeros")

    @property
    def l1_norm(self) -> Values:
        """Sums of magnitudes."""
        return self._known("l1")

    @property
    def l2_norm(self) -> Values:
        """Roots of the sums of squares."""
        return np.sqrt(self._known("sumsq"))

    @property
    def linf_norm(self) -> Values:
        """Largest magnitudes; NaN for no element.  With `finite_only` those of the finite elements."""
        low, high = ("finite_min", "finite_max") if self.finite_only else ("min", "max")
        return np.maximum(-self._known(low), self._known(high)) + 0.0

    @property
    def rms(self) -> Values:
        """Roots of the mean squares; NaN for no element."""
        return np.sqrt(_quotient(self._known("sumsq"), self.count))

    @property
    def sparsity(self) -> Values:
        """Shares of elements equal to 0; NaN for no element."""
        return _quotient(self._column("zeros"), self.n)


def _quotient(a: Values, b: Values) -> Values:
    """Return ``a / b``; NaN where `b` is not positive."""
    is_positive = b > 0
    if is_positive.all():
        return a / b
    return np.where(is_positive, a / np.where(is_positive, b, 1.0), np.nan)
