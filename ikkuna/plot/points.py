"""The values of channels as points: ``features_0d``."""

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.annotations import add_color_legend, add_note
from ikkuna.plot.figure import count_nonfinite
from ikkuna.plot.style import Style, StyleOptions, accepts_style, curve_colors

__all__ = ["draw_points", "features_0d"]


@accepts_style(show_y_zero="zero_line", y_zero="zero_line", ylims="ylim")
def features_0d(
    data: Any,
    *,
    marker: str = "o",
    cmap: Any = None,
    color: Any = None,
    zero_line: bool = True,
    ylim: Any = "auto",
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Axes:
    """Draw the value of every channel as a point, a column of points for each sample.

    Parameters
    ----------
    data : Tensor, ndarray or list
        (sample, channel), such as the gradient of a last state.
    marker : str
        Marker of the points.
    cmap : str or Colormap, optional
        Colour map for the channels; a channel has the same colour in all samples.
    color : str, tuple or list of them, optional
        One colour for all channels, or a list of colours.
    zero_line : bool
        Draw a line at 0.
    ylim : 'auto' or tuple of float
        Limits of y; ``'auto'`` means the largest magnitude on both sides of 0.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    Axes
        The axes with the points.

    Raises
    ------
    ConfigError
        If the data is not 2-D.

    Examples
    --------
    >>> [float(limit) for limit in features_0d([[1.0, -2.0], [0.5, 1.0]]).get_ylim()]
    [-2.0, 2.0]
    """
    values = to_array(data)
    if values.ndim != 2:
        raise ConfigError(f"features_0d expects 2-D data (sample, channel), got shape {values.shape}")
    style = Style.of(style_options, borders=False)
    figure = style.new_figure(12, 4) if ax is None else None
    target: Axes = ax if ax is not None else figure.subplots()  # type: ignore[union-attr]  # either ax or figure is not None
    draw_points(target, values, curve_colors(values.shape[1], color, cmap), **style.config("plot", marker=marker))
    if zero_line:
        target.axhline(0, color="black", linewidth=1, zorder=0)
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max(initial=0.0)) or 1.0
    target.set_ylim(*((-top, top) if isinstance(ylim, str) else ylim))
    target.set_xticks(np.arange(1, len(values) + 1), minor=True)
    target.set(xlabel="sample", ylabel="value", xlim=(0.25, len(values) + 0.75))
    style.format_panel(target)
    style.add_title(target, "a column of channels for each sample")
    add_color_legend(target, values.shape[1], "channel", color, cmap)
    if count := count_nonfinite(values):
        add_note(target, str(count))
    if figure is not None:
        style.finish([figure], {"data": count})
    return target


def draw_points(ax: Axes, values: NDArray[np.float64], colors: list[Any], **options: Any) -> Axes:
    """Draw `values`: (sample, channel) into `ax`, a column of points for each sample."""
    x = np.arange(1, len(values) + 1)
    for channel, color in enumerate(colors):
        ax.scatter(x, values[:, channel], color=color, **{"s": 18, "clip_on": False, **options})
    return ax
