"""A backend that keeps all values in memory."""

from typing import Any

from ikkuna.visualization.backend import Backend
from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.series import Series

__all__ = ["RecordingBackend"]


class RecordingBackend(Backend):
    """Keeps all values in lists.

    Attributes
    ----------
    values : list of tuple
        ``(series, value, step)`` for each number, histogram and matrix, in order.
    texts : list of tuple
        ``(title, text, step)`` for each text.
    commits : list of int
        The committed steps.

    Examples
    --------
    >>> backend = RecordingBackend()
    >>> backend.add_scalar(Series("loss"), 0.5, 3)
    >>> [(series.kind, value, step) for series, value, step in backend.values]
    [('loss', 0.5, 3)]
    """

    def __init__(self) -> None:
        self.values: list[tuple[Series, Any, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.commits: list[int] = []
        self.closed = False

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Append a number to `values`."""
        self.values.append((series, value, step))

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Append a histogram to `values`."""
        self.values.append((series, histogram, step))

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Append a matrix to `values`."""
        self.values.append((series, matrix, step))

    def add_text(self, title: str, text: str, step: int) -> None:
        """Append a text to `texts`."""
        self.texts.append((title, text, step))

    def commit(self, step: int) -> None:
        """Append a step to `commits`."""
        self.commits.append(step)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Set ``closed`` and return ``True``."""
        self.closed = True
        return True
