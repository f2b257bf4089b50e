"""The contract every backend keeps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ikkuna.visualization.backend import Backend, Series
from ikkuna.visualization.matrix import Matrix

__all__ = ["check_backend"]


@dataclass(frozen=True)
class _Histogram:
    """Of the numbers 1, 2 and 4."""

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
_VALUES = (0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, 5e-324)


def check_backend(make: Callable[[], Backend], directory: Path) -> None:
    """Raise `AssertionError` if the backends that `make` returns break the contract of backends.

    - Making one, and closing one that was never opened, touches no file.
    - It takes any number as a value, any text as a name, a histogram, a matrix, and a page of Markdown.
    - It writes nothing outside the directory it was given.
    - After ``flush()`` everything committed is stored, nothing was dropped, and ``acked_step`` is the last step (or ``None``).
    - ``close()`` says so, and does nothing the second time.

    Parameters
    ----------
    make : callable
        Returns a new backend.
    directory : Path
        Where to work; empty.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.testing import RecordingBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     check_backend(RecordingBackend, Path(directory))
    """
    inside = directory / "outer" / "run"
    inside.mkdir(parents=True)
    before = _files(directory)
    unused = make()
    assert unused.close(), "close() of a backend that was never opened says that values were lost"
    assert _files(directory) == before, "a backend that was never opened wrote a file"
    backend = make()
    backend.open(inside)
    for step, value in enumerate(_VALUES):
        for series in _SERIES:
            backend.add_scalar(series, value, step)
        backend.add_histogram(_SERIES[2], _Histogram(), step)
        backend.add_matrix(_SERIES[3], Matrix(("a", "b"), ("x", "y\0"), np.array([[0.5, value], [-1.0, 1.0]])), step)
        backend.add_text("Model", "| a | b |\n|---|---|\n| 1 | 2 |", step)
        backend.commit(step)
    last = len(_VALUES) - 1
    assert backend.flush(10.0), "flush() says that not everything was stored"
    assert backend.dropped == 0, f"{backend.dropped} values were dropped"
    assert backend.acked_step in (None, last), f"after flush() acked_step is {backend.acked_step}, expected {last}"
    assert backend.close(10.0), "close() says that not everything was stored"
    assert backend.close(10.0), "the second close() has another answer than the first"
    outside = [path for path in _files(directory) - before if inside not in path.parents]
    assert not outside, f"it wrote outside its directory: {', '.join(map(str, outside))}"


def _files(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))
