"""Size, title, frame, ticks and colours of all figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NanCount, NotebookFigure, save_figures
from ikkuna.plot.keyword_aliases import keyword_aliases

__all__ = [
    "DIVERGING",
    "NAN_COLOR",
    "NOTE_COLOR",
    "SEQUENTIAL",
    "Style",
    "StyleOptions",
    "accepts_style",
    "color_limits",
    "colormap",
    "curve_colors",
    "finite_limits",
]

R = TypeVar("R")

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


def accepts_style(**aliases: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that accepts the options of :class:`Style` and other names of keyword arguments."""
    return keyword_aliases(StyleOptions.__annotations__, **_ALIASES, **aliases)


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
