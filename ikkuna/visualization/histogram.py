"""The interface of histograms."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

__all__ = ["HistogramLike", "is_histogram"]

_ATTRIBUTES = ("min", "max", "num", "sum", "sum_squares", "bucket_limits", "bucket_counts")


class HistogramLike(Protocol):
    """Counts of numbers between edges, with their sums.

    Bucket *i* ends at ``bucket_limits[i]``, where bucket *i + 1* begins.
    """

    @property
    def min(self) -> float: ...  # noqa: D102 - the names are those of TensorBoard's HistogramProto
    @property
    def max(self) -> float: ...  # noqa: D102
    @property
    def num(self) -> float: ...  # noqa: D102
    @property
    def sum(self) -> float: ...  # noqa: D102
    @property
    def sum_squares(self) -> float: ...  # noqa: D102
    @property
    def bucket_limits(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def bucket_counts(self) -> Sequence[float]: ...  # noqa: D102


def is_histogram(value: Any) -> TypeGuard[HistogramLike]:
    """Return whether `value` has all attributes of a :class:`HistogramLike`; ``isinstance`` would be much slower.

    Examples
    --------
    >>> is_histogram(1.0)
    False
    """
    return all(hasattr(value, name) for name in _ATTRIBUTES)
