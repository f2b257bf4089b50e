"""A backend that keeps all values in memory, and the checks that every backend must pass."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikkuna.backends.backend import Backend
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.values import Matrix


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


@dataclass(frozen=True)
class _Histogram:
    """A histogram of the numbers 1, 2 and 4."""

    min: float = 1.0
    max: float = 4.0
    num: float = 3.0
    sum: float = 7.0
    sum_squares: float = 21.0
    bucket_limits: tuple[float, ...] = (0.0, 2.0, 4.0)
    bucket_counts: tuple[float, ...] = (0.0, 2.0, 1.0)


_SERIES = (
    Series("loss"),
    Series("loss", None, "testing"),
    Series("weights_norm2", "features.0", title="Norm", ylims=(0.0, 1.0)),
    Series("weights_norm2", "../../outside"),
    Series("/weights", "/outside"),
    Series("weights", "Schicht α\n\0"),
    Series("", ""),
)
_GROUP = SeriesGroup("weights_mean", ("features.0", "../outside", None), title="Mean")
_VALUES = (0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, 5e-324)


def check_backend(make: Callable[[], Backend], directory: Path) -> None:
    """Raise `AssertionError` if a backend returned by `make` breaks the contract of backends.

    - The constructor, and ``close()`` of a backend that was never opened, create and change no file.
    - Any number is accepted as a value and any text as a name; histograms, matrices, Markdown texts and findings are accepted.
    - No file is written outside the given directory.
    - After ``flush()`` all committed values are stored, none was dropped, and ``acked_step`` is the last step (or ``None``).
    - ``close()`` returns ``True``, also the second time.

    Parameters
    ----------
    make : callable
        Returns a new backend.
    directory : Path
        A directory for the files of the check, each time in one of their own; nothing else may write to it meanwhile.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.testing import RecordingBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     check_backend(RecordingBackend, Path(directory))
    """
    directory.mkdir(parents=True, exist_ok=True)
    inside = Path(tempfile.mkdtemp(prefix="outer", dir=directory)) / "run"
    inside.mkdir()
    before = _files(directory)
    unused = make()
    assert unused.close(), "close() of a backend that was never opened returned False"
    assert _files(directory) == before, "a backend that was never opened wrote a file"
    backend = make()
    backend.open(inside)
    for step, value in enumerate(_VALUES):
        for series in _SERIES:
            backend.add_scalar(series, value, step)
        backend.add_group(_GROUP, np.array([value, 0.5, value]), step)
        backend.add_histogram(_SERIES[2], _Histogram(), step)
        backend.add_matrix(_SERIES[3], Matrix(("a", "b"), ("x", "y\0"), np.array([[0.5, value], [-1.0, 1.0]])), step)
        backend.add_text("Model", "| a | b |\n|---|---|\n| 1 | 2 |", step)
        backend.add_finding(Finding("dead_units", "warning", "All units are dead.", advice="lower the bias"), step)
        backend.commit(step)
    last = len(_VALUES) - 1
    assert backend.flush(10.0), "flush() returned False: not everything was stored"
    assert backend.dropped == 0, f"{backend.dropped} values were dropped"
    assert backend.acked_step in (None, last), f"after flush() acked_step is {backend.acked_step}, expected {last}"
    assert backend.close(10.0), "close() returned False: not everything was stored"
    assert backend.close(10.0), "the second close() returned False, the first True"
    outside = [path for path in _files(directory) - before if inside not in path.parents]
    assert not outside, f"the backend wrote outside its directory: {', '.join(map(str, outside))}"


def _files(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))
