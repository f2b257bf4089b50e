"""The backend that TensorBoard reads."""

from typing import Any

from ikkuna.visualization.backend import Series
from ikkuna.visualization.event_file import (
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
from ikkuna.visualization.file_backend import FileBackend
from ikkuna.visualization.overview import STATISTICS, overview
from ikkuna.visualization.tag import image_tag, overview_tag, series_tag, text_tag
from ikkuna.visualization.wall_clock import WallClock

__all__ = ["TensorBoardBackend"]


class _Group:
    """The modules of a kind in a pass: three curves sum up their values of a step."""

    def __init__(self, member: Series) -> None:
        self.prefixes = [scalar_prefix(overview_tag(member, statistic)) for statistic in STATISTICS]
        self.values: dict[str | None, float] = {}

    def take_entries(self) -> list[bytes]:
        values = list(self.values.values())
        self.values.clear()
        if len(values) < 2:
            return []
        return [prefix + float32(value) for prefix, value in zip(self.prefixes, overview(values), strict=True)]


class TensorBoardBackend(FileBackend):
    """Write an event file with the tags ``{kind}/{module}``, ``Network/{kind}`` and ``Overview/{kind}_min|median|max``.

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
        if curve[1] is not None:
            curve[1].values[series.name] = value
        self._values += 1

    def _group(self, series: Series) -> _Group | None:
        if series.name is None:
            return None
        return self._groups.setdefault((series.kind, series.pass_name), _Group(series))

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram (see :class:`~ikkuna.visualization.histogram.HistogramLike`) to the step's event."""
        self._entries.append(histogram_value(series_tag(series), histogram))
        self._values += 1

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a page of Markdown to the step's event."""
        self._entries.append(text_value(text_tag(title), text))
        self._values += 1

    def add_image(self, title: str, png: bytes, height: int, width: int, step: int) -> None:
        """Add a picture, encoded as PNG, to the step's event, in the group ``Heatmaps``."""
        self._entries.append(image_value(image_tag(title), png, height, width))
        self._values += 1

    def _take_block(self, step: int) -> bytes:
        for group in self._groups.values():
            self._entries += group.take_entries()
        entries, self._entries = self._entries, []
        if not entries:
            return b""
        now = self._clock.now()
        block = step_record(b"".join(entries), step, now)
        if not self._started and step > 0:
            block = start_record(step, now) + block
        self._started = True
        return block
