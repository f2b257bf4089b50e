"""Counts consecutive failures, for everything that is disabled after too many of them."""

from collections.abc import Hashable

__all__ = ["FailureCounter"]


class FailureCounter:
    """Counts consecutive failures, separately for each key.

    Parameters
    ----------
    limit : int
        Number of consecutive failures after which :meth:`is_exhausted` returns ``True``.

    Attributes
    ----------
    counts : dict of Hashable to int
        The number of consecutive failures of each key that failed last.

    Examples
    --------
    >>> failures = FailureCounter(limit=2)
    >>> failures.add("measure"), failures.add("measure"), failures.is_exhausted("measure")
    (1, 2, True)
    >>> failures.reset("measure")
    >>> failures.is_exhausted("measure")
    False
    """

    def __init__(self, limit: int = 10) -> None:
        self.limit = limit
        self.counts: dict[Hashable, int] = {}

    def add(self, key: Hashable = None) -> int:
        """Count a failure; return the number of consecutive failures of `key`."""
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count

    def reset(self, key: Hashable = None) -> None:
        """Forget the failures of `key` after a success."""
        self.counts.pop(key, None)

    def is_exhausted(self, key: Hashable = None) -> bool:
        """Return whether `key` has failed `limit` times in a row."""
        return self.counts.get(key, 0) >= self.limit

    @staticmethod
    def is_logged(count: int) -> bool:
        """Return whether the failure of this number is logged: the 1st, 10th, 100th …

        Examples
        --------
        >>> [count for count in range(1, 2000) if FailureCounter.is_logged(count)]
        [1, 10, 100, 1000]
        """
        return str(count).strip("0") == "1"
