r"""What is known of a set of numbers after one look, and how two such sets become one.

A :class:`Record` holds counts, extrema and central moments of the elements of one or more tensors.
Records merge exactly, so a value over several calls, micro-batches, chunks or ranks is the value over all elements together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ikkuna.errors import ConfigError

__all__ = ["FIELDS", "HISTOGRAMS", "Record", "closure", "merge"]

FIELDS = ("n", "mean", "m2", "m3", "m4", "min", "max", "l1", "sumsq", "zeros", "nans", "infs", "codes", "sampled_codes")
"""Every statistic a :class:`Record` can hold; a subscriber names those it needs in its ``fields``."""

HISTOGRAMS = frozenset(("codes", "sampled_codes"))
"""Those of them that are arrays of counts."""

_NEEDS = {"mean": (), "m2": ("mean",), "m3": ("mean", "m2"), "m4": ("mean", "m2", "m3")}
_SCREENED = frozenset(("mean", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs"))


def closure(fields: Iterable[str]) -> frozenset[str]:
    """Return `fields` with those they are computed from; ``n`` is always there.

    A sum over elements also tells how many of them were not finite, so it brings ``nans`` and ``infs``.

    Raises
    ------
    ConfigError
        If a name is not one of :data:`FIELDS`.

    Examples
    --------
    >>> sorted(closure(["m2"]))
    ['infs', 'm2', 'mean', 'n', 'nans']
    """
    asked = set(fields)
    if unknown := asked - set(FIELDS):
        raise ConfigError(f"unknown statistics field {sorted(unknown)[0]!r}; known: {', '.join(FIELDS)}")
    for field in tuple(asked):
        asked.update(_NEEDS.get(field, ()))
    if asked & _SCREENED:
        asked.update(("nans", "infs"))
    return frozenset(asked | {"n"})


@dataclass(slots=True)
class Record:
    r"""Statistics of `n` numbers :math:`x_i`, as floats.

    Sums run over the finite elements, of which there are :math:`k = n - \mathrm{nans} - \mathrm{infs}`.
    A field that nobody asked for is ``None``; a property that needs it raises `ConfigError`.

    Parameters
    ----------
    n : number of elements
    center : :math:`\bar x`, mean of the finite elements
    m2, m3, m4 : central moments' sums :math:`\sum (x_i - \bar x)^p`
    min, max : extrema, infinities included; NaN if an element is
    l1 : :math:`\sum |x_i|`
    sumsq : :math:`\sum x_i^2`
    zeros : number of elements equal to 0
    nans, infs : number of elements that are NaN, or infinite
    codes : float-code histogram, an int64 array
    sampled_codes : the same of a random sample, scaled to all elements
    ranks : in training on several ranks, the record of each before they became one, ``None`` for a rank without;
        empty in one process, and unless a subscriber asks with ``per_rank``
    finite_only : whether properties speak of the finite elements alone.
        Otherwise a mean, variance or norm of data with a NaN or Inf is NaN, so that an exploded layer never draws a healthy curve.

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
        if not math.isfinite(value):
            nan, inf = int(math.isnan(value)), int(math.isinf(value))
            return cls(1, 0.0, 0.0, 0.0, 0.0, value, value, 0.0, 0.0, 0, nan, inf)
        return cls(1, value, 0.0, 0.0, 0.0, value, value, abs(value), value * value, int(value == 0), 0, 0)

    def _known(self, value: float | None, field: str) -> float:
        if value is None:
            raise ConfigError(f"the field {field!r} was not measured; name it in the subscriber's `fields`")
        if self.nans is not None and self.infs is not None and self.nans + self.infs and not self.finite_only:
            return math.nan
        return value

    @property
    def count(self) -> int:
        """Number of finite elements (of all elements, where nothing asked for a screen)."""
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
        return math.sqrt(self.count) * m3 / m2**1.5 if m2 > 0 else math.nan

    @property
    def kurtosis(self) -> float:
        r"""Excess kurtosis :math:`g_2 = k\, m_4 / m_2^2 - 3`; NaN for constant data."""
        m2, m4 = self._known(self.m2, "m2"), self._known(self.m4, "m4")
        return self.count * m4 / (m2 * m2) - 3.0 if m2 > 0 else math.nan

    @property
    def l0_norm(self) -> float:
        """Number of elements that are not 0."""
        return self.n - self._known(self.zeros, "zeros")

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
        """Largest magnitude; NaN for no element."""
        if not self.n:
            return math.nan
        return max(-self._known(self.min, "min"), self._known(self.max, "max"))

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
        """Return the record of every element standing there `times` over: how a mean is weighted."""
        scale = ("n", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs", "codes", "sampled_codes")
        values = {name: getattr(self, name) for name in self.__slots__}
        return Record(**{k: v * times if k in scale and v is not None else v for k, v in values.items()})


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def _extremum(pick: Any, a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


def _merge_pair(a: Record, b: Record) -> Record:
    if not a.n:
        return b
    if not b.n:
        return a
    center, m2, m3, m4 = _merge_moments(a, b)
    return Record(
        a.n + b.n,
        center,
        m2,
        m3,
        m4,
        _extremum(min, a.min, b.min),
        _extremum(max, a.max, b.max),
        _sum(a.l1, b.l1),
        _sum(a.sumsq, b.sumsq),
        _sum(a.zeros, b.zeros),
        _sum(a.nans, b.nans),
        _sum(a.infs, b.infs),
        _sum(a.codes, b.codes),
        _sum(a.sampled_codes, b.sampled_codes),
        a.finite_only,
    )


def _merge_moments(a: Record, b: Record) -> tuple[float | None, float | None, float | None, float | None]:
    """Merge central moments after Chan, Golub & LeVeque (1979) and Pébay (2008)."""
    if a.center is None or b.center is None:
        return None, None, None, None
    na, nb = a.count, b.count
    n = na + nb
    if not na or not nb:
        full = b if nb else a
        return full.center, full.m2, full.m3, full.m4
    d = b.center - a.center
    center = a.center + d * nb / n
    if a.m2 is None or b.m2 is None:
        return center, None, None, None
    m2 = a.m2 + b.m2 + d * d * na * nb / n
    if a.m3 is None or b.m3 is None:
        return center, m2, None, None
    m3 = a.m3 + b.m3 + d**3 * na * nb * (na - nb) / n**2 + 3 * d * (na * b.m2 - nb * a.m2) / n
    if a.m4 is None or b.m4 is None:
        return center, m2, m3, None
    m4 = (
        a.m4
        + b.m4
        + d**4 * na * nb * (na * na - na * nb + nb * nb) / n**3
        + 6 * d * d * (na * na * b.m2 + nb * nb * a.m2) / n**2
        + 4 * d * (na * b.m3 - nb * a.m3) / n
    )
    return center, m2, m3, m4


def merge(*records: Record) -> Record:
    """Return the record of all elements of `records` together; of none, a record with ``n = 0``.

    Records must hold the same fields; one held by only some of them is dropped.
    """
    return reduce(_merge_pair, records) if records else Record()
