"""What a histogram must offer to be shown."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["HistogramLike"]


@runtime_checkable
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
