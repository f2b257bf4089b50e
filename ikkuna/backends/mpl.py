"""The backend that draws pictures: files in the run's directory, and live displays in a notebook."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ikkuna.backends.backend import Backend
from ikkuna.backends.pictures.cells import draw_matrix, encode_png
from ikkuna.backends.pictures.chart import Chart, HistogramChart, MatrixChart, MatrixView
from ikkuna.backends.pictures.drawing import draw_chart, draw_histograms, encode_figure
from ikkuna.backends.pictures.redraw import NotebookDisplay, PNGPicture, RedrawThread, in_notebook
from ikkuna.errors import ConfigError
from ikkuna.store.names import Series, picture_name
from ikkuna.store.values import Matrix, ModuleEntry, ModuleOrder
from ikkuna.support.failures import FailureCounter, log, raise_users_exception
from ikkuna.support.files import atomic_file


class _ChartImage:
    """A chart with its PNG file and its display in a notebook.

    The training thread adds values, the drawing thread draws; they hold the lock only to copy numbers.
    """

    def __init__(self, name: str, chart: Any, draw: Callable[[Any], bytes]) -> None:
        self.name = name
        self.picture = PNGPicture(name)
        self.display: NotebookDisplay | None = None
        self.directory: Callable[[], Path] | None = None
        self.folder = ""
        self._chart = chart
        self._draw = draw
        self._lock = threading.RLock()  # a signal handler may enter it again
        self._added = self._drawn = 0
        self._step = 0
        self._values: dict[str | None, Any] = {}

    def add(self, name: str | None, value: Any, step: int) -> None:
        """Add a value of the open step."""
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
        """Whether steps have been added since it was drawn."""
        return self._drawn < self._added

    def draw(self) -> None:
        """Draw the chart, write the file, and update the display."""
        with self._lock:
            view, added = self._chart.view(), self._added
        self.picture = PNGPicture(self.name, self._draw(view))
        if self.display is not None:
            self.display.update(self.picture)
        if self.directory is not None:
            _replace(self.directory() / self.folder / f"{self.name}.png", self.picture.png)
        self._drawn = added


class MPLBackend(Backend):
    """Draw pictures with matplotlib: ``pictures/{kind}.png`` in the run's directory, and in a notebook below the running cell.

    A picture of values has a line for each module, or, for more than `lines` modules, minimum, quartiles and maximum.
    ``pictures/{kind}_histograms.png`` has a panel for each module with its histograms at several steps.
    ``pictures/{kind}_matrix.png`` shows the latest matrix.
    Values of another pass than training are in ``{kind}.{pass}.png``.  Pages of text are not drawn.

    A thread draws the pictures, without a display and without pyplot.  A subscriber's ``title=`` and ``ylims=`` are used.
    Memory does not grow with steps: in a long run each line keeps the least and greatest values of groups of steps.

    Parameters
    ----------
    interval : float
        Seconds between two drawings; more if drawing takes more than a twentieth of the time.
    lines : int
        Largest number of lines in a picture.
    live : bool, optional
        Whether to display the pictures in the notebook and replace them when they are drawn; by default, inside a notebook.
    dpi : float
        Dots per inch; a chart is 8 × 4.5 inches.

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
        self._directory: Callable[[], Path] | None = None
        self._folder = "pictures"
        self._order = ModuleOrder()
        self._images: dict[str, _ChartImage] = {}
        self._of_series: dict[tuple[Series, str], _ChartImage] = {}
        self._failures = FailureCounter()  # of displays in a notebook
        self._thread = RedrawThread(lambda: list(self._images.values()), interval)

    def open(self, directory: Path) -> None:
        """Write pictures below `directory`."""
        self._prepare(lambda: directory)

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Create the directory in the drawing thread, when a picture is drawn."""
        if type(self).open is not MPLBackend.open:
            super().open_later(make_directory)
            return
        self._prepare(make_directory)

    def _prepare(self, make_directory: Callable[[], Path]) -> None:
        self._directory = make_directory
        if self._live is None:
            self._live = in_notebook()

    def describe(self, modules: Sequence[ModuleEntry]) -> None:
        """Sort the modules in a picture as in the network."""
        self._order = ModuleOrder(modules)

    def resume(self, step: int) -> None:
        """Leave the pictures of the earlier process, which show the steps before, and draw into another folder.

        If the training of this process goes back to a checkpoint, its pictures stay the same files.
        """
        if not self._images:
            self._folder = f"pictures_from_step_{step}"

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a point to a line."""
        self._image(series, "").add(series.name, value, step)

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram to a panel."""
        self._image(series, "_histograms").add(series.name, histogram, step)

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Replace the matrix of the series."""
        if matrix.values.size:
            self._image(series, "_matrix").add(series.name, matrix, step)

    def _image(self, series: Series, ending: str) -> _ChartImage:
        if (image := self._of_series.get((series, ending))) is None:
            name = picture_name(series, ending)
            image = self._images.get(name) or self._new_image(series, name, ending)
            self._of_series[series, ending] = image
        return image

    def _new_image(self, series: Series, name: str, ending: str) -> _ChartImage:
        chart: Any
        draw: Callable[[Any], bytes]
        if ending == "_matrix":
            chart, draw = MatrixChart(series), lambda view: _draw_matrix(view, self._dpi)
        elif ending:
            chart, draw = (
                HistogramChart(series),
                lambda view: encode_figure(draw_histograms(view, self._order.key), self._dpi),
            )
        else:
            chart, draw = (
                Chart(series, self._lines),
                lambda view: encode_figure(draw_chart(view, self._order.key), self._dpi),
            )
        image = _ChartImage(name, chart, draw)
        image.directory, image.folder = self._directory, self._folder
        self._images = {**self._images, name: image}  # a new dict, because the thread may be iterating over the old one
        return image

    def commit(self, step: int) -> None:
        """Add the values of a step to the pictures."""
        for image in self._images.values():
            image.commit()
            if self._live and image.display is None and not self._failures.is_exhausted():
                self._display(image)
        if self._images:
            self._thread.open()

    def _display(self, image: _ChartImage) -> None:
        try:
            image.display = NotebookDisplay(image.picture)
            self._failures.reset()
        except Exception as error:
            raise_users_exception(error)
            if self._failures.is_logged(self._failures.add()):
                log.exception("pictures cannot be displayed in this notebook; they are files in the run's directory")

    @property
    def pictures(self) -> dict[str, PNGPicture]:
        """Every picture as it was last drawn, by its name."""
        return {name: image.picture for name, image in self._images.items()}

    @property
    def is_unwritable(self) -> bool:
        """Whether the last attempt to draw or to store some picture failed."""
        return self._thread.is_failing

    def flush(self, timeout: float | None = None) -> bool:
        """Draw everything committed, and return whether that was done within `timeout` seconds."""
        return self._thread.flush(timeout)

    def draw(self, timeout: float | None = None) -> bool:
        """Draw everything committed."""
        return self._thread.flush(timeout)

    @property
    def drawing_seconds(self) -> float:
        """CPU time of the thread that draws."""
        return self._thread.seconds

    def close(self, timeout: float | None = 2.0) -> bool:
        """Draw everything; pictures that take longer than `timeout` seconds are finished in the background and logged."""
        if late := self._thread.close(timeout):
            what = "not finished drawing: %s. The PNGs on disk lack the last values unless the process keeps running."
            log.log(self.level, what, ", ".join(late))
        return self._thread.is_up_to_date()


def _draw_matrix(view: MatrixView, dpi: float) -> bytes:
    matrix = view.matrix
    title = f"{view.title}, step {view.step}"
    return encode_png(
        draw_matrix(matrix.values, matrix.rows, matrix.columns, limits=matrix.limits, title=title, dpi=dpi)
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)  # the directory may have been deleted
    with atomic_file(path) as file:
        file.write(data)
