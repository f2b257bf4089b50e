"""All heatmaps of a run, drawn now and then in a thread of their own."""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.pictures.heatmap import Heatmap, HeatmapView
from ikkuna.visualization.pictures.heatmap_picture import draw

__all__ = ["HeatmapSchedule", "Picture"]

log = logging.getLogger("ikkuna")

Picture = tuple[str, bytes, int, int]
"""Title, PNG, height and width."""


class HeatmapSchedule:
    """Keeps the heatmaps and knows when to draw them.

    The first pictures are drawn after `interval` seconds, the next ones after half as long again, and so on:
    twenty times in a day.  Training only copies what is to be drawn, and that only if the last drawing is done.

    Parameters
    ----------
    hang : takes pictures, with the step of the latest value; called in the thread that draws, or in that of :meth:`finish`
    interval : seconds
    """

    def __init__(self, hang: Callable[[list[Picture], int], None], interval: float = 15.0) -> None:
        self._hang = hang
        self._interval = interval
        self._due = time.monotonic() + interval
        self._heatmaps: dict[str, Heatmap] = {}
        self._order = ModuleOrder()
        self._drawn = -1
        self._step = -1
        self._thread: threading.Thread | None = None
        self._failed = False

    def arrange(self, order: ModuleOrder) -> None:
        """Take the order in which rows are to be shown."""
        self._order = order

    def add(self, title: str, step: int, values: dict[str, float]) -> None:
        """Take the values of a step for the heatmap of that title."""
        if (heatmap := self._heatmaps.get(title)) is None:
            heatmap = self._heatmaps[title] = Heatmap()
        heatmap.add(step, values)
        self._step = step

    def tick(self) -> None:
        """Begin to draw if it is time to."""
        if time.monotonic() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._interval *= 1.5
        self._due = time.monotonic() + self._interval
        if work := self._work():
            self._thread = threading.Thread(target=self._draw, args=work, name="ikkuna-heatmaps", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: at the end it is drawn without
                self._thread, self._drawn = None, -1

    def finish(self, timeout: float | None = 2.0) -> None:
        """Draw what has changed since the last time, as far as that can be done in `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        if (self._thread is None or not self._thread.is_alive()) and (work := self._work()):
            self._draw(*work, deadline)

    def _work(self) -> tuple[dict[str, HeatmapView], int] | None:
        if self._step == self._drawn or self._failed:
            return None
        self._drawn = self._step
        return {title: heatmap.view() for title, heatmap in self._heatmaps.items()}, self._step

    def _draw(self, tables: dict[str, HeatmapView], step: int, deadline: float | None = None) -> None:
        pictures: list[Picture] = []
        try:
            for title, cells in tables.items():
                if deadline is not None and time.monotonic() > deadline:
                    break
                if len(cells.names) > 1 and len(cells.steps) > 1:
                    pictures.append((title, *draw(self._arranged(cells))))
            if pictures:
                self._hang(pictures, step)
        except Exception:
            self._failed = True
            log.exception("heatmaps cannot be drawn; there will be none")

    def _arranged(self, cells: HeatmapView) -> HeatmapView:
        rows = sorted(range(len(cells.names)), key=lambda row: self._order.key(cells.names[row]))
        picked = np.array(rows, np.intp)
        names = tuple(cells.names[row] for row in rows)
        return HeatmapView(names, cells.steps, cells.values[picked], cells.known[picked])
