"""Channels over time as images: ``features_2d``; and the images other figures are made of."""

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.annotations import add_note, label_outer_axes, label_panel
from ikkuna.plot.figure import NotebookFigure, count_nonfinite, save_figures
from ikkuna.plot.grid import create_panels, grid_shape, outer_axes, share_limits
from ikkuna.plot.keyword_aliases import keyword_aliases
from ikkuna.plot.style import (
    DIVERGING,
    STYLE_ALIASES,
    STYLE_KEYWORDS,
    Style,
    StyleOptions,
    color_limits,
    colormap,
    finite_limits,
)

__all__ = ["draw_image", "features_2d"]

_AXES = {"N": "sample", "T": "timestep", "C": "channel"}


def draw_image(
    ax: Axes, values: NDArray[np.float64], low: float | None, high: float | None, cmap: Any = DIVERGING, **options: Any
) -> AxesImage:
    """Draw `values`: (row, column) as an image that fills `ax`, first row on top; NaN and Inf in their own colour."""
    if low is None or high is None:
        low, high = finite_limits(values)
    shown = np.ma.masked_invalid(values)
    # Matplotlib's own choice blurs few large pixels, but alone keeps many small ones from vanishing.
    defaults = {"aspect": "auto", "interpolation": "nearest" if max(values.shape) <= 300 else "auto"}
    image = ax.imshow(shown, **{"cmap": colormap(cmap), "vmin": low, "vmax": high, **defaults, **options})
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if len(values) == 1:
        ax.set_yticks([])
    return image


@keyword_aliases(
    STYLE_KEYWORDS,
    **STYLE_ALIASES,
    show_colorbar="colorbar",
    max_timesteps="max_steps",
    annotations="labels",
    timesteps_xaxis="time_axis",
)
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
    data : (sample, time, channel) or (time, channel)
        A tensor, an array or lists.
    dims : str, optional
        What the axes of other data are, such as ``'NT'`` for (sample, time): two or three letters of N, T and C.
    norm : 'auto', None or (float, float)
        Limits of the colours: the largest magnitude to either side of 0, each image's own, or these.
    cmap : str or Colormap, optional
        ``None`` is greys.
    time_axis : {'x', 'y'}
        Where time goes; ``timesteps_xaxis=False`` means ``'y'``.
    reflect_half : bool
        Reverse the time of the second half of the channels: those that a bidirectional RNN computes backwards.
    max_steps : int, optional
        Draw only the first steps.
    channel_axis : int
        Which axis of the data counts the channels, if not the last.
    n_rows, share_xy, labels, fig
        As for :func:`~ikkuna.plot.curves.features_1d`.
    colorbar : bool, optional
        By default, where there is room for it.
    **style_options
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    NotebookFigure

    Raises
    ------
    ConfigError
        For data of another number of axes, or a `norm` that is none.

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
    figure, axes = create_panels(style, len(values), n_rows, share_xy, size=_size(len(values)), fig=fig)
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
    bottom, left = outer_axes(axes, columns, len(values))
    label_outer_axes(bottom, left, names[2], names[1])
    _bars(figure, axes, images, norm, not style.tight if colorbar is None else colorbar, style)
    each = f"an image for each {names[0]}, " if names[0] and len(values) > 1 else ""
    style.add_title(figure, f"{each}{names[1]} down, {names[2]} to the right")
    if isinstance(figure, NotebookFigure):
        figure.report({f"{names[0] or 'data'} {i}": count for i, count in enumerate(counts)})
    save_figures([figure], style.savepath, **style.config("save"))
    return figure


def _size(count: int) -> tuple[float, float]:
    return (10.0, 5.0) if count == 1 else (10.0, 8.0)


def _images(
    data: Any, dims: str | None, channel_axis: int, max_steps: int | None, reflect: bool
) -> tuple[NDArray[np.float64], tuple[str, str, str]]:
    """Return values (image, row, column), and the words for the three axes."""
    values = to_array(data)
    if values.ndim not in (2, 3):
        raise ConfigError(f"features_2d expects (sample, time, channel) or (time, channel), got shape {values.shape}")
    if 0 in values.shape:
        raise ConfigError(f"there is nothing to draw in data of shape {values.shape}")
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


def _bars(figure: Any, axes: list[Axes], images: list[AxesImage], norm: Any, wanted: bool, style: Style) -> None:
    """Draw one colour bar where all images share their limits, otherwise one beside each of a few."""
    if not wanted:
        return
    if norm is not None:
        figure.colorbar(images[0], ax=axes, **style.config("colorbar", fraction=0.04, pad=0.02))
    elif len(images) <= 16:
        for ax, image in zip(axes, images, strict=True):
            figure.colorbar(image, ax=ax, **style.config("colorbar"))
