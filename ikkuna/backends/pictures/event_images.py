"""Images for an event file, drawn in a thread: heat maps at growing intervals, matrices once each."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.pictures.heatmap import Heatmap, HeatmapView, with_missing_rows
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.values import Matrix, ModuleOrder

Write = Callable[[str, bytes, int], object]
"""Queues an image: takes its tag, PNG and step."""


def import_renderer() -> None:
    """Import what draws the images; called in the drawing thread, because importing matplotlib takes half a second."""
    import ikkuna.backends.pictures.canvas  # noqa: F401


class HeatmapImage:
    """The image of a heat map, drawn after `interval` seconds, and then after 1.5 times as long each time.

    These are twenty drawings in a day.
    The training thread adds values, the drawing thread draws; they hold the lock only to copy numbers.

    Parameters
    ----------
    name : str
        The image's tag.
    order : ModuleOrder
        The order of the rows.
    write : callable
        Queues the image; called in the drawing thread.
    interval : float
        In seconds.
    quantity : Quantity
        What the kind is, which decides the scale of colours and the modules that have a row.
    """

    def __init__(
        self, name: str, order: ModuleOrder, write: Write, interval: float = 5.0, quantity: Quantity = NEUTRAL
    ) -> None:
        self.name = name
        self._quantity = quantity
        self._order = order
        self._write = write
        self._interval = interval
        self._due = time.monotonic() + interval
        self._heatmap = Heatmap()
        self._lock = threading.RLock()  # a signal handler may enter it again
        self._step = self._drawn = -1

    def add(self, step: int, names: Sequence[str], values: NDArray[np.floating[Any]]) -> None:
        """Add one value of each name at a step."""
        with self._lock:
            self._heatmap.add(step, names, values)
            self._step = step

    def finish(self) -> None:
        """Draw from now on without waiting."""
        self._due = 0.0

    @property
    def changed(self) -> bool:
        """Whether it is due, and has new values; one module or one step is not drawn."""
        return self._drawn < self._step and time.monotonic() >= self._due and min(self._heatmap.shape) > 1

    def draw(self) -> None:
        """Draw the values and write the image."""
        from ikkuna.backends.pictures.canvas import encode_png
        from ikkuna.backends.pictures.drawing import draw_heatmap

        with self._lock:
            view, step = self._heatmap.view(), self._step
        self._write(self.name, encode_png(draw_heatmap(self._sorted(view))), step)
        self._drawn = step
        self._interval *= 1.5
        self._due = time.monotonic() + self._interval

    def _sorted(self, view: HeatmapView) -> HeatmapView:
        rows = sorted(range(len(view.names)), key=lambda row: self._order.key(view.names[row]))
        names = tuple(view.names[row] for row in rows)
        values = view.values[rows].astype(np.float64)
        modules = self._order.modules
        names, values, known = with_missing_rows(modules, self._quantity, names, values, view.known[rows])
        with np.errstate(over="ignore"):
            return HeatmapView(names, view.steps, values.astype(np.float32), known, self._quantity)


class MatrixImage:
    """The image of one matrix, drawn once."""

    def __init__(self, name: str, matrix: Matrix, step: int, write: Write) -> None:
        self.name = name
        self.step = step
        self.size = matrix.values.size
        self.changed = True
        """Whether it is neither drawn nor dropped."""
        self.is_waiting = True
        self._matrix = matrix
        self._write = write

    def draw(self) -> None:
        """Draw the matrix and write the image."""
        from ikkuna.backends.pictures.canvas import encode_png
        from ikkuna.backends.pictures.drawing import draw_matrix

        matrix, self.is_waiting = self._matrix, False
        try:
            picture = draw_matrix(matrix.values, matrix.rows, matrix.columns, limits=matrix.limits)
            self._write(self.name, encode_png(picture), self.step)
            self.changed = False
        finally:
            self.is_waiting = self.changed


class MatrixQueue:
    """The matrices that are not yet drawn, at most 64 with at most 4 million values in total.

    If another one does not fit, the oldest ones that wait to be drawn are dropped and counted.
    """

    _IMAGES = 64
    _VALUES = 2**22

    def __init__(self) -> None:
        self._images: tuple[MatrixImage, ...] = ()  # replaced as a whole, because another thread may be iterating
        self._lock = threading.RLock()
        self.dropped = 0

    def add(self, image: MatrixImage) -> bool:
        """Add an image; return whether others had to be dropped for it."""
        with self._lock:
            waiting = [one for one in self._images if one.is_waiting]
            values = image.size + sum(one.size for one in waiting)
            surplus = []
            while waiting and (len(waiting) >= self._IMAGES or values > self._VALUES):
                surplus.append(waiting.pop(0))
                values -= surplus[-1].size
            self.drop(surplus)
            self._images = (*self._images, image)
        return bool(surplus)

    def images(self) -> tuple[MatrixImage, ...]:
        """Return the images that are not drawn."""
        with self._lock:
            self._images = tuple(one for one in self._images if one.changed)
            return self._images

    def drop(self, images: Iterable[MatrixImage]) -> None:
        """Remove images, and count those that are not drawn."""
        with self._lock:
            removed = list(images)
            self._images = tuple(one for one in self._images if one not in removed)
            for image in removed:
                self.dropped += image.changed
                image.changed = False
