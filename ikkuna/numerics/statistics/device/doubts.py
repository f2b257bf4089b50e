"""Which rows float32 is not enough for."""

import math

from ikkuna.numerics.statistics.table import COLUMN, Values

__all__ = ["Doubts"]

_SMALLEST, _LARGEST = 1e-16, 1e18  # of a root mean square; beyond, squares leave the range of float32
_OFFSET = 100  # of a squared mean to the variance; beyond, a variance in float32 loses digits
_N, _NANS, _INFS, _SUMSQ, _MEAN, _M2 = (COLUMN[name] for name in ("n", "nans", "infs", "sumsq", "mean", "m2"))


class Doubts:
    """Remembers which rows were measured with sums in float32 although these are not precise enough for them.

    They are measured precisely from the next step on, see `ExactRows`, until float32 is enough again.
    A norm of 0 is the norm of zeros or of numbers whose squares are too small for float32; it is doubted once.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.table import row_of
    >>> doubts = Doubts()
    >>> doubts.note(0, row_of(0.0), frozenset(("sumsq",)), is_exact=False)
    >>> 0 in doubts
    True
    >>> doubts.note(0, row_of(1e-25), frozenset(("sumsq",)), is_exact=True)
    >>> 0 in doubts
    True
    >>> doubts.note(0, row_of(1.0), frozenset(("sumsq",)), is_exact=True)
    >>> 0 in doubts
    False
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._zeros: set[int] = set()

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def note(self, row: int, values: Values, fields: frozenset[str], is_exact: bool) -> None:
        """Decide whether float32 is enough for a row with these values.

        Parameters
        ----------
        row : int
            Number of the row.
        values : array
            ``(columns,)``
        fields : frozenset of str
            The statistics that were measured.
        is_exact : bool
            Whether they were measured precisely.
        """
        if is_exact and row not in self._rows:
            return
        is_zero = "sumsq" in fields and not values[_SUMSQ] and not values[_NANS] + values[_INFS]
        if is_zero:
            if is_exact:
                self._zeros.add(row)
            if row in self._zeros:
                self._rows.discard(row)
                return
        else:
            self._zeros.discard(row)
        (self._rows.discard if _is_enough(values, fields) else self._rows.add)(row)


def _is_enough(values: Values, fields: frozenset[str]) -> bool:
    """Return whether float32 is enough for data with such statistics."""
    n, mean = values[_N], values[_MEAN]
    if values[_NANS] + values[_INFS]:
        return False
    variance = values[_M2] / n
    if "sumsq" in fields:
        rms = math.sqrt(values[_SUMSQ] / n)
    elif "m2" in fields:
        rms = math.sqrt(variance + mean * mean)
    else:
        return True
    return _SMALLEST < rms < _LARGEST and ("m2" not in fields or mean * mean <= _OFFSET * variance)
