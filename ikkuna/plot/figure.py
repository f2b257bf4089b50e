"""Figures that are made without pyplot, shown in notebooks and freed with their last reference."""

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

__all__ = ["FigureList", "NanCount", "NotebookFigure", "count_nonfinite", "save_figures"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NanCount:
    """The number of NaN and infinite elements in some data.

    Parameters
    ----------
    nans, infs, total : int
        Number of NaN elements, of infinite elements and of all elements.
    """

    nans: int
    infs: int
    total: int

    def __str__(self) -> str:
        shares = ((self.nans, "NaN"), (self.infs, "Inf"))
        return "\n".join(_share(count, self.total, word) for count, word in shares if count)


def _share(count: int, total: int, word: str) -> str:
    percent = 100 * count / total
    return f"{percent:.1f}% {word}" if percent >= 0.05 else f"{count} of {total} {word}"


def count_nonfinite(data: NDArray[Any]) -> NanCount | None:
    """Return the count of NaN and infinite elements, or ``None`` if every element is finite.

    Examples
    --------
    >>> str(count_nonfinite(np.array([0.0, 1.0, 2.0, np.nan])))
    '25.0% NaN'
    """
    nans, infs = int(np.isnan(data).sum()), int(np.isinf(data).sum())
    return NanCount(nans, infs, data.size) if nans or infs else None


class NotebookFigure(Figure):
    """A matplotlib Figure that a notebook displays, with counts of the elements that could not be drawn.

    Attributes
    ----------
    nan_report : dict of str to NanCount
        The counts for each panel (and gate) with NaN or infinite elements.
    """

    nan_report: dict[str, NanCount]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nan_report = {}

    def report(self, counts: Mapping[str, NanCount | None]) -> None:
        """Store the counts in `nan_report`, and log one warning if there are any."""
        found = {name: count for name, count in counts.items() if count is not None}
        self.nan_report.update(found)
        if found:
            summary = "; ".join(
                f"{name}: {str(count).replace(chr(10), ', ')}" for name, count in list(found.items())[:8]
            )
            _log.warning("not everything could be drawn: %s%s", summary, " …" if len(found) > 8 else "")

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


class FigureList(list[NotebookFigure]):
    """Several figures, which a notebook displays one below the other."""

    def _repr_html_(self) -> str:
        encoded = (base64.b64encode(figure._repr_png_()).decode() for figure in self)
        return "".join(f'<img src="data:image/png;base64,{data}"/>' for data in encoded)


def save_figures(figures: Sequence[Figure], path: Any, **options: Any) -> None:
    """Write one figure to `path`, several to ``name_0.png``, ``name_1.png``, …; write nothing for an empty path."""
    if not path:
        return
    target = Path(path)
    target = target if target.suffix else target.with_suffix(".png")
    for i, figure in enumerate(figures):
        figure.savefig(target if len(figures) == 1 else target.with_stem(f"{target.stem}_{i}"), **options)
