"""Size, grid, labels, ticks and colours of all figures."""

import base64
import difflib
import inspect
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ikkuna.errors import ConfigError

R = TypeVar("R")


def accepts_style(**aliases: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that accepts the options of :class:`Style` and other names of keyword arguments.

    Parameters
    ----------
    **aliases : str
        Other names, with the parameter name as value.

    Raises
    ------
    TypeError
        When the function is called with an unknown keyword, or with one argument under two names; the message names the
        closest keyword.

    Examples
    --------
    >>> @accepts_style(y_zero="zero_line")
    ... def draw(*, zero_line=False):
    ...     return zero_line
    >>> draw(y_zero=True)
    True
    >>> draw(zero_lin=True)
    Traceback (most recent call last):
        ...
    TypeError: draw() has no argument 'zero_lin'; did you mean 'zero_line'?
    """
    aliases = _ALIASES | aliases

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        accepted = {*named, *StyleOptions.__annotations__}

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            renamed: dict[str, Any] = {}
            for name, value in keywords.items():
                target = aliases.get(name, name)
                if target not in accepted:
                    raise TypeError(_unknown(function.__name__, name, [*accepted, *aliases]))
                if target in renamed:
                    raise TypeError(
                        f"{function.__name__}() got multiple values for {target!r}, one of them as {name!r}"
                    )
                renamed[target] = value
            return function(*args, **renamed)

        return call

    return decorate


def _unknown(function: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"available: {', '.join(sorted(known))}"
    return f"{function}() has no argument {name!r}; {hint}"


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


DIVERGING = "RdBu_r"
SEQUENTIAL = "viridis"
NOTE_COLOR = "#d55e00"
"""Colour of notes: vermilion of the Okabe–Ito palette, which colour-blind people can distinguish."""
NAN_COLOR = "#f0e442"
"""Colour of NaN in an image: yellow of the same palette, which the default diverging map does not contain."""
_CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
_TITLES = {"outputs": "Outputs", "grads": "Gradients", "generic": "Values", True: "Values"}
_CONFIGS = ("plot", "title", "annot", "subplot", "tight", "colorbar", "save", "pad_xticks")

_ALIASES = {
    "show_xy_ticks": "ticks",
    "xy_ticks": "ticks",
    "show_borders": "borders",
    "title_mode": "title",
    "width": "w",
    "height": "h",
}


class StyleOptions(TypedDict, total=False):
    """Arguments of all plotting functions (see :class:`Style`)."""

    title: Any
    w: float
    h: float
    borders: bool
    ticks: Any
    tight: bool
    borderwidth: float | None
    bordercolor: str | None
    configs: Mapping[str, Mapping[str, Any]] | None
    savepath: Any


@dataclass
class Style:
    """The style of a figure.

    Parameters
    ----------
    title : str, bool or None
        ``'outputs'``, ``'grads'`` or ``'generic'`` (True) start a title that states what is drawn.  Another string is
        the whole title.  A false value means no title.
    w, h : float
        Factors of width and height.
    borders : bool
        Draw the frames of panels.
    ticks : bool or tuple of bool
        Draw ticks and their labels on x and y.
    tight : bool
        Draw panels without space between them.
    borderwidth : float, optional
        Width of the frames.
    bordercolor : str, optional
        Colour of the frames.
    configs : mapping of str to mapping
        Options of matplotlib for ``plot`` (the artists), ``title``, ``annot``, ``subplot`` (the grid), ``tight``
        (``subplots_adjust``), ``colorbar``, ``save`` and ``pad_xticks``.
    savepath : path, optional
        Also write the figure to this file.
    """

    title: Any = True
    w: float = 1.0
    h: float = 1.0
    borders: bool = True
    ticks: Any = True
    tight: bool = False
    borderwidth: float | None = None
    bordercolor: str | None = None
    configs: Mapping[str, Mapping[str, Any]] | None = None
    savepath: Any = None
    _config: dict[str, dict[str, Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if unknown := set(self.configs or {}) - set(_CONFIGS):
            raise ConfigError(f"unknown key {sorted(unknown)[0]!r} in configs; available: {', '.join(_CONFIGS)}")
        self._config = {key: dict(value) for key, value in (self.configs or {}).items()}

    @classmethod
    def of(cls, options: Mapping[str, Any], **defaults: Any) -> "Style":
        """Return the style from the `options` of a function and its own `defaults`."""
        return cls(**{**defaults, **options})

    def config(self, key: str, **defaults: Any) -> dict[str, Any]:
        """Return the defaults, overridden by the options that the user gave under `key`."""
        return {**defaults, **self._config.get(key, {})}

    def new_figure(self, width: float, height: float, panels: int = 1) -> NotebookFigure:
        """Return an empty figure of this size in inches, times the factors."""
        # Constrained layout takes seconds for a hundred panels; create_panels() spaces those.
        layout = "constrained" if panels <= 36 and not self.tight else "none"
        return NotebookFigure(figsize=(width * self.w, height * self.h), layout=layout)

    def add_title(self, figure: Any, what: str) -> None:
        """Write the title of an axes or a figure; `what` states what is drawn."""
        if not isinstance(self.title, str | bool | int) or not self.title:
            return
        text = f"{_TITLES[self.title]}: {what}" if self.title in _TITLES else str(self.title)
        set_title = figure.suptitle if hasattr(figure, "suptitle") else figure.set_title
        set_title(text, **self.config("title", wrap=True))

    def finish(self, figures: Sequence[Any], counts: Mapping[str, NanCount | None] = MappingProxyType({})) -> None:
        """Report the elements that the first figure could not draw, and write all figures to `savepath`."""
        if counts and isinstance(figures[0], NotebookFigure):
            figures[0].report(counts)
        save_figures(figures, self.savepath, **self.config("save"))

    def format_panel(self, ax: Axes) -> None:
        """Set frame and ticks of one panel."""
        x, y = self.ticks if isinstance(self.ticks, tuple | list) else (self.ticks, self.ticks)
        if not x:
            ax.tick_params(axis="x", bottom=False, labelbottom=False, which="both")
        if not y:
            ax.tick_params(axis="y", left=False, labelleft=False, which="both")
        for spine in ax.spines.values():
            spine.set_visible(bool(self.borders))
            if self.borderwidth is not None:
                spine.set_linewidth(self.borderwidth)
            if self.bordercolor is not None:
                spine.set_edgecolor(self.bordercolor)


def color_limits(norm: Any, arrays: Sequence[NDArray[Any]]) -> tuple[float | None, float | None]:
    """Return the limits of the colours for `norm`, from the finite elements of `arrays`.

    Parameters
    ----------
    norm : 'auto', None or tuple of float
        ``'auto'`` means the largest magnitude on both sides of 0; ``None`` means that every array has its own limits.
    arrays : sequence of ndarray
        The arrays to draw.

    Raises
    ------
    ConfigError
        If `norm` has another value.
    """
    if norm is None:
        return None, None
    if isinstance(norm, str):
        if norm != "auto":
            raise ConfigError(f"norm must be 'auto', None or a pair (low, high), got {norm!r}")
        top = max((float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in arrays), default=0.0) or 1.0
        return -top, top
    try:
        low, high = (float(value) for value in norm)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"norm must be 'auto', None or a pair (low, high), got {norm!r}") from error
    return low, high


def finite_limits(array: NDArray[Any]) -> tuple[float, float]:
    """Return two different limits that contain all finite elements; (0, 1) if there is no finite element."""
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def colormap(name: Any) -> Colormap:
    """Return a colour map by its name, with a separate colour for NaN; ``None`` means grey."""
    cmap = mpl.colormaps["gray" if name is None else name] if not isinstance(name, Colormap) else name
    return cmap.with_extremes(bad=NAN_COLOR)


def curve_colors(count: int, color: Any = None, cmap: Any = None) -> list[Any]:
    """Return a colour for each of `count` curves.

    One colour is used for all curves, a list of colours is repeated.  By default there are eight colours that
    colour-blind people can distinguish; more than eight curves use a colour map.
    """
    if isinstance(color, str) or (color is not None and not isinstance(color[0], str | tuple | list)):
        return [color] * count
    if color is not None:
        return [color[i % len(color)] for i in range(count)]
    if count <= len(_CURVES) and cmap is None:
        return list(_CURVES[:count])
    return list(colormap(cmap or SEQUENTIAL)(np.linspace(0, 0.95, count)))


def grid_shape(count: int, n_rows: int | str | None = None) -> tuple[int, int]:
    """Return the rows and columns of a grid for `count` panels.

    Parameters
    ----------
    count : int
        Number of panels.
    n_rows : int, 'vertical' or None
        Number of rows; ``'vertical'`` means one column.  By default a full grid at most twice as wide as high if there
        is one, otherwise a nearly square grid with empty places.

    Examples
    --------
    >>> grid_shape(6), grid_shape(7), grid_shape(16), grid_shape(6, n_rows=4)
    ((2, 3), (2, 4), (4, 4), (4, 2))
    """
    if n_rows == "vertical":
        return max(count, 1), 1
    if n_rows is not None:
        if not isinstance(n_rows, int) or n_rows < 1:
            raise ConfigError(f"n_rows must be a positive number, 'vertical' or None, got {n_rows!r}")
        return n_rows, max(math.ceil(count / n_rows), 1)
    root = max(math.isqrt(count), 1)
    for rows in range(root, 0, -1):
        if count % rows == 0 and count // rows <= 2 * rows:
            return rows, count // rows
    return root, math.ceil(count / root)


def sharing(share_xy: Any) -> tuple[Any, Any]:
    """Return how x and y are shared, from one value or a pair of True, False, 'row', 'col'."""
    pair = share_xy if isinstance(share_xy, tuple | list) else (share_xy, share_xy)
    if len(pair) != 2 or any(v not in (True, False, "row", "col", "all", "none") for v in pair):
        raise ConfigError(f"share_xy must be True, False, 'row', 'col' or a pair of them, got {share_xy!r}")
    words = {"all": True, "none": False}
    x, y = (words.get(v, v) if isinstance(v, str) else bool(v) for v in pair)
    return x, y


def create_panels(
    style: Style,
    count: int,
    n_rows: int | str | None = None,
    share_xy: Any = True,
    size: tuple[float, float] | None = None,
    fig: Any = None,
) -> tuple[Any, list[Axes]]:
    """Return a figure with a grid, and the `count` axes to draw into; the other places are hidden."""
    rows, columns = grid_shape(count, n_rows)
    size = size or ((10.0, 5.0) if count == 1 else (10.0, 8.0))
    figure: Any = style.new_figure(*size, panels=rows * columns) if fig is None else fig
    x, y = sharing(share_xy)
    # The sharing of matplotlib takes minutes for hundreds of panels; share_limits() replaces it.
    axes: Any = figure.subplots(rows, columns, squeeze=False, **style.config("subplot"))
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    if style.tight:
        top = 0.94 if style.title else 1.0
        adjust = {"left": 0.0, "right": 1.0, "bottom": 0.0, "top": top, "wspace": 0.0, "hspace": 0.0}
        figure.subplots_adjust(**style.config("tight", **adjust))
    elif isinstance(figure, NotebookFigure) and figure.get_layout_engine() is None:
        gap = 0.12 if count <= 100 else 0.04
        gaps = {"wspace": gap if y else 0.4, "hspace": gap if x else 0.4}
        adjust = {"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.94, **gaps}
        figure.subplots_adjust(**style.config("tight", **adjust))
    if count > 16:
        _shrink_ticks(axes.flat[:count], 6 if count > 36 else 8)
    return figure, list(np.asarray(axes).flat[:count])


def _shrink_ticks(axes: Any, size: int) -> None:
    """Use small tick labels in a large grid, at most three for each axis."""
    for ax in axes:
        ax.tick_params(labelsize=size, pad=1.5, length=2)
        ax.locator_params(nbins=3, prune="both")


def share_limits(axes: list[Axes], columns: int, share_xy: Any) -> None:
    """Set common limits for the panels of a grid, and remove tick labels that repeat those of an outer panel.

    Call this function when everything is drawn.
    """
    bottom, left = (set(map(id, edge)) for edge in outer_axes(axes, columns))
    if len(axes) > 100:  # neighbouring labels would overlap
        bottom = {id(axes[-1])}
    for name, how, edge, along in zip("xy", sharing(share_xy), (bottom, left), ("col", "row"), strict=True):
        for group in _groups(axes, columns, how):
            _equate(group, name)
        for ax in axes if how in (True, along) else ():
            if id(ax) not in edge:
                ax.tick_params(axis=name, **{"labelbottom" if name == "x" else "labelleft": False})  # type: ignore[arg-type]


def _groups(axes: list[Axes], columns: int, how: Any) -> list[list[Axes]]:
    if how == "row":
        return [axes[i : i + columns] for i in range(0, len(axes), columns)]
    if how == "col":
        return [axes[i::columns] for i in range(columns)]
    return [axes] if how else []


def _equate(axes: list[Axes], name: str) -> None:
    limits = [getattr(ax, f"get_{name}lim")() for ax in axes]
    low, high = min(map(min, limits)), max(map(max, limits))
    for ax, (first, last) in zip(axes, limits, strict=True):
        getattr(ax, f"set_{name}lim")((high, low) if first > last else (low, high))


def outer_axes(axes: list[Axes], columns: int) -> tuple[list[Axes], list[Axes]]:
    """Return the axes at the bottom of the columns and the axes at the left of the rows."""
    bottom = [ax for i, ax in enumerate(axes) if i + columns >= len(axes)]
    return bottom, axes[::columns]


def label_panel(ax: Axes, index: int, labels: Any, count: int, style: Style) -> None:
    """Write the index of one of `count` panels, or its label, into the corner; write nothing without a label."""
    if labels is None or (not isinstance(labels, str) and index >= len(labels)):
        return
    text = str(index) if isinstance(labels, str) else str(labels[index])
    size = 10 if count <= 36 else 8 if count <= 100 else 5
    font = {"fontsize": size, "weight": "bold", "color": "#007050", "va": "top", "zorder": 5}
    ax.text(0.03, 0.96, text, transform=ax.transAxes, **style.config("annot", **font))


def add_note(ax: Axes, text: str, **options: Any) -> None:
    """Write a note into the corner of a panel."""
    font = {"color": NOTE_COLOR, "weight": "bold", "ha": "right", "va": "top", "zorder": 5, **options}
    ax.text(0.97, 0.96, text, transform=ax.transAxes, **font)


def label_outer_axes(axes: list[Axes], columns: int, x: str, y: str) -> None:
    """Label the axes at the edge of a grid: all of up to 6, the middle one of more."""
    bottom, left = outer_axes(axes, columns)
    for ax in bottom if len(bottom) <= 6 else [bottom[len(bottom) // 2]]:
        ax.set_xlabel(x)
    for ax in left if len(left) <= 6 else [left[len(left) // 2]]:
        ax.set_ylabel(y)


def add_color_legend(ax: Axes, count: int, word: str, color: Any, cmap: Any) -> None:
    """Add a legend for up to 8 colours, a colour bar for more, and nothing for colours that the user chose."""
    if color is not None or count < 2:
        return
    if count <= 8:
        colors = curve_colors(count, None, cmap)
        handles = [Line2D([], [], marker="o", linestyle="", color=one) for one in colors]
        add_outer_legend(ax, handles, [f"{i}" for i in range(count)], word)
    else:
        scale = ScalarMappable(Normalize(0, count - 1), colormap(cmap or SEQUENTIAL))
        ax.figure.colorbar(scale, ax=ax, label=word)


def add_outer_legend(ax: Axes, artists: Iterable[Any], names: Sequence[str], title: str | None = None) -> None:
    """Add a legend to the right of a panel, where it covers nothing that is drawn."""
    ax.legend(artists, names, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
