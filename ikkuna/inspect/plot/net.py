"""Figures of whole networks: the flow of gradients, histograms and images of a NetDict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.figures.histograms import draw_histogram
from ikkuna.figures.style import (
    DIVERGING,
    NOTE_COLOR,
    NotebookFigure,
    Style,
    StyleOptions,
    accepts_style,
    add_outer_legend,
    color_limits,
    count_nonfinite,
    create_panels,
)
from ikkuna.inspect.plot.images import draw_image
from ikkuna.numerics.elements import to_array
from ikkuna.support.modules import is_bias, named_parameters


@dataclass(frozen=True)
class Flow:
    """Mean and largest magnitude of the gradient of each parameter.

    Parameters
    ----------
    names : tuple of str
        Names of the parameters.
    mean, largest : tuple of float
        Mean and largest magnitude; NaN without gradient or if the gradient contains NaN.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    largest: tuple[float, ...]


def flow_of(gradients: nn.Module | Mapping[str, Any], include_bias: bool = False) -> Flow:
    """Return the flow of the gradients stored in a model, or of gradients by name.

    Examples
    --------
    >>> flow_of({"a.weight": [1.0, -3.0]})
    Flow(names=('a.weight',), mean=(2.0,), largest=(3.0,))
    """
    if isinstance(gradients, nn.Module):
        found: Mapping[str, Any] = {name: p.grad for name, p in named_parameters(gradients) if p.requires_grad}
    else:
        found = gradients
    chosen = {k: v for k, v in found.items() if include_bias or not is_bias(k)}
    if not chosen or all(value is None for value in chosen.values()):
        raise ConfigError("there are no gradients; call backward() first")
    magnitudes = [np.abs(to_array(v)) if v is not None else np.full(1, np.nan) for v in chosen.values()]
    means = tuple(float(m.mean()) if m.size else float("nan") for m in magnitudes)
    tops = tuple(float(m.max()) if m.size else float("nan") for m in magnitudes)
    return Flow(tuple(chosen), means, tops)


def draw_flow(ax: Axes, flow: Flow, log: bool = True) -> Axes:
    """Draw the flow into `ax`, with the first layer on top: bars for the mean, marks for the largest magnitude."""
    rows = np.arange(len(flow.names))
    bars = ax.barh(rows, np.nan_to_num(flow.mean, posinf=0.0), color="#56b4e9")
    marks = ax.scatter(flow.largest, rows, marker="|", s=80, color="#0072b2", zorder=3)
    if log and any(value > 0 for value in flow.mean):
        ax.set_xscale("log")
    for row, (mean, largest) in enumerate(zip(flow.mean, flow.largest, strict=True)):
        if not np.isfinite(mean) or not largest:
            text = "0" if largest == 0 else "NaN" if np.isnan(mean) else "Inf"
            ax.text(0.01, row, text, transform=ax.get_yaxis_transform(), color=NOTE_COLOR, weight="bold", va="center")
    every = max(1, -(-len(rows) // 60))
    ax.set_yticks(rows[::every], flow.names[::every])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlabel("magnitude of the gradient")
    add_outer_legend(ax, [bars, marks], ["mean", "largest"])
    return ax


@accepts_style()
def gradient_flow(
    gradients: Any,
    *,
    include_bias: bool = False,
    log: bool = True,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Axes:
    """Draw the magnitude of the gradient of every layer, from the input to the loss.

    Parameters
    ----------
    gradients : nn.Module or mapping of str to Tensor
        A model after ``backward()``, or gradients by name, such as the result of
        :func:`ikkuna.inspect.netdict.snapshots.get_grad`.
    include_bias : bool
        Draw the biases too.
    log : bool
        Use a logarithmic scale.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    Axes
        A gradient that is exactly 0, NaN or infinite is marked with that word.

    Raises
    ------
    ConfigError
        If there are no gradients.
    """
    flow = flow_of(gradients, include_bias)
    style = Style.of(style_options, title="Gradient flow")
    axes: Axes = (
        ax if ax is not None else style.new_figure(8, max(2.5, min(0.3 * len(flow.names) + 1.2, 20))).subplots()
    )
    draw_flow(axes, flow, log)
    style.format_panel(axes)
    style.add_title(axes, "")
    if ax is None:
        style.finish([axes.figure])
    return axes


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
        See :class:`~ikkuna.figures.style.Style`.
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

    A tensor without elements has no image.

    `norm` is as for :func:`~ikkuna.inspect.plot.images.features_2d`; ``None`` means the largest magnitude of each tensor on
    both sides of 0.
    """
    arrays = {name: array for name, value in net.items() if (array := to_array(value)).size}
    if not arrays:
        raise ConfigError("there is no data to draw: no tensor with elements is selected")
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
