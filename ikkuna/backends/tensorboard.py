"""The backend that writes TensorBoard's event files.

The values of several curves: encoded for the event file, and summarised by three curves and a heat map.
A thread draws the images: heat maps at growing intervals, matrices once each.
"""

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.backend import FileBackend
from ikkuna.backends.pictures.heatmap import Heatmap, HeatmapView, with_missing_rows
from ikkuna.backends.pictures.redraw import Drawable, RedrawThread
from ikkuna.store.event_format import (
    EventFormat,
    histogram_value,
    hparams_values,
    image_value,
    layout_value,
    scalar_prefix,
    start_record,
    text_value,
    titled_scalar_value,
)
from ikkuna.store.event_records import event_library, step_record
from ikkuna.store.names import (
    Series,
    SeriesGroup,
    dashboard_tag,
    heatmap_tag,
    matrix_tag,
    overview_tag,
    series_tag,
    text_tag,
)
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.run_directory import ConfigValue
from ikkuna.store.values import Image, Matrix, ModuleEntry, ModuleOrder, module_table
from ikkuna.support.failures import log

Write = Callable[[str, bytes, int], object]
"""Queues an image: takes its tag, PNG and step."""


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
        from ikkuna.backends.pictures.cells import draw_heatmap, encode_png

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
        from ikkuna.backends.pictures.cells import draw_matrix, encode_png

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


STATISTICS = ("min", "median", "max")


class ModuleGroup:
    """The modules of a kind in a pass: three curves summarise their values, and a heat map shows all of them.

    Parameters
    ----------
    member : Series
        The series of one of the modules.
    heatmap : HeatmapImage
        The heat map.

    Attributes
    ----------
    size : int
        The largest number of modules in a step so far.
    """

    def __init__(self, member: Series, heatmap: HeatmapImage) -> None:
        self.prefixes = [scalar_prefix(overview_tag(member, statistic)) for statistic in STATISTICS]
        self.member, self.heatmap, self.size = member, heatmap, 0


@dataclass(frozen=True, eq=False)
class GroupTemplate:
    """The encoded values of a group of curves, apart from the four bytes of each number.

    Parameters
    ----------
    prefixes : list of bytes
        The bytes before each number.
    positions : list of int
        The position of each number among the values of the group; a curve that is written under two tags occurs twice.
    summary : ModuleGroup, optional
        The summary of the modules among the curves.
    members : dict of str to int
        The positions of these modules.
    """

    prefixes: list[bytes]
    positions: list[int]
    summary: ModuleGroup | None
    members: dict[str, int]


class StepTemplate:
    """The encoded values of a step, into which its numbers are inserted; the same object serves steps with the same groups.

    Parameters
    ----------
    templates : sequence of GroupTemplate
        The groups.
    counts : sequence of int
        The number of values of each of them.

    Attributes
    ----------
    summaries : list of tuple
        The summaries of a step, with the names and the positions of their modules, of each module those of its last value.
    """

    def __init__(self, templates: Sequence[GroupTemplate], counts: Sequence[int]) -> None:
        begins = np.cumsum([0, *counts]).tolist()
        members: dict[ModuleGroup, dict[str, int]] = {}
        for begin, each in zip(begins, templates, strict=False):
            if each.summary is not None:
                found = members.setdefault(each.summary, {})
                found.update((name, begin + i) for name, i in each.members.items())
        self.summaries = [(group, tuple(found), np.array([*found.values()])) for group, found in members.items()]
        self.summaries.sort(key=lambda each: len(each[1]))
        several = groupby((each for each in self.summaries if len(each[1]) > 1), lambda each: len(each[1]))
        self._overviews = [np.stack([places for *_, places in equal]) for _, equal in several]
        prefixes = [prefix for template in templates for prefix in template.prefixes]
        positions = [begin + i for begin, each in zip(begins, templates, strict=False) for i in each.positions]
        prefixes += [prefix for group, names, _ in self.summaries if len(names) > 1 for prefix in group.prefixes]
        self._bytes = np.frombuffer(b"".join(prefix + bytes(4) for prefix in prefixes), np.uint8)
        self.ends = np.cumsum([len(prefix) + 4 for prefix in prefixes])
        self._places = (self.ends - 4)[:, None] + np.arange(4)
        positions += range(begins[-1], begins[-1] + len(prefixes) - len(positions))
        self._positions = None if positions == list(range(len(positions))) else np.array(positions, np.intp)

    def entries(self, values: NDArray[np.float64]) -> tuple[bytes, NDArray[np.float32]]:
        """Return the encoded values of a step, and the values in single precision, in which too large ones are infinite."""
        block = self._bytes.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            if self._overviews:
                overviews = [overview(values[places]).ravel() for places in self._overviews]
                values = np.concatenate([values, *overviews])
            numbers = values.astype("<f4")
        block[self._places] = (numbers if self._positions is None else numbers[self._positions])[:, None].view(np.uint8)
        return block.tobytes(), numbers


_MOST_TEMPLATES = 32


def overview(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return minimum, median and maximum of each row; all are NaN if one of its values is.

    A layer that has diverged must stay visible.

    Examples
    --------
    >>> overview(np.array([[4.0, 1.0, 2.0, 3.0], [1.0, float("nan"), 2.0, 3.0]])).tolist()
    [[1.0, 2.5, 4.0], [nan, nan, nan]]
    """
    ordered, half = np.sort(values), values.shape[1] // 2  # NaN comes last
    found: NDArray[np.float64] = ordered[:, (0, half, -1)]
    if values.shape[1] % 2 == 0:
        low, high = ordered[:, half - 1], ordered[:, half]
        found[:, 1] = np.where(low == high, low, low / 2 + high / 2)
    is_nan = found[:, 2] != found[:, 2]
    if np.count_nonzero(is_nan):
        found[is_nan] = np.nan
    return found


_DRAWING_INTERVAL = 5.0  # seconds


class TensorBoardBackend(FileBackend):
    """Write an event file with the tags ``{kind}/{module}``, ``Network/{kind}`` and ``Overview/{kind}_min|median|max``.

    ``Dashboard/{kind}`` repeats what is declared as a headline, as the loss and accuracies, in the first group of cards.
    The page *Custom Scalars* has a chart for each kind with all modules, or with three curves if there are more than 50.
    ``Heatmaps/{kind}`` is an image with a row for each module and a column for each step, drawn about twenty times a day.
    ``Matrices/{kind}`` are images of matrices, and ``Text/Modules`` lists the modules.
    A thread draws the images.
    Values of another pass than training have the tags ``{kind}.{pass}``.
    Values are rounded to single precision, as everywhere in TensorBoard.
    All values of a step share one event and one time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        event_library()  # is compiled or loaded now, since a step must not wait for it
        self._prefixes: dict[Series, bytes] = {}
        self._single: dict[Series, SeriesGroup] = {}
        self._layout: tuple[tuple[tuple[Series, int], ...], int] = (), 0
        self._may_have_changed = False  # the layout
        self._headlines: list[Series] = []
        self._groups: dict[tuple[str, str], ModuleGroup] = {}
        self._templates: WeakKeyDictionary[SeriesGroup, GroupTemplate] = WeakKeyDictionary()
        self._added: list[tuple[SeriesGroup, NDArray[np.float64]]] = []  # not encoded yet
        self._steps: dict[tuple[SeriesGroup, ...], StepTemplate] = {}
        self._entries: list[bytes] = []
        self._closed = False
        self._resumed_at: int | None = None
        self._matrices = MatrixQueue()
        self._thread = RedrawThread(self._drawables, _DRAWING_INTERVAL)
        self._order = ModuleOrder()
        self._config: Mapping[str, ConfigValue] | None = None

    def _format(self) -> EventFormat:
        return EventFormat(self._clock.now)

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a value to the step's event."""
        if (group := self._single.get(series)) is None:
            rest = series.pass_name, series.title, series.ylims, series.quantity
            group = self._single[series] = SeriesGroup(series.kind, (series.name,), *rest)
        self.add_groups((group,), (np.array([value], np.float64),), step)

    def add_group(self, group: SeriesGroup, values: NDArray[np.float64], step: int) -> None:
        """Add one value of each series of a group to the step's event."""
        self.add_groups((group,), (values,), step)

    def add_groups(self, groups: Sequence[SeriesGroup], values: Sequence[NDArray[np.float64]], step: int) -> None:
        """Add the values of groups of series to the step's event; the first value of a series carries its title."""
        self._added += zip(groups, values, strict=True)
        self._values += sum(map(len, values))

    def _new_template(self, group: SeriesGroup, values: NDArray[np.float64]) -> dict[int, bytes]:
        """Create the template of a group; return the entries of its first values that have titles, by their places in it."""
        titled = {
            i: titled_scalar_value(series_tag(series), float(values[i]), series.title)
            for i, series in enumerate(group.series)
            if series.title and series not in self._prefixes
        }
        for series in group.series:
            if series not in self._prefixes:
                self._prefixes[series] = scalar_prefix(series_tag(series))
        positions, prefixes = list(range(len(group.names))), [self._prefixes[series] for series in group.series]
        if group.quantity.is_headline:
            positions += (copied := [i for i, name in enumerate(group.names) if name is None])
            prefixes += [scalar_prefix(dashboard_tag(group.series[i])) for i in copied]
            self._headlines += [group.series[i] for i in copied if group.series[i] not in self._headlines]
        summaries = [self._group(series) for series in group.series]
        members = {name: i for i, name in enumerate(group.names) if name is not None and summaries[i] is not None}
        summary = next((each for each in summaries if each is not None), None)  # one for all modules of a kind and pass
        self._templates[group] = GroupTemplate(prefixes, positions, summary, members)
        self._may_have_changed = True
        return titled

    def _group(self, series: Series) -> ModuleGroup | None:
        if series.name is None or not self._order.belongs(series.name):
            return None
        key = series.kind, series.pass_name
        if key not in self._groups:
            heatmap = HeatmapImage(heatmap_tag(series), self._order, self._write_image, quantity=series.quantity)
            self._groups = {
                **self._groups,
                key: ModuleGroup(series, heatmap),
            }  # a new dict: the thread may be iterating
        return self._groups[key]

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram (see :class:`~ikkuna.store.values.HistogramLike`) to the step's event."""
        self._entries.append(histogram_value(series_tag(series), histogram))
        self._values += 1

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Add a matrix; its image is drawn and written later, in an event of its own."""
        image = MatrixImage(matrix_tag(series), matrix, step, partial(self._write_image, values=1))
        if not image.size:
            return
        if self._matrices.add(image) and self._matrices.dropped == 1:
            log.warning("matrices are added faster than they are drawn; from step %d on the oldest are dropped", step)
        self._thread.open()

    def add_image(self, series: Series, image: Image, step: int) -> None:
        """Add a picture to the step's event."""
        self._entries.append(image_value(series_tag(series), image.png))
        self._values += 1

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a page of Markdown to the step's event."""
        self._entries.append(text_value(text_tag(title), text))
        self._values += 1

    def describe(self, modules: Sequence[ModuleEntry]) -> None:
        """Add a page of text that lists the modules, and sort them in heat maps as in the network."""
        self._order = ModuleOrder(modules)
        if modules:
            self._entries.append(text_value(text_tag("Modules"), module_table(modules)))

    def add_config(self, config: Mapping[str, ConfigValue], step: int) -> None:
        """Add the hyper-parameters as a page of text and for the hparams plugin."""
        super().add_config(config, step)
        self._config = config

    def resume(self, step: int) -> None:
        """Write the event by which readers drop `step` and later ones of what was written before."""
        self._resumed_at = step

    def viewer(self, directory: Path) -> str:
        """Return the command that starts TensorBoard."""
        return f"tensorboard --logdir {shlex.quote(str(directory.parent))}"

    def flush(self, timeout: float | None = None) -> bool:
        """Draw the matrices, write everything committed to the disk, and return whether that was done in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        drawn = not self._unwritten() or self._thread.flush(timeout)
        return super().flush(None if deadline is None else max(deadline - time.monotonic(), 0.0)) and drawn

    def draw(self, timeout: float | None = None) -> bool:
        """Draw all images with their last values."""
        for group in self._groups.values():
            group.heatmap.finish()
        return self._thread.flush(timeout)

    @property
    def drawing_seconds(self) -> float:
        """CPU time of the thread that draws."""
        return self._thread.seconds

    def close(self, timeout: float | None = 2.0) -> bool:
        """Draw all images for at most three quarters of `timeout`, write everything to the disk, and release the file."""
        begin = time.monotonic()
        if self._writer is not None and not self._closed:
            for group in self._groups.values():
                group.heatmap.finish()
            if late := self._thread.close(None if timeout is None else 0.75 * timeout):
                what = "not finished drawing: %s. The event file lacks the latest of these images."
                log.log(self.level, what, ", ".join(late))
            self._closed = True
            self._matrices.drop(self._matrices.images())
        stored = super().close(None if timeout is None else timeout - (time.monotonic() - begin))
        return stored and not self._matrices.dropped

    @property
    def acked_step(self) -> int:
        """Last step of which the operating system has all values, with all matrices of it and before; -1 before."""
        first = min((image.step for image in self._unwritten()), default=None)
        return super().acked_step if first is None else min(super().acked_step, first - 1)

    @property
    def dropped(self) -> int:
        """Number of values that did not reach the file."""
        return super().dropped + self._matrices.dropped

    def _unwritten(self) -> tuple[MatrixImage, ...]:
        images = self._matrices.images()
        if failed := [image for image in images if self._thread.has_given_up(image.name)]:
            self._matrices.drop(failed)
            images = self._matrices.images()
        return images

    def _drawables(self) -> Iterator[Drawable]:
        drawables: list[Drawable] = [*self._unwritten(), *(group.heatmap for group in self._groups.values())]
        for drawable in drawables:
            if not self._closed:
                yield drawable

    def _write_image(self, tag: str, png: bytes, step: int, values: int = 0) -> None:
        """Queue an image in an event of its own; called in the drawing thread."""
        if self._writer is not None and not self._closed:
            block = step_record(image_value(tag, png), step, self._clock.now())
            self._writer.submit(block, step, values, is_picture=True)

    def _encode(self, step: int) -> None:
        """Encode the values that were added to a step, all at once, and add them to the heat maps."""
        groups, arrays = zip(*self._added, strict=True)
        self._added, titled = [], dict[int, bytes]()
        if (template := self._steps.get(groups)) is None:
            template, titled = self._new_step(groups, arrays)
        block, numbers = template.entries(np.concatenate(arrays))
        if titled:
            ends = template.ends.tolist()
            block = b"".join(titled.get(i, block[a:b]) for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)))
        self._entries.append(block)
        for summary, names, places in template.summaries:
            if len(names) > 1:
                summary.heatmap.add(step, names, numbers[places])

    def _new_step(
        self, groups: tuple[SeriesGroup, ...], arrays: Sequence[NDArray[np.float64]]
    ) -> tuple[StepTemplate, dict[int, bytes]]:
        """Return a new template, and by their places the entries of values that are the first ones with a title."""
        titled: dict[int, bytes] = {}
        place = 0
        for group, values in zip(groups, arrays, strict=True):
            if group not in self._templates:
                titled |= {place + i: entry for i, entry in self._new_template(group, values).items()}
            place += len(self._templates[group].prefixes)
        if len(self._steps) >= _MOST_TEMPLATES:
            self._steps.clear()
        counts = [len(values) for values in arrays]
        template = self._steps[groups] = StepTemplate([self._templates[group] for group in groups], counts)
        for summary, names, _ in template.summaries:
            if len(names) > 1:
                self._thread.open()
            if len(names) > summary.size:
                summary.size, self._may_have_changed = len(names), True
        return template, titled

    def _add_layout(self) -> None:
        """Add the layout of the charts, if it has changed; TensorBoard uses the latest one."""
        self._may_have_changed = False
        layout = tuple((group.member, group.size) for group in self._groups.values() if group.size > 1)
        if (layout, len(self._prefixes)) != self._layout:
            self._layout = layout, len(self._prefixes)
            self._entries.append(layout_value(layout, [series for series in self._prefixes if series.name is None]))

    def _take_block(self, step: int) -> bytes:
        if self._added:
            self._encode(step)
        if self._may_have_changed:
            self._add_layout()
        if (
            self._config and self._headlines
        ):  # its columns are the first headlines; TensorBoard reads the first table of a run
            self._entries += hparams_values(self._config, [series_tag(series) for series in self._headlines])
            self._config = None
        entries, self._entries = self._entries, []
        if not entries:
            return b""
        now = self._clock.now()
        block = step_record(b"".join(entries), step, now)
        if self._resumed_at is not None:
            block = start_record(self._resumed_at, now) + block
            self._resumed_at = None
        return block
