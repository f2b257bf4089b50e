"""Text in figures: labels of panels and axes, notes, colour legends."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from ikkuna.plot.grid import outer_axes
from ikkuna.plot.style import NOTE_COLOR, SEQUENTIAL, Style, colormap, curve_colors

__all__ = ["add_color_legend", "add_note", "add_outer_legend", "label_outer_axes", "label_panel"]


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
