"""Figures of an RNN's weights or gradients by gate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.figures.histograms import draw_histogram
from ikkuna.figures.style import (
    DIVERGING,
    FigureList,
    NanCount,
    NotebookFigure,
    Style,
    StyleOptions,
    accepts_style,
    color_limits,
    count_nonfinite,
)
from ikkuna.inspect.plot.images import draw_image
from ikkuna.inspect.probe.rnn import GATES, RNNWeights, get_rnn_weights
from ikkuna.numerics.elements import to_array

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RNNPanels:
    """The matrices of one layer and direction.

    Parameters
    ----------
    name : str
        Such as ``'LAYER 0 FORWARD'``, or ``'FORWARD LAYER'`` for an RNN with one layer.
    gates : tuple of str
        Names of the gates, from left to right.
    panels : mapping of str to ndarray
        ``kernel``, ``recurrent`` and, if they exist, ``bias`` and ``projection``.
    """

    name: str
    gates: tuple[str, ...]
    panels: Mapping[str, Array]

    def gate(self, panel: str, index: int) -> Array:
        """Return the columns of one gate."""
        hidden = self.panels[panel].shape[1] // len(self.gates)
        return self.panels[panel][:, index * hidden : (index + 1) * hidden]

    @property
    def separators(self) -> list[float]:
        """Positions between the gates, in columns."""
        hidden = self.panels["kernel"].shape[1] // len(self.gates)
        return [hidden * k - 0.5 for k in range(1, len(self.gates))]

    def nan_counts(self) -> dict[str, NanCount | None]:
        """Return the counts of NaN and infinite elements, by gate for kernel and recurrent."""
        gated = ((panel, i, gate) for panel in ("kernel", "recurrent") for i, gate in enumerate(self.gates))
        counts = {f"{panel}/{gate}": count_nonfinite(self.gate(panel, i)) for panel, i, gate in gated}
        return counts | {
            panel: count_nonfinite(self.panels[panel]) for panel in ("bias", "projection") if panel in self.panels
        }


def rnn_panels(
    rnn: nn.Module | None,
    layer: Any = None,
    *,
    mode: str = "weights",
    data: Any = None,
    rnn_layers: Any = "all",
    bias: bool = True,
    absolute: bool = False,
    normalize: bool = False,
    **loss: Any,
) -> list[RNNPanels]:
    """Return the matrices to draw, for each layer and direction.

    Parameters
    ----------
    rnn : nn.Module or None
        An RNN, a cell, or a model that contains one.
    layer : int, str or nn.Module, optional
        See :func:`~ikkuna.inspect.probe.rnn.get_rnn_weights`.
    mode : {'weights', 'grads'}
        See :func:`~ikkuna.inspect.probe.rnn.get_rnn_weights`.
    data : sequence, optional
        Matrices to draw instead of those of the RNN: kernel, recurrent and bias for each direction, or
        :class:`~ikkuna.inspect.probe.rnn.RNNWeights`.
    rnn_layers : 'all', int or sequence of int
        Layers of an RNN with several layers.
    bias : bool
        Include the biases.
    absolute : bool
        Return magnitudes.
    normalize : bool
        Scale each matrix to 0 … 1; a constant matrix becomes 0.
    **loss
        See :func:`~ikkuna.inspect.probe.rnn.get_rnn_weights`.
    """
    parts = _from_data(rnn, layer, data) if data is not None else get_rnn_weights(_model(rnn), layer, mode=mode, **loss)
    layers = sorted({part.layer for part in parts})
    chosen = layers if rnn_layers == "all" else [rnn_layers] if isinstance(rnn_layers, int) else list(rnn_layers)
    if unknown := [k for k in chosen if k not in layers]:
        raise ConfigError(f"rnn_layers contains {unknown[0]}; available: {layers}")
    result = []
    for part in (part for part in parts if part.layer in chosen):
        arrays = {name: to_array(tensor) for name, tensor in part.panels().items() if bias or name != "bias"}
        arrays = {name: _scaled(array, absolute, normalize) for name, array in arrays.items()}
        direction = part.direction.upper()
        name = f"LAYER {part.layer} {direction}" if len(layers) > 1 else f"{direction} LAYER"
        result.append(RNNPanels(name, part.gates, arrays))
    return result


def _model(rnn: nn.Module | None) -> nn.Module:
    if not isinstance(rnn, nn.Module):
        raise ConfigError(f"expected a model or an RNN, got {type(rnn).__name__}")
    return rnn


def _from_data(rnn: nn.Module | None, layer: Any, data: Any) -> Sequence[RNNWeights]:
    if all(isinstance(each, RNNWeights) for each in data):
        return list(data)
    step = 3 if len(data) % 3 == 0 else 2
    if len(data) % step:
        raise ConfigError(f"data must hold kernel, recurrent (and bias) for each direction, got {len(data)} entries")
    kind = get_rnn_weights(rnn, layer)[0].kind if rnn is not None else _kind(data)
    groups = [data[i : i + step] for i in range(0, len(data), step)]
    return [_weights(kind, group, i) for i, group in enumerate(groups)]


def _kind(data: Any) -> str:
    """Return the kind of the RNN from the shape of the recurrent matrix."""
    rows, columns = np.shape(to_array(data[1]))
    kinds = {len(gates): kind for kind, gates in GATES.items()}
    if columns % rows or columns // rows not in kinds:
        raise ConfigError(f"a recurrent matrix must have shape (hidden, gates * hidden), got ({rows}, {columns})")
    return kinds[columns // rows]


def _weights(kind: str, group: Sequence[Any], index: int) -> RNNWeights:
    import torch

    tensors = [None if each is None else torch.from_numpy(to_array(each)) for each in group]
    kernel, recurrent, bias = (*tensors, None)[:3]
    if kernel is None or recurrent is None:
        raise ConfigError("data needs a kernel and a recurrent matrix for each direction")
    bias = bias if bias is None or bias.ndim == 2 else bias[None]
    hidden = kernel.shape[1] // len(GATES[kind])
    direction = ("forward", "backward")[index % 2]
    return RNNWeights(index // 2, direction, kind, GATES[kind], hidden, kernel, recurrent, bias, None)


def _scaled(array: Array, absolute: bool, normalize: bool) -> Array:
    array = np.abs(array) if absolute else array
    if not normalize:
        return array
    finite = array[np.isfinite(array)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return (array - low) / (high - low) if high > low else np.where(np.isfinite(array), 0.0, array)


_ALIASES = {
    "_id": "layer",
    "input_data": "x",
    "labels": "y",
    "show_bias": "bias",
    "show_colorbar": "colorbar",
    "absolute_value": "absolute",
    "gate_sep_width": "gate_lines",
}
_TITLES = {"kernel": "KERNEL", "recurrent": "RECURRENT", "bias": "BIAS", "projection": "PROJECTION"}
_ROWS = {"kernel": "input channel", "recurrent": "hidden unit", "projection": "hidden unit"}


@accepts_style(**_ALIASES)
def rnn_heatmap(
    rnn: Any,
    layer: Any = None,
    *,
    mode: str = "weights",
    x: Any = None,
    y: Any = None,
    loss_fn: Any = None,
    closure: Any = None,
    data: Any = None,
    rnn_layers: Any = "all",
    norm: Any = "auto",
    cmap: Any = DIVERGING,
    absolute: bool = False,
    normalize: bool = False,
    bias: bool = True,
    gate_lines: float = 1.0,
    colorbar: bool = True,
    per_layer: bool = False,
    nan: str = "mask",
    **style_options: Unpack[StyleOptions],
) -> FigureList:
    """Draw an RNN's weights as images, with lines between the gates, in one figure for each layer and direction.

    Kernel (rows are input channels), recurrent (rows are hidden units) and, if it exists, projection are side by side;
    the two biases are strips below them.  Columns are hidden units, gate by gate.

    Parameters
    ----------
    rnn : nn.Module
        An RNN, a cell, or a model that contains one.
    layer : int, str or nn.Module, optional
        Which RNN of the model; ``'lstm'`` and ``'bidir'`` find it by its kind.
    mode : {'weights', 'grads'}
        Draw weights, or gradients of the loss defined by `x`, `y`, `loss_fn` or `closure`; without these, the gradients
        stored in the model.
    x, y : Tensor, ndarray or list, optional
        Input and targets.
    loss_fn, closure : callable, optional
        See :func:`~ikkuna.inspect.probe.outputs.get_gradients`.
    data : sequence, optional
        Matrices to draw instead of those of the model (see :func:`~ikkuna.inspect.plot.rnn.rnn_panels`).
    rnn_layers : 'all', int or sequence of int
        Layers to draw of an RNN with several layers.
    norm : 'auto', None or tuple of float
        Limits of the colours: the largest magnitude in kernel and recurrent matrices on both sides of 0, the own limits
        of each image, or a pair.
    cmap : str or Colormap, optional
        Colour map; ``None`` means grey.
    absolute : bool
        Draw magnitudes.
    normalize : bool
        Scale each matrix to 0 … 1.
    bias, colorbar : bool
        Draw the biases, the colour bar.
    gate_lines : float
        Width of the lines between gates; 0 for none.
    per_layer : bool
        Compute ``'auto'`` limits for each figure separately.
    nan : {'mask', 'zero'}
        Draw NaN and Inf in a separate colour, or as 0.  Both are counted in ``nan_report`` of the figure.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    FigureList
        Layer by layer, forward before backward.

    Raises
    ------
    KeyError, ConfigError
        If the layer does not exist or is not an RNN, or if there are no gradients.

    Examples
    --------
    >>> (figure,) = rnn_heatmap(__import__("torch").nn.GRU(4, 8), bias=False)
    >>> [line.get_xdata()[0] for line in figure.axes[0].lines]
    [7.5, 15.5]
    """
    if nan not in ("mask", "zero"):
        raise ConfigError(f"nan must be 'mask' or 'zero', got {nan!r}")
    loss = {"x": x, "y": y, "loss_fn": loss_fn, "closure": closure} if mode == "grads" else {}
    scaling = {"absolute": absolute, "normalize": normalize}
    parts = rnn_panels(rnn, layer, mode=mode, data=data, rnn_layers=rnn_layers, bias=bias, **scaling, **loss)
    style = Style.of(style_options)
    common = _color_limits(norm, parts, absolute or normalize)
    figures = FigureList()
    for part in parts:
        figure = style.new_figure(14, 8)
        figure.report(part.nan_counts())
        chosen = _color_limits(norm, [part], absolute or normalize) if per_layer else common
        _draw_matrices(figure, part, chosen, cmap, gate_lines, colorbar, nan == "zero", style)
        figures.append(figure)
    style.finish(figures)
    return figures


def _color_limits(norm: Any, parts: list[RNNPanels], positive: bool) -> tuple[float | None, float | None]:
    low, high = color_limits(norm, [part.panels[name] for part in parts for name in ("kernel", "recurrent")])
    return (0.0 if positive and isinstance(norm, str) else low), high


def _draw_matrices(
    figure: NotebookFigure,
    part: RNNPanels,
    norm: Any,
    cmap: Any,
    width: float,
    colorbar: bool,
    zero: bool,
    style: Style,
) -> None:
    tops = [name for name in ("kernel", "recurrent", "projection") if name in part.panels]
    grid = figure.add_gridspec(2, len(tops), height_ratios=(9, 1) if "bias" in part.panels else (1, 1e-6))
    axes = {name: figure.add_subplot(grid[0, i]) for i, name in enumerate(tops)}
    if "bias" in part.panels:
        axes["bias"] = figure.add_subplot(grid[1, :])
    for name, ax in axes.items():
        values = part.panels[name]
        shown = np.where(np.isfinite(values), values, 0.0) if zero else values
        image = draw_image(ax, shown, norm[0], norm[1], cmap, **style.config("plot"))
        _label_matrix(ax, name, part, width, style)
        if colorbar and name == tops[-1]:
            figure.colorbar(image, ax=[axes[top] for top in tops], **style.config("colorbar", fraction=0.05, pad=0.02))
    _add_title(figure, part, style)


def _add_title(figure: NotebookFigure, part: RNNPanels, style: Style) -> None:
    if style.title:
        text = part.name if style.title is True else f"{style.title} — {part.name}"
        figure.suptitle(text, **style.config("title", weight="bold"))


def _label_matrix(ax: Axes, name: str, part: RNNPanels, width: float, style: Style) -> None:
    ax.set_title(_TITLES[name], fontsize=11, weight="bold")
    if name != "projection":
        for position in part.separators if width else ():
            ax.axvline(position, color="black", linewidth=width)
    if name in ("kernel", "recurrent"):
        ax.set_xlabel(f"({', '.join(gate.upper() for gate in part.gates)})" if len(part.gates) > 1 else "hidden unit")
    elif name == "projection":
        ax.set_xlabel("projected unit")
    if name == "bias":
        ax.set_yticks(range(len(part.panels["bias"])), ("b_ih", "b_hh")[: len(part.panels["bias"])])
    else:
        ax.set_ylabel(_ROWS[name])
    style.format_panel(ax)


@accepts_style(**_ALIASES)
def rnn_histogram(
    rnn: Any,
    layer: Any = None,
    *,
    mode: str = "weights",
    x: Any = None,
    y: Any = None,
    loss_fn: Any = None,
    closure: Any = None,
    data: Any = None,
    rnn_layers: Any = "all",
    equate_axes: int = 1,
    bins: int = 150,
    bias: bool = True,
    nan: str = "drop",
    **style_options: Unpack[StyleOptions],
) -> FigureList:
    """Draw the distribution of an RNN's weights by gate, in one figure for each layer and direction.

    There is a row for each gate, with kernel on the left and recurrent on the right, and one panel for all biases
    below. Heights are densities.

    Parameters
    ----------
    rnn : nn.Module
        An RNN, a cell, or a model that contains one.
    layer : int, str or nn.Module, optional
        As for :func:`rnn_heatmap`; so are `mode`, `x`, `y`, `loss_fn`, `closure`, `data` and `rnn_layers`.
    equate_axes : {0, 1, 2}
        0: each panel has its own limits.  1: kernel and recurrent share them.  2: all figures share them, symmetric
        about 0.  The biases always have their own limits.
    bins : int
        Number of bins in each panel.
    bias : bool
        Draw the biases.
    nan : {'drop', 'zero'}
        Leave NaN and Inf out, or draw them as 0.  The panel states their number in both cases.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    FigureList
        Layer by layer, forward before backward.

    Raises
    ------
    KeyError, ConfigError
        As for :func:`rnn_heatmap`, or if `equate_axes` has another value.
    """
    if equate_axes not in (0, 1, 2):
        raise ConfigError(f"equate_axes must be 0, 1 or 2, got {equate_axes!r}")
    if nan not in ("drop", "zero"):
        raise ConfigError(f"nan must be 'drop' or 'zero', got {nan!r}")
    loss = {"x": x, "y": y, "loss_fn": loss_fn, "closure": closure} if mode == "grads" else {}
    parts = rnn_panels(rnn, layer, mode=mode, data=data, rnn_layers=rnn_layers, bias=bias, **loss)
    style = Style.of(style_options, borders=False)
    figures, gated = FigureList(), []
    for part in parts:
        figure = style.new_figure(9, 9)
        figure.report(part.nan_counts())
        gated.append(_draw_distributions(figure, part, bins, nan == "zero", style))
        figures.append(figure)
    groups = gated if equate_axes == 1 else [[ax for axes in gated for ax in axes]]
    for group in groups if equate_axes else ():
        _equate(group, symmetric=equate_axes == 2)
    style.finish(figures)
    return figures


def _draw_distributions(figure: NotebookFigure, part: RNNPanels, bins: int, zero: bool, style: Style) -> list[Axes]:
    """Draw one layer and direction, and return the axes of its gates."""
    count = len(part.gates)
    grid = figure.add_gridspec(count + 1, 2, height_ratios=[*[2] * count, 1 if "bias" in part.panels else 1e-6])
    gated = []
    for column, panel in enumerate(("kernel", "recurrent")):
        for row, gate in enumerate(part.gates):
            ax = figure.add_subplot(grid[row, column])
            _draw_distribution(ax, part.gate(panel, row), bins, zero, style)
            if row == 0:
                ax.set_title(f"{_TITLES[panel]} GATES" if count > 1 else _TITLES[panel], weight="bold")
            if count > 1:
                ax.text(0.02, 0.95, gate.upper(), transform=ax.transAxes, weight="bold", va="top")
            if row == count - 1 and "bias" not in part.panels:
                ax.set_xlabel("value")
            if column == 0:
                ax.set_ylabel("density")
            gated.append(ax)
    if "bias" in part.panels:
        ax = figure.add_subplot(grid[count, :])
        _draw_distribution(ax, part.panels["bias"], bins, zero, style)
        ax.set_title("BIAS", weight="bold")
        ax.set(xlabel="value", ylabel="density")
    _add_title(figure, part, style)
    return gated


def _draw_distribution(ax: Axes, values: Any, bins: int, zero: bool, style: Style) -> None:
    flat = values.reshape(-1)
    draw_histogram(ax, flat, bins, **style.config("plot", density=bool(np.isfinite(flat).any())))
    if zero and not np.isfinite(flat).all():
        ax.patches[-1].remove()
        draw_histogram(ax, np.where(np.isfinite(flat), flat, 0.0), bins, **style.config("plot", density=True))
    style.format_panel(ax)


def _equate(axes: list[Axes], symmetric: bool) -> None:
    """Set the same limits for all `axes`; empty histograms do not count."""
    full = [ax for ax in axes if ax.patches[-1].get_data().values.any()] or axes  # type: ignore[attr-defined]
    lows, highs = zip(*(ax.get_xlim() for ax in full), strict=True)
    low, high, top = min(lows), max(highs), max(ax.get_ylim()[1] for ax in full)
    if symmetric:
        high = max(abs(low), abs(high))
        low = -high
    for ax in axes:
        ax.set(xlim=(low, high), ylim=(0, top))
