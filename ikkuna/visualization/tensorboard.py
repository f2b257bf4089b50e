"""The backend that TensorBoard reads."""

import time
from collections.abc import Sequence
from typing import Any

from ikkuna.visualization.backend import Series
from ikkuna.visualization.files.event_file import (
    EventFormat,
    float32,
    histogram_value,
    image_value,
    scalar_prefix,
    start_record,
    step_record,
    text_value,
    titled_scalar_value,
)
from ikkuna.visualization.files.file_backend import FileBackend
from ikkuna.visualization.files.wall_clock import WallClock
from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.module_table import ModuleEntry, module_table
from ikkuna.visualization.names import heatmap_title, image_tag, matrix_tag, overview_tag, series_tag, text_tag
from ikkuna.visualization.overview import STATISTICS, overview
from ikkuna.visualization.pictures.heatmap_picture import draw_matrix
from ikkuna.visualization.pictures.heatmap_schedule import HeatmapSchedule, Picture

__all__ = ["TensorBoardBackend"]


class _Group:
    """The modules of a kind in a pass: three curves sum up their values of a step, and a heatmap shows all."""

    def __init__(self, member: Series) -> None:
        self.prefixes = [scalar_prefix(overview_tag(member, statistic)) for statistic in STATISTICS]
        self.title = heatmap_title(member)
        self.values: dict[str, float] = {}

    def entries(self) -> list[bytes]:
        values = list(self.values.values())
        return [prefix + float32(value) for prefix, value in zip(self.prefixes, overview(values), strict=True)]


class TensorBoardBackend(FileBackend):
    """Write an event file with the tags ``{kind}/{module}``, ``Network/{kind}`` and ``Overview/{kind}_min|median|max``.

    ``Heatmaps/{kind}`` has a row for each module and a column for each step, and is drawn now and then in a thread of its own;
    ``Matrices/{kind}`` are pictures of matrices, and ``Text/Modules`` lists the modules.
    Values of another pass than training are found under ``{kind}.{pass}``.
    A value is rounded to single precision, as everywhere in TensorBoard.
    All values of a step share one event and one time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = WallClock()
        self._curves: dict[Series, tuple[bytes, _Group | None]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._entries: list[bytes] = []
        self._started = False
        self._gallery = HeatmapSchedule(self._hang)
        self._order = ModuleOrder()

    def _format(self) -> EventFormat:
        return EventFormat(self._clock)

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a value to the step's event; the first of a series carries its title."""
        curve = self._curves.get(series)
        if curve is None:
            curve = self._curves[series] = scalar_prefix(series_tag(series)), self._group(series)
            first = titled_scalar_value(series_tag(series), value, series.title) if series.title else None
            self._entries.append(first or curve[0] + float32(value))
        else:
            self._entries.append(curve[0] + float32(value))
        if curve[1] is not None and series.name is not None:
            curve[1].values[series.name] = value
        self._values += 1

    def _group(self, series: Series) -> _Group | None:
        if series.name is None or not self._order.belongs(series.name):
            return None
        return self._groups.setdefault((series.kind, series.pass_name), _Group(series))

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram (see :class:`~ikkuna.visualization.histogram.HistogramLike`) to the step's event."""
        self._entries.append(histogram_value(series_tag(series), histogram))
        self._values += 1

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Add a picture of a matrix to the step's event; it is drawn at once, in some milliseconds."""
        if matrix.values.size:
            self._entries.append(image_value(matrix_tag(series), *draw_matrix(matrix)))
        self._values += 1

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a page of Markdown to the step's event."""
        self._entries.append(text_value(text_tag(title), text))
        self._values += 1

    def describe(self, modules: Sequence[ModuleEntry]) -> None:
        """List the modules in a page of text, and show them in their order in heatmaps."""
        self._order = ModuleOrder(modules)
        self._gallery.arrange(self._order)
        if modules:
            self._entries.append(text_value(text_tag("Modules"), module_table(modules)))

    def add_image(self, title: str, png: bytes, height: int, width: int, step: int) -> None:
        """Add a picture, encoded as PNG, to the step's event, in the group ``Heatmaps``."""
        self._entries.append(image_value(image_tag(title), png, height, width))
        self._values += 1

    def commit(self, step: int) -> None:
        """Queue the step's block for the writer's thread."""
        super().commit(step)
        self._gallery.tick()

    def close(self, timeout: float | None = 2.0) -> bool:
        """Draw what has not been drawn, bring everything to the disk, and release the file."""
        begin = time.monotonic()
        if self._writer is not None:
            self._gallery.finish(None if timeout is None else timeout / 2)
        return super().close(None if timeout is None else timeout - (time.monotonic() - begin))

    def _hang(self, pictures: list[Picture], step: int) -> None:
        """Queue pictures, from whatever thread has drawn them, in an event of their own."""
        entries = [image_value(image_tag(title), png, height, width) for title, png, height, width in pictures]
        if self._writer is not None:
            self._writer.submit(step_record(b"".join(entries), step, self._clock.now()), step, len(entries))

    def _take_block(self, step: int) -> bytes:
        for group in self._groups.values():
            if len(group.values) > 1:
                self._entries += group.entries()
                self._gallery.add(group.title, step, group.values)
            group.values.clear()
        entries, self._entries = self._entries, []
        if not entries:
            return b""
        now = self._clock.now()
        block = step_record(b"".join(entries), step, now)
        if not self._started and step > 0:
            block = start_record(step, now) + block
        self._started = True
        return block
