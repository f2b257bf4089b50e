"""Histograms and images of the tensors of a NetDict."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.grid import panels
from ikkuna.plot.histograms import draw_histogram
from ikkuna.plot.images import draw_image
from ikkuna.plot.look import DIVERGING, Look, limits
from ikkuna.plot.picture import Picture, count_nonfinite, save

__all__ = ["net_heatmap", "net_histogram"]

_SAMPLE = 1_000_000


def net_histogram(
    net: Mapping[str, Any],
    *,
    layerwise: bool = False,
    bins: Any = 100,
    log: bool = False,
    sample: int | None = _SAMPLE,
    **look: Any,
) -> Picture:
    """Draw a histogram of all elements, or a panel for each tensor.

    Parameters
    ----------
    log : bool
        A logarithmic count.
    sample : int, optional
        Of more elements than this, draw as many, evenly spaced; the panel says so.  ``None`` draws all.
    **look
        See :class:`~ikkuna.plot.look.Look`.
    """
    arrays = {name: to_array(value).reshape(-1) for name, value in net.items()}
    if not arrays:
        raise ConfigError("there is nothing to draw: no tensor is selected")
    shown = arrays if layerwise else {"all": np.concatenate(list(arrays.values()))}
    style = Look.of(look)
    picture, axes = panels(style, len(shown), None, False, _size(len(shown)))
    for ax, (name, values) in zip(axes, shown.items(), strict=True):
        thin = -(-values.size // sample) if sample and values.size else 1
        draw_histogram(ax, values[::thin], bins, **style.config("plot"))
        ax.set_title(f"{name} (1 of {thin} elements)" if thin > 1 else name, fontsize=9)
        if log:
            ax.set_yscale("log")
        style.frame(ax)
    axes[-1].set_xlabel("value")
    axes[0].set_ylabel("number of elements")
    style.entitle(picture, "a histogram for each tensor" if layerwise else "a histogram of all elements")
    picture.report({name: count_nonfinite(values) for name, values in shown.items()})
    save([picture], style.savepath, **style.config("save"))
    return picture  # type: ignore[no-any-return]  # made here, so a Picture


def net_heatmap(net: Mapping[str, Any], *, norm: Any = None, cmap: Any = DIVERGING, **look: Any) -> Picture:
    """Draw an image of each tensor: its first axis downwards, all others flattened; a vector is one row.

    `norm` is as for :func:`~ikkuna.plot.images.features_2d`; ``None`` is each tensor's largest magnitude to either side of 0.
    """
    arrays = {name: to_array(value) for name, value in net.items()}
    if not arrays:
        raise ConfigError("there is nothing to draw: no tensor is selected")
    shown = {name: a.reshape(1, -1) if a.ndim < 2 else a.reshape(len(a), -1) for name, a in arrays.items()}
    style = Look.of(look)
    picture, axes = panels(style, len(shown), None, False, _size(len(shown)))
    for ax, (name, values) in zip(axes, shown.items(), strict=True):
        image = draw_image(
            ax, values, *limits("auto" if norm is None else norm, [values]), cmap, **style.config("plot")
        )
        picture.colorbar(image, ax=ax)
        ax.set_title(f"{name} {tuple(arrays[name].shape)}", fontsize=9)
        style.frame(ax)
    style.entitle(picture, "an image for each tensor, first axis down")
    picture.report({name: count_nonfinite(values) for name, values in shown.items()})
    save([picture], style.savepath, **style.config("save"))
    return picture  # type: ignore[no-any-return]  # made here, so a Picture


def _size(count: int) -> tuple[float, float]:
    side = min(3.0 + 2.0 * np.sqrt(count), 16.0)
    return float(side * 1.3), float(side)
