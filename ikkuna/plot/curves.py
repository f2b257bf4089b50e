"""Channels as curves over time: ``features_1d``."""

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.annotations import add_color_legend, add_note, label_outer_axes, label_panel
from ikkuna.plot.figure import count_nonfinite
from ikkuna.plot.grid import create_panels, grid_shape, share_limits
from ikkuna.plot.style import NOTE_COLOR, Style, StyleOptions, accepts_style, curve_colors

__all__ = ["draw_curves", "features_1d"]


@accepts_style(show_y_zero="zero_line", y_zero="zero_line", annotations="labels", max_timesteps="max_steps")
def features_1d(
    data: Any,
    *,
    by: str = "channel",
    n_rows: int | str | None = None,
    share_xy: Any = True,
    zero_line: bool = False,
    labels: Any = "auto",
    max_steps: int | None = None,
    subplot_samples: bool = False,
    color: Any = None,
    cmap: Any = None,
    fig: Any = None,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Any:
    """Draw channels as curves over time, a panel for each channel and a curve for each sample.

    Parameters
    ----------
    data : Tensor, ndarray or list
        (sample, time, channel), or (time, channel) for one panel with all channels.
    by : {'channel', 'sample'}
        Draw a panel for each channel or for each sample; the other one has the curves.  ``subplot_samples=True`` means
        ``'sample'``.
    n_rows : int, optional
        Rows of panels.
    share_xy : bool, str or tuple of them
        Whether panels have the same limits of x and y: True, False, ``'row'``, ``'col'`` or a pair of these.
    zero_line : bool
        Draw a line at 0.
    labels : 'auto', list of str or None
        Texts in the corners of the panels; ``'auto'`` means their indices.
    max_steps : int, optional
        Draw only this number of steps.
    subplot_samples : bool
        See `by`.
    color : str, tuple or list of them, optional
        One colour for all curves, or a list of colours.
    cmap : str or Colormap, optional
        Colour map for the curves.
    fig : Figure, optional
        Figure for the grid; a new one by default.
    ax : Axes, optional
        Axes for a single panel.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    NotebookFigure
        Or `fig`, or the figure of `ax`.

    Raises
    ------
    ConfigError
        If the data has another number of axes, or if `by` has another value.

    Examples
    --------
    >>> figure = features_1d(np.zeros((3, 10, 4)))
    >>> [len(ax.lines) for ax in figure.axes]
    [3, 3, 3, 3]
    """
    values, curve, panel = _curves(data, "sample" if subplot_samples else by, max_steps)
    style = Style.of(style_options)
    target: Any = ax.figure if ax is not None else fig
    if ax is not None and len(values) > 1:
        raise ConfigError(f"ax takes one panel, but the data has {len(values)}; give fig")
    columns = grid_shape(len(values), n_rows)[1]
    figure, axes = (target, [ax]) if ax is not None else create_panels(style, len(values), n_rows, share_xy, fig=fig)
    colors = curve_colors(values.shape[2], color, cmap)
    for i, each in enumerate(axes):
        draw_curves(each, values[i], colors, zero_line, **style.config("plot"))
        style.format_panel(each)
        if panel:
            label_panel(each, i, labels, len(values), style)
        if count := count_nonfinite(values[i]):
            add_note(each, str(count))
    share_limits(axes, columns, share_xy)
    label_outer_axes(axes, columns, "timestep", "value")
    style.add_title(
        figure, f"a panel for each {panel}, a curve for each {curve}" if panel else f"a curve for each {curve}"
    )
    if not panel:
        add_color_legend(axes[0], values.shape[2], curve, color, cmap)
    style.finish([figure], {f"{panel or 'data'} {i}": count_nonfinite(v) for i, v in enumerate(values)})
    return figure


def _curves(data: Any, by: str, max_steps: int | None) -> tuple[NDArray[np.float64], str, str]:
    """Return values (panel, time, curve), and the words for a curve and for a panel (empty for a single panel)."""
    if by not in ("channel", "sample"):
        raise ConfigError(f"by must be 'channel' or 'sample', got {by!r}")
    values = to_array(data)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim not in (2, 3):
        raise ConfigError(f"features_1d expects (sample, time, channel) or (time, channel), got shape {values.shape}")
    if 0 in values.shape:
        raise ConfigError(f"there is no data to draw in shape {values.shape}")
    values = values[..., :max_steps, :]
    if values.ndim == 2:
        return values[None], "channel", ""
    if by == "sample":
        return values, "channel", "sample"
    return values.transpose(2, 1, 0), "sample", "channel"


def draw_curves(
    ax: Axes, values: NDArray[np.float64], colors: list[Any], zero_line: bool = False, x: Any = None, **options: Any
) -> Axes:
    """Draw `values`: (time, curve) into `ax`; NaN leaves a gap."""
    if zero_line:
        ax.axhline(0, color=NOTE_COLOR, linewidth=1)
    steps = np.arange(len(values)) if x is None else x
    width = 1.2 if values.shape[1] <= 16 else 0.6
    shown = np.where(np.isfinite(values), values, np.nan)
    for i, color in enumerate(colors):
        ax.plot(steps, shown[:, i], color=color, **{"linewidth": width, **options})
    if x is None:
        ax.set_xlim(0, len(values))
    return ax
