"""Keeps a bounded number of entries of a sequence of any length."""

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Decimator", "keep_first"]

T = TypeVar("T")


class Decimator(Generic[T]):
    """Merges groups of consecutive items, so that at most `capacity` entries are kept.

    Each entry is the merge of the same number of items, a power of 2; only the last entry may cover fewer.
    When all entries are used, each two neighbours are merged into one, and the groups become twice as large.
    The entries keep the order of the items.

    Parameters
    ----------
    capacity : int
        Largest number of entries, an even number.
    merge : callable
        Returns the merge of an earlier and a later entry.

    Examples
    --------
    >>> largest = Decimator(capacity=4, merge=max)
    >>> for item in [3, 1, 2, 9, 5, 4]:
    ...     largest.add(item)
    >>> largest.entries()
    [3, 9, 5]
    """

    def __init__(self, capacity: int, merge: Callable[[T, T], T]) -> None:
        self._capacity = capacity
        self._merge = merge
        self._entries: list[T] = []
        self._group = 1  # items of an entry
        self._room = 0  # items that the last entry still takes

    @property
    def begins_entry(self) -> bool:
        """Whether the next item begins an entry."""
        return self._room == 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: T) -> None:
        """Add an item: merge it into the last entry, or begin the next one."""
        if self._room:
            self._entries[-1] = self._merge(self._entries[-1], item)
            self._room -= 1
            return
        if len(self._entries) == self._capacity:
            pairs = zip(self._entries[::2], self._entries[1::2], strict=True)
            self._entries = [self._merge(*pair) for pair in pairs]
            self._group *= 2
        self._entries.append(item)
        self._room = self._group - 1

    def skip(self) -> None:
        """Count an item without merging it; only for an item that does not begin an entry."""
        self._room -= 1

    def entries(self) -> list[T]:
        """Return a copy of the list of entries."""
        return list(self._entries)


def keep_first(first: T, second: T) -> T:
    """Return the earlier of two entries; with it, a :class:`Decimator` keeps evenly spaced items."""
    return first
