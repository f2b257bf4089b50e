"""Histograms and images of the tensors of a NetDict."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NotebookFigure, count_nonfinite
from ikkuna.plot.grid import create_panels
from ikkuna.plot.histograms import draw_histogram
from ikkuna.plot.images import draw_image
from ikkuna.plot.style import DIVERGING, Style, color_limits

__all__ = ["net_heatmap", "net_histogram"]

_SAMPLE = 1_000_000


def net_histogram(
    net: Mapping[str, Any],
    *,
    layerwise: bool = False,
    bins: Any = 100,
    log: bool = False,
    sample: int | None = _SAMPLE,
    **style_options: Any,
) -> NotebookFigure:
    """Draw a histogram of all elements, or a panel for each tensor.

    Parameters
    ----------
    net : mapping of str to Tensor
        The tensors by name.
    layerwise : bool
        Draw a panel for each tensor.
    bins : int or sequence of float
        Number of bins, or their edges.
    log : bool
        Use a logarithmic count.
    sample : int, optional
        Draw at most about this number of elements, evenly spaced; the title of the panel says so.  ``None`` draws all.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.
    """
    arrays = {name: to_array(value).reshape(-1) for name, value in net.items()}
    if not arrays:
        raise ConfigError("there is no data to draw: no tensor is selected")
    shown = arrays if layerwise else {"all": np.concatenate(list(arrays.values()))}
    style = Style.of(style_options)
    figure, axes = create_panels(style, len(shown), None, False, _size(len(shown)))
    for ax, (name, values) in zip(axes, shown.items(), strict=True):
        thin = -(-values.size // sample) if sample and values.size else 1
        draw_histogram(ax, values[::thin], bins, **style.config("plot"))
        ax.set_title(f"{name} (1 of {thin} elements)" if thin > 1 else name, fontsize=9)
        if log:
            ax.set_yscale("log")
        style.format_panel(ax)
    axes[-1].set_xlabel("value")
    axes[0].set_ylabel("number of elements")
    style.add_title(figure, "a histogram for each tensor" if layerwise else "a histogram of all elements")
    style.finish([figure], {name: count_nonfinite(values) for name, values in shown.items()})
    return figure  # type: ignore[no-any-return]  # a new figure is a NotebookFigure


def net_heatmap(
    net: Mapping[str, Any], *, norm: Any = None, cmap: Any = DIVERGING, **style_options: Any
) -> NotebookFigure:
    """Draw an image of each tensor: rows are the first axis, columns all other axes; a vector is one row.

    `norm` is as for :func:`~ikkuna.plot.images.features_2d`; ``None`` means the largest magnitude of each tensor on
    both sides of 0.
    """
    arrays = {name: to_array(value) for name, value in net.items()}
    if not arrays:
        raise ConfigError("there is no data to draw: no tensor is selected")
    shown = {name: a.reshape(1, -1) if a.ndim < 2 else a.reshape(len(a), -1) for name, a in arrays.items()}
    style = Style.of(style_options)
    figure, axes = create_panels(style, len(shown), None, False, _size(len(shown)))
    for ax, (name, values) in zip(axes, shown.items(), strict=True):
        image = draw_image(
            ax, values, *color_limits("auto" if norm is None else norm, [values]), cmap, **style.config("plot")
        )
        figure.colorbar(image, ax=ax)
        ax.set_title(f"{name} {tuple(arrays[name].shape)}", fontsize=9)
        style.format_panel(ax)
    style.add_title(figure, "an image for each tensor, first axis down")
    style.finish([figure], {name: count_nonfinite(values) for name, values in shown.items()})
    return figure  # type: ignore[no-any-return]  # a new figure is a NotebookFigure


def _size(count: int) -> tuple[float, float]:
    side = min(3.0 + 2.0 * np.sqrt(count), 16.0)
    return float(side * 1.3), float(side)
