"""The backend that draws pictures: files in the run, and live ones in a notebook."""

import io
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NotebookFigure
from ikkuna.visualization.backend import Backend, Series
from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.module_table import ModuleEntry
from ikkuna.visualization.names import picture_name
from ikkuna.visualization.pictures.chart import Chart, HistogramChart, MatrixChart
from ikkuna.visualization.pictures.chart_picture import draw_chart, draw_histograms, draw_matrix
from ikkuna.visualization.pictures.notebook import Screen, Sheet, in_notebook
from ikkuna.visualization.pictures.redraw_thread import RedrawThread

__all__ = ["MPLBackend"]

log = logging.getLogger("ikkuna")


class _Frame:
    """One picture: what it shows, whether it is drawn, its file and its place in a notebook.

    Training fills it, a thread draws it; the lock is held to copy numbers only.
    """

    def __init__(self, name: str, chart: Any, draw: Callable[[Any], NotebookFigure], dpi: float) -> None:
        self.name = name
        self.sheet = Sheet(name)
        self.screen: Screen | None = None
        self.directory: Path | None = None
        self._chart = chart
        self._draw = draw
        self._dpi = dpi
        self._lock = threading.RLock()  # a signal handler may enter it again
        self._added = self._drawn = 0
        self._step = 0
        self._values: dict[str | None, Any] = {}

    def take(self, name: str | None, value: Any, step: int) -> None:
        """Take a value of the open step."""
        self._values[name] = value
        self._step = step

    def commit(self) -> None:
        """Add the values of the step to the chart."""
        if self._values:
            with self._lock:
                self._chart.add(self._step, self._values)
                self._added += 1
            self._values = {}

    @property
    def changed(self) -> bool:
        """Whether there is more than is drawn."""
        return self._drawn < self._added

    def draw(self) -> None:
        """Draw what is there now, write the file, and fill the place in the notebook."""
        with self._lock:
            view, added = self._chart.view(), self._added
        picture = self._draw(view)
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png", dpi=self._dpi)
        picture.clear()  # its parts refer to one another, and whoever trains may have turned off the garbage collector
        self.sheet = Sheet(self.name, buffer.getvalue())
        if self.screen is not None:
            self.screen.show(self.sheet)
        if self.directory is not None:
            _replace(self.directory / f"{self.name}.png", self.sheet.png)
        self._drawn = added


class MPLBackend(Backend):
    """Draw pictures with matplotlib: ``pictures/{kind}.png`` in the run's directory, and in a notebook below the running cell.

    There is one picture for each kind, with a line for each module.
    Of more than `lines` modules it shows the least value, quartiles and the greatest.
    Histograms stand behind one another, in a panel for each module: ``pictures/{kind}_histograms.png``.
    Of matrices the latest is drawn: ``pictures/{kind}_matrix.png``.
    Values of another pass than training are in ``{kind}.{pass}.png``.  Pages of text are not drawn.

    Pictures are drawn in a thread of its own, without a display and without pyplot; a subscriber's ``title=`` and ``ylims=`` are honoured.
    Memory does not grow with steps: of a long run each line keeps its lowest and highest values.

    Parameters
    ----------
    interval : float
        Seconds between drawings, more if drawing takes more than a twentieth of the time.
    lines : int
        Most lines in a picture.
    live : bool, optional
        Show pictures in the notebook, and replace them as they are drawn; by default if this is one.
    dpi : float
        Dots in an inch; a picture is 8 × 4.5 inches.

    Raises
    ------
    ConfigError
        If a number is not positive.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = MPLBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("loss"), 0.5, 0)
    ...     backend.commit(0)
    ...     backend.close(None), [path.name for path in Path(directory, "pictures").iterdir()]
    (True, ['loss.png'])
    >>> backend.pictures
    {'loss': <picture of loss>}
    """

    def __init__(self, *, interval: float = 5.0, lines: int = 16, live: bool | None = None, dpi: float = 100.0) -> None:
        for name, value in (("interval", interval), ("lines", lines), ("dpi", dpi)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"MPLBackend needs {name} > 0, got {value!r}")
        self._lines = lines
        self._live = live
        self._dpi = dpi
        self._directory: Path | None = None
        self._order = ModuleOrder()
        self._frames: dict[str, _Frame] = {}
        self._of_series: dict[tuple[Series, str], _Frame] = {}
        self._studio = RedrawThread(lambda: list(self._frames.values()), interval)

    def open(self, directory: Path) -> None:
        """Draw below `directory`."""
        self._directory = directory / "pictures"
        if self._live is None:
            self._live = in_notebook()

    def describe(self, modules: Sequence[ModuleEntry]) -> None:
        """List modules in their order in the network."""
        self._order = ModuleOrder(modules)

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a point to a line."""
        self._frame(series, "").take(series.name, value, step)

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram to a panel."""
        self._frame(series, "_histograms").take(series.name, histogram, step)

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Put a matrix in the place of the one before."""
        if matrix.values.size:
            self._frame(series, "_matrix").take(series.name, matrix, step)

    def _frame(self, series: Series, ending: str) -> _Frame:
        if (frame := self._of_series.get((series, ending))) is None:
            name = picture_name(series) + ending
            frame = self._frames.get(name) or self._new_frame(series, name, ending)
            self._of_series[series, ending] = frame
        return frame

    def _new_frame(self, series: Series, name: str, ending: str) -> _Frame:
        chart: Any
        draw: Callable[[Any], NotebookFigure]
        if ending == "_matrix":
            chart, draw = MatrixChart(series), draw_matrix
        elif ending:
            chart, draw = HistogramChart(series), lambda view: draw_histograms(view, self._order.key)
        else:
            chart, draw = Chart(series, self._lines), lambda view: draw_chart(view, self._order.key)
        frame = _Frame(name, chart, draw, self._dpi)
        frame.directory = self._directory
        self._frames = {**self._frames, name: frame}  # a new one, since a thread may be reading the old
        return frame

    def commit(self, step: int) -> None:
        """Hand the values of a step to the pictures."""
        for frame in self._frames.values():
            frame.commit()
            if self._live and frame.screen is None:
                self._reserve(frame)
        if self._frames:
            self._studio.open()

    def _reserve(self, frame: _Frame) -> None:
        try:
            frame.screen = Screen(frame.sheet)
        except Exception:
            self._live = False
            log.exception("pictures cannot be shown in this notebook; they are in '%s'", self._directory)

    @property
    def pictures(self) -> dict[str, Sheet]:
        """Every picture as it was drawn last, by its name."""
        return {name: frame.sheet for name, frame in self._frames.items()}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is drawn; say whether it is."""
        return self._studio.flush(timeout)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Draw everything; what takes longer than `timeout` goes on in the background and is named in the log."""
        return self._studio.close(timeout)


def _replace(path: Path, data: bytes) -> None:
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)  # someone may have tidied up
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(data)
    os.replace(beside, path)
