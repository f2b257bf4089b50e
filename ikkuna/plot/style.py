"""What all figures have in common: size, title, frame, ticks, colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NotebookFigure

__all__ = [
    "DIVERGING",
    "NAN_COLOR",
    "NOTE_COLOR",
    "SEQUENTIAL",
    "STYLE_ALIASES",
    "STYLE_KEYWORDS",
    "Style",
    "StyleOptions",
    "color_limits",
    "colormap",
    "curve_colors",
    "finite_limits",
]

DIVERGING = "RdBu_r"
SEQUENTIAL = "viridis"
NOTE_COLOR = "#d55e00"
"""Colour of remarks: vermilion of the Okabe–Ito palette, which is safe for the colour-blind."""
NAN_COLOR = "#f0e442"
"""Colour of NaN in an image: the palette's yellow, which no diverging map contains."""
_CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
_TITLES = {"outputs": "Outputs", "grads": "Gradients", "generic": "Values", True: "Values"}
_CONFIGS = ("plot", "title", "annot", "subplot", "tight", "colorbar", "save", "pad_xticks")

STYLE_ALIASES = {
    "show_xy_ticks": "ticks",
    "xy_ticks": "ticks",
    "show_borders": "borders",
    "title_mode": "title",
    "width": "w",
    "height": "h",
}
"""Other names of the arguments that all figures take."""


class StyleOptions(TypedDict, total=False):
    """Arguments that all figures take (see :class:`Style`)."""

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


STYLE_KEYWORDS = tuple(StyleOptions.__annotations__)


@dataclass
class Style:
    """How a figure looks.

    Parameters
    ----------
    title : str, bool or None
        ``'outputs'``, ``'grads'`` or ``'generic'`` (True) begin a title that tells what is drawn;
        another text stands as it is; anything false is none.
    w, h : float
        Factors of width and height.
    borders : bool
        Draw the frame of panels.
    ticks : bool or (bool, bool)
        Draw ticks and their labels on x and y.
    tight : bool
        Panels touch each other and the edge.
    borderwidth, bordercolor
        Of the frame.
    configs : mapping of str to mapping
        Options for matplotlib: of ``plot`` (the artists), ``title``, ``annot``, ``subplot`` (the grid), ``tight``
        (``subplots_adjust``), ``colorbar`` and ``save``.
    savepath : path, optional
        Write the figure there too.
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
            raise ConfigError(f"unknown key {sorted(unknown)[0]!r} in configs; it takes: {', '.join(_CONFIGS)}")
        self._config = {key: dict(value) for key, value in (self.configs or {}).items()}

    @classmethod
    def of(cls, options: Mapping[str, Any], **defaults: Any) -> "Style":
        """Return the look of a function's `options`, with `defaults` of its own."""
        return cls(**{**defaults, **options})

    def config(self, key: str, **defaults: Any) -> dict[str, Any]:
        """Return the defaults, overridden by what the user gave under `key`."""
        return {**defaults, **self._config.get(key, {})}

    def new_figure(self, width: float, height: float, panels: int = 1) -> NotebookFigure:
        """Return an empty figure of that size in inches, times the factors."""
        # Constrained layout takes seconds for a hundred panels; those are spaced by hand.
        layout = "constrained" if panels <= 36 and not self.tight else "none"
        return NotebookFigure(figsize=(width * self.w, height * self.h), layout=layout)

    def add_title(self, figure: Any, what: str) -> None:
        """Write the title: `what` is drawn, after the word for the quantity."""
        if not isinstance(self.title, str | bool | int) or not self.title:
            return
        text = f"{_TITLES[self.title]}: {what}" if self.title in _TITLES else str(self.title)
        set_title = figure.suptitle if hasattr(figure, "suptitle") else figure.set_title
        set_title(text, **self.config("title", wrap=True))

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
    """Return the limits that `norm` means for `arrays`, from their finite elements alone.

    ``'auto'`` is the largest magnitude to either side of 0, ``None`` leaves every array its own.

    Raises
    ------
    ConfigError
        Unless it is one of these, or a pair.
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
    """Return the smallest and largest finite element; (0, 1) if there is none, and never the same twice."""
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def colormap(name: Any) -> Colormap:
    """Return a map by its name, with NaN in a colour of its own; ``None`` is greys."""
    cmap = mpl.colormaps["gray" if name is None else name] if not isinstance(name, Colormap) else name
    return cmap.with_extremes(bad=NAN_COLOR)


def curve_colors(count: int, color: Any = None, cmap: Any = None) -> list[Any]:
    """Return a colour for each of `count` curves.

    One colour stands for all, a list is repeated.  By default eight that everyone can tell apart, or a map's for more.
    """
    if isinstance(color, str) or (color is not None and not isinstance(color[0], str | tuple | list)):
        return [color] * count
    if color is not None:
        return [color[i % len(color)] for i in range(count)]
    if count <= len(_CURVES) and cmap is None:
        return list(_CURVES[:count])
    return list(colormap(cmap or SEQUENTIAL)(np.linspace(0, 0.95, count)))
