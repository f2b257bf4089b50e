"""Channels over time as images: ``features_2d``; and the function that draws an image."""

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.annotations import add_note, label_outer_axes, label_panel
from ikkuna.plot.figure import count_nonfinite
from ikkuna.plot.grid import create_panels, grid_shape, share_limits
from ikkuna.plot.style import DIVERGING, Style, StyleOptions, accepts_style, color_limits, colormap, finite_limits

__all__ = ["draw_image", "features_2d"]

_AXES = {"N": "sample", "T": "timestep", "C": "channel"}


def draw_image(
    ax: Axes, values: NDArray[np.float64], low: float | None, high: float | None, cmap: Any = DIVERGING, **options: Any
) -> AxesImage:
    """Draw `values`: (row, column) into `ax`, with the first row on top and NaN and Inf in a separate colour."""
    if low is None or high is None:
        low, high = finite_limits(values)
    shown = np.ma.masked_invalid(values)
    # Interpolation 'auto' blurs large pixels; without it, some of many small pixels disappear.
    defaults = {"aspect": "auto", "interpolation": "nearest" if max(values.shape) <= 300 else "auto"}
    image = ax.imshow(shown, **{"cmap": colormap(cmap), "vmin": low, "vmax": high, **defaults, **options})
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if len(values) == 1:
        ax.set_yticks([])
    return image


@accepts_style(show_colorbar="colorbar", max_timesteps="max_steps", annotations="labels", timesteps_xaxis="time_axis")
def features_2d(
    data: Any,
    *,
    dims: str | None = None,
    norm: Any = "auto",
    cmap: Any = DIVERGING,
    time_axis: Any = "x",
    reflect_half: bool = False,
    max_steps: int | None = None,
    channel_axis: int = -1,
    n_rows: int | str | None = None,
    share_xy: Any = True,
    labels: Any = "auto",
    colorbar: bool | None = None,
    fig: Any = None,
    **style_options: Unpack[StyleOptions],
) -> Any:
    """Draw channels over time as an image for each sample.

    Parameters
    ----------
    data : Tensor, ndarray or list
        (sample, time, channel) or (time, channel).
    dims : str, optional
        The axes of other data, such as ``'NT'`` for (sample, time): two or three letters of N, T and C.
    norm : 'auto', None or tuple of float
        Limits of the colours: the largest magnitude on both sides of 0, the own limits of each image, or a pair.
    cmap : str or Colormap, optional
        Colour map; ``None`` means grey.
    time_axis : {'x', 'y'}
        Direction of time; ``timesteps_xaxis=False`` means ``'y'``.
    reflect_half : bool
        Reverse the time of the second half of the channels, which a bidirectional RNN computes backwards.
    max_steps : int, optional
        Draw only this number of steps.
    channel_axis : int
        The channel axis of the data; the last one by default.
    n_rows : int, optional
        Rows of panels.
    share_xy : bool, str or tuple of them
        As for :func:`~ikkuna.plot.curves.features_1d`.
    labels : 'auto', list of str or None
        Texts in the corners of the panels; ``'auto'`` means their indices.
    colorbar : bool, optional
        Draw a colour bar; by default unless the panels are tight.
    fig : Figure, optional
        Figure for the grid; a new one by default.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    NotebookFigure
        Or `fig`.

    Raises
    ------
    ConfigError
        If the data has another number of axes, or if `norm` or `dims` is invalid.

    Examples
    --------
    >>> figure = features_2d(np.zeros((2, 50, 3)), norm=(-1, 1))
    >>> [ax.images[0].get_array().shape for ax in figure.axes[:2]]
    [(3, 50), (3, 50)]
    """
    values, names = _images(data, dims, channel_axis, max_steps, reflect_half)
    if time_axis in ("x", True, 1):
        values, names = values.transpose(0, 2, 1), (names[0], names[2], names[1])
    style = Style.of(style_options)
    figure, axes = create_panels(style, len(values), n_rows, share_xy, fig=fig)
    low, high = color_limits(norm, [values])
    images = [draw_image(ax, v, low, high, cmap, **style.config("plot")) for ax, v in zip(axes, values, strict=True)]
    counts = [count_nonfinite(each) for each in values]
    for i, (ax, count) in enumerate(zip(axes, counts, strict=True)):
        style.format_panel(ax)
        if len(values) > 1 and not style.tight:
            label_panel(ax, i, labels, len(values), style)
        if count:
            add_note(ax, str(count))
    columns = grid_shape(len(values), n_rows)[1]
    share_limits(axes, columns, share_xy)
    label_outer_axes(axes, columns, names[2], names[1])
    _add_colorbars(figure, axes, images, norm, not style.tight if colorbar is None else colorbar, style)
    each = f"an image for each {names[0]}, " if names[0] and len(values) > 1 else ""
    style.add_title(figure, f"{each}{names[1]} down, {names[2]} to the right")
    style.finish([figure], {f"{names[0] or 'data'} {i}": count for i, count in enumerate(counts)})
    return figure


def _images(
    data: Any, dims: str | None, channel_axis: int, max_steps: int | None, reflect: bool
) -> tuple[NDArray[np.float64], tuple[str, str, str]]:
    """Return values (image, row, column), and the words for the three axes."""
    values = to_array(data)
    if values.ndim not in (2, 3):
        raise ConfigError(f"features_2d expects (sample, time, channel) or (time, channel), got shape {values.shape}")
    if 0 in values.shape:
        raise ConfigError(f"there is no data to draw in shape {values.shape}")
    letters = dims or ("TC" if values.ndim == 2 else "NTC")
    if len(letters) != values.ndim or len(set(letters)) != len(letters) or not set(letters) <= set("NTC"):
        raise ConfigError(f"dims must name the {values.ndim} axes with letters of N, T and C, got {dims!r}")
    if dims is None:
        values = np.moveaxis(values, channel_axis, -1)
    order = [letters.index(letter) for letter in "NTC" if letter in letters]
    values, letters = values.transpose(order), "".join(letters[i] for i in order)
    if "T" not in letters:  # (sample, channel)
        values, letters = values[None], " CN"
        return values.transpose(0, 2, 1), ("", _AXES["C"], _AXES["N"])
    values = values.take(range(values.shape[letters.index("T")])[:max_steps], axis=letters.index("T"))
    if letters == "NT":
        return values.T[None], ("", _AXES["T"], _AXES["N"])
    values = values[None] if letters == "TC" else values
    if reflect:
        half = values.shape[2] // 2
        values = np.concatenate([values[..., :half], values[:, ::-1, half:]], axis=2)
    return values, (_AXES["N"], _AXES["T"], _AXES["C"])


def _add_colorbars(
    figure: Any, axes: list[Axes], images: list[AxesImage], norm: Any, enabled: bool, style: Style
) -> None:
    """Draw one colour bar if all images share their limits, otherwise one for each of up to 16 images."""
    if not enabled:
        return
    if norm is not None:
        figure.colorbar(images[0], ax=axes, **style.config("colorbar", fraction=0.04, pad=0.02))
    elif len(images) <= 16:
        for ax, image in zip(axes, images, strict=True):
            figure.colorbar(image, ax=ax, **style.config("colorbar"))
