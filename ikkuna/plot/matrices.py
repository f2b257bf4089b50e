"""Images of values by layer and step, and of similarities between layers."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.annotations import add_note
from ikkuna.plot.figure import count_nonfinite
from ikkuna.plot.images import draw_image
from ikkuna.plot.style import SEQUENTIAL, Style, StyleOptions, accepts_style, color_limits, finite_limits

__all__ = ["layer_step_heatmap", "similarity_matrix"]


@accepts_style(show_colorbar="colorbar")
def layer_step_heatmap(
    values: Any,
    *,
    layers: Sequence[str] | None = None,
    steps: Sequence[float] | None = None,
    log: bool = False,
    norm: Any = None,
    cmap: Any = SEQUENTIAL,
    label: str = "value",
    colorbar: bool = True,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Axes:
    """Draw one value of every layer over the steps of a training as an image.

    Parameters
    ----------
    values : mapping of str to sequence, or ndarray
        A curve (step,) for each layer, or (layer, step).
    layers : sequence of str, optional
        Names of the rows.
    steps : sequence of float, optional
        Numbers of the columns.
    log : bool
        Use a logarithmic colour scale; values that are not positive count as missing.
    norm : 'auto', None or tuple of float
        As for :func:`~ikkuna.plot.images.features_2d`.
    cmap : str or Colormap, optional
        Colour map; ``None`` means grey.
    label : str
        Name of the value.
    colorbar : bool
        Draw a colour bar.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    Axes
        The axes with the image.

    Raises
    ------
    ConfigError
        If the layers have different numbers of steps, or if the number of names is wrong.

    Examples
    --------
    >>> ax = layer_step_heatmap({"fc1": [1.0, 2.0, 3.0], "fc2": [0.0, 1.0, 0.0]})
    >>> ax.images[0].get_array().shape
    (2, 3)
    """
    names = list(values) if isinstance(values, Mapping) else list(layers or ())
    matrix = to_array(list(values.values()) if isinstance(values, Mapping) else values)
    names = names or [str(i) for i in range(len(matrix))]
    if matrix.ndim != 2 or len(names) != len(matrix) or (steps is not None and len(steps) != matrix.shape[1]):
        raise ConfigError(
            f"expected (layer, step) with a name for each layer, got shape {matrix.shape} and {len(names)} names"
        )
    style = Style.of(style_options)
    axes: Axes = ax if ax is not None else style.new_figure(10, max(2.5, 0.3 * len(names) + 1)).subplots()
    shown = np.where(matrix > 0, matrix, np.nan) if log else matrix
    low, high = color_limits(norm, [shown])
    options: dict[str, Any] = {}
    if log:
        low, high = finite_limits(shown) if low is None or high is None else (low, high)
        options = {"norm": LogNorm(max(low, high * 1e-12), high), "vmin": None, "vmax": None}
    image = draw_image(axes, shown, low, high, cmap, **style.config("plot", interpolation="nearest", **options))
    _label_rows(axes, names)
    _label_columns(axes, steps)
    axes.set(xlabel="step")
    style.format_panel(axes)
    if colorbar:
        axes.figure.colorbar(image, ax=axes, **style.config("colorbar", label=label, pad=0.02))
    _finish(axes, ax is None, shown, style, f"{label} of every layer over the steps")
    return axes


@accepts_style(show_colorbar="colorbar")
def similarity_matrix(
    matrix: Any,
    labels: Sequence[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    norm: Any = (0.0, 1.0),
    cmap: Any = SEQUENTIAL,
    label: str = "similarity",
    numbers: bool | None = None,
    colorbar: bool = True,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Axes:
    """Draw the similarities of layers (or channels) as a square image, with numbers in small matrices.

    Parameters
    ----------
    matrix : ndarray or Tensor
        (row, column), such as centred kernel alignment between layers, or the result of
        :func:`~ikkuna.probe.health.channel_correlation`.
    labels, columns : sequence of str, optional
        Names of the rows, and of the columns if they differ.
    norm : 'auto', None or tuple of float
        Limits of the colours; ``(-1, 1)`` for correlations.
    cmap : str or Colormap, optional
        Colour map; ``None`` means grey.
    label : str
        Name of the value.
    numbers : bool, optional
        Write the values; by default up to 12 rows.
    colorbar : bool
        Draw a colour bar.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    Axes
        The axes with the image.

    Raises
    ------
    ConfigError
        If `matrix` is not a matrix, or if the number of names is wrong.

    Examples
    --------
    >>> ax = similarity_matrix([[1.0, 0.3], [0.3, 1.0]], ["a", "b"])
    >>> [text.get_text() for text in ax.texts]
    ['1.00', '0.30', '0.30', '1.00']
    """
    values = to_array(matrix)
    if values.ndim != 2:
        raise ConfigError(f"expected a matrix, got shape {values.shape}")
    rows = [str(i) for i in range(len(values))] if labels is None else list(labels)
    across = columns or (rows if values.shape[0] == values.shape[1] else [str(i) for i in range(values.shape[1])])
    if (len(rows), len(across)) != values.shape:
        raise ConfigError(
            f"a matrix of shape {values.shape} needs a name for each row and column, got {len(rows)} and {len(across)}"
        )
    style = Style.of(style_options)
    side = min(max(4.0, 0.5 * len(rows) + 1.5), 10.0)
    axes: Axes = ax if ax is not None else style.new_figure(side + 1, side).subplots()
    image = draw_image(axes, values, *color_limits(norm, [values]), cmap, **style.config("plot", aspect="equal"))
    _label_rows(axes, rows)
    if len(across) <= 40:
        axes.set_xticks(range(len(across)), across, rotation=45, ha="right")
    if numbers or (numbers is None and len(rows) <= 12):
        _write_values(axes, values, image)
    style.format_panel(axes)
    if colorbar:
        axes.figure.colorbar(image, ax=axes, **style.config("colorbar", label=label, fraction=0.046))
    _finish(axes, ax is None, values, style, label)
    return axes


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    """Label up to 40 rows."""
    every = max(1, -(-len(names) // 40))
    ax.set_yticks(range(0, len(names), every), list(names)[::every])


def _label_columns(ax: Axes, steps: Sequence[float] | None) -> None:
    if steps is not None and len(steps):
        positions = np.unique(np.linspace(0, len(steps) - 1, min(8, len(steps))).astype(int))
        ax.set_xticks(positions, [f"{steps[i]:g}" for i in positions])


def _write_values(ax: Axes, values: Any, image: Any) -> None:
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(image.norm(value)) if np.isfinite(value) else (1, 1, 1, 1)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _finish(ax: Axes, own: bool, values: Any, style: Style, what: str) -> None:
    count = count_nonfinite(values)
    if count:
        add_note(ax, str(count), bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0})
    if own:
        style.add_title(ax, what)
        style.finish([ax.figure], {"data": count})
