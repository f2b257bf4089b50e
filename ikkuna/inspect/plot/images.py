"""Channels over time, layers by step and similarities of layers as images."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.figures.style import (
    DIVERGING,
    SEQUENTIAL,
    Style,
    StyleOptions,
    accepts_style,
    add_note,
    color_limits,
    colormap,
    count_nonfinite,
    create_panels,
    finite_limits,
    grid_shape,
    label_outer_axes,
    label_panel,
    share_limits,
)
from ikkuna.numerics.elements import to_array

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
        As for :func:`~ikkuna.figures.curves.features_1d`.
    labels : 'auto', list of str or None
        Texts in the corners of the panels; ``'auto'`` means their indices.
    colorbar : bool, optional
        Draw a colour bar; by default unless the panels are tight.
    fig : Figure, optional
        Figure for the grid; a new one by default.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

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
        As for :func:`~ikkuna.inspect.plot.images.features_2d`.
    cmap : str or Colormap, optional
        Colour map; ``None`` means grey.
    label : str
        Name of the value.
    colorbar : bool
        Draw a colour bar.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

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
        :func:`~ikkuna.inspect.probe.weights.channel_correlation`.
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
        See :class:`~ikkuna.figures.style.Style`.

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
