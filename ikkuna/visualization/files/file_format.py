"""What a writer must know of the file it writes."""

from typing import Protocol

__all__ = ["FileFormat"]


class FileFormat(Protocol):
    """What a writer must know of the format of its file."""

    def name(self, stem: str) -> str:
        """Return the file's name; `stem` differs for every writer."""

    def header(self) -> bytes:
        """Return the bytes every file begins with."""

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return the block that says that `values` values of the steps `first` to `last` are missing."""
