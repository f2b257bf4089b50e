"""Which row of a recorder's tables belongs to which site."""

from collections.abc import Iterator
from threading import RLock

from ikkuna.observation.rows.site import Site

__all__ = ["Key", "RowIndex"]


Key = tuple[Site, str]
"""A site, and the name of a parameter or the path of an output."""


class RowIndex:
    """The number of the row of each site and path, the same in all steps of a recorder.

    Attributes
    ----------
    keys : list
        The site and path of each row.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._rows: dict[Key, int] = {}
        self._by_kind: tuple[int, dict[str, list[int]]] = 0, {}  # of the first rows
        self._lock = RLock()  # reentrant, because an exception can interrupt the release

    def row(self, site: Site, path: str) -> int:
        """Return the number of a row."""
        key = site, path
        row = self._rows.get(key)
        return self._new_row(key) if row is None else row

    def _new_row(self, key: Key) -> int:
        with self._lock:
            if key not in self._rows:
                self.keys.append(key)
                self._rows[key] = len(self.keys) - 1
            return self._rows[key]

    def rows_of_kind(self, kind: str) -> list[int]:
        """Return the rows of one kind in the order of their first measurement."""
        with self._lock:
            count, by_kind = len(self.keys), self._by_kind[1]
            if count > self._by_kind[0]:
                by_kind = {name: [*rows] for name, rows in by_kind.items()}
                for row in range(self._by_kind[0], count):
                    by_kind.setdefault(self.keys[row][0].kind, []).append(row)
                self._by_kind = count, by_kind  # at once, because an exception can interrupt the loop
            return by_kind.get(kind, [])

    def rows_of(self, kinds: frozenset[str]) -> Iterator[int]:
        """Yield the rows of some kinds."""
        return (row for row, (site, _) in enumerate(self.keys) if site.kind in kinds)
