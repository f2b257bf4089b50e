"""Measures of channels and gradients: NaN, dead, exploding and correlated channels, vanishing gradients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError

__all__ = ["ChannelHealth", "Vanishing", "channel_correlation", "channel_health", "detect_nans", "vanishing"]


def detect_nans(data: Any, include_inf: bool = True) -> str | None:
    """Return the share of NaN (and infinite) elements as text, or ``None`` if there are none.

    A share below 0.1 % is given as a count.

    Parameters
    ----------
    data : Tensor, ndarray or list
        The elements to count.
    include_inf : bool
        Count infinite elements too.

    Examples
    --------
    >>> detect_nans([float("nan"), float("inf"), -float("inf"), 0.0])
    '25.0% NaN, 50.0% Inf'
    """
    values = to_array(data)
    counts = {"NaN": int(np.isnan(values).sum()), "Inf": int(np.isinf(values).sum()) if include_inf else 0}
    shares = [_share(count, values.size, word) for word, count in counts.items() if count]
    return ", ".join(shares) or None


def _share(count: int, total: int, word: str) -> str:
    percent = 100 * count / total
    return f"{percent:.1f}% {word}" if percent >= 0.1 else f"{count} of {total} {word}"


@dataclass(frozen=True)
class ChannelHealth:
    """The dead and the exploding channels of a layer.

    Parameters
    ----------
    channels : int
        Number of channels.
    dead : tuple of int
        Positions of the channels whose magnitude never exceeds the lower limit.
    exploding : tuple of int
        Positions of the channels that exceed the upper limit or contain NaN or infinite elements.
    """

    channels: int
    dead: tuple[int, ...]
    exploding: tuple[int, ...]

    @property
    def dead_fraction(self) -> float:
        """Share of dead channels; NaN if there are no channels."""
        return len(self.dead) / self.channels if self.channels else float("nan")

    @property
    def exploding_fraction(self) -> float:
        """Share of exploding channels; NaN if there are no channels."""
        return len(self.exploding) / self.channels if self.channels else float("nan")


def channel_health(x: Any, dead: float = 1e-8, exploding: float = 1e3, channel_axis: int = -1) -> ChannelHealth:
    """Return which channels of `x` are dead or exploding.

    Parameters
    ----------
    x : Tensor or ndarray
        Outputs or gradients, such as (sample, time, channel).
    dead, exploding : float
        The limits of the magnitude.
    channel_axis : int
        The channel axis; 1 for convolutions.

    Examples
    --------
    >>> channel_health([[0.0, 1.0, 5e3], [0.0, 2.0, 1.0]])
    ChannelHealth(channels=3, dead=(0,), exploding=(2,))
    """
    channels = _by_channel(x, channel_axis)
    largest = np.abs(channels).max(axis=1, initial=0.0)
    known = np.isfinite(largest)
    dead_at = np.flatnonzero(known & (largest <= dead) & (channels.shape[1] > 0))
    return ChannelHealth(
        channels.shape[0], tuple(map(int, dead_at)), tuple(map(int, np.flatnonzero(~known | (largest > exploding))))
    )


def channel_correlation(x: Any, channel_axis: int = -1) -> Tensor:
    """Return Pearson's correlation of every two channels over all samples and steps: (channel, channel).

    Values near 0 off the diagonal mean independent channels; values near ±1 mean redundant channels.
    The correlation of a constant channel is NaN.

    Parameters
    ----------
    x : Tensor or ndarray
        Outputs or gradients, such as (sample, time, channel).
    channel_axis : int
        The channel axis.

    Examples
    --------
    >>> channel_correlation([[0.0, 0.0], [1.0, -2.0], [2.0, -4.0]])
    tensor([[ 1.0000, -1.0000],
            [-1.0000,  1.0000]], dtype=torch.float64)
    """
    channels = _by_channel(x, channel_axis)
    if channels.shape[1] < 2:
        raise ConfigError(f"a correlation needs at least 2 values in each channel, got {channels.shape[1]}")
    centered = channels - channels.mean(axis=1, keepdims=True)
    lengths = np.sqrt((centered * centered).sum(axis=1))
    lengths[lengths == 0] = np.nan
    unit = centered / lengths[:, None]
    return torch.from_numpy(np.clip(unit @ unit.T, -1, 1))


def _by_channel(x: Any, channel_axis: int) -> NDArray[np.float64]:
    values = to_array(x)
    if not -values.ndim <= channel_axis < values.ndim:
        raise ConfigError(f"channel_axis {channel_axis} does not exist in data of shape {values.shape}")
    moved = np.moveaxis(values, channel_axis, 0)
    return moved.reshape(moved.shape[0], -1)


@dataclass(frozen=True)
class Vanishing:
    """The decay of a gradient over time steps.

    Parameters
    ----------
    below : float
        Share of the steps whose largest magnitude is below the limit.
    zero : float
        Share of the steps that are exactly 0.
    norms : tuple of float
        (time,), the L2 norm of the gradient at each step.
    """

    below: float
    zero: float
    norms: tuple[float, ...]


def vanishing(gradients: Any, limit: float = 1e-8) -> Vanishing:
    """Return the share of time steps that a gradient does not reach.

    Parameters
    ----------
    gradients : Tensor or ndarray
        (sample, time, channel), (time, channel) or (time,).
    limit : float
        A step whose largest magnitude is below this limit counts as not reached.

    Examples
    --------
    >>> result = vanishing([0.5 ** (99 - t) for t in range(100)])
    >>> result.below, result.zero
    (0.73, 0.0)
    """
    values = to_array(gradients)
    if not 1 <= values.ndim <= 3 or not values.size:
        raise ConfigError(f"expected gradients (sample, time, channel), (time, channel) or (time,), got {values.shape}")
    steps = np.moveaxis(values, 1, 0) if values.ndim == 3 else values
    steps = steps.reshape(steps.shape[0], -1)
    largest = np.abs(steps).max(axis=1)
    norms = np.sqrt((steps * steps).sum(axis=1))
    return Vanishing(float((largest < limit).mean()), float((largest == 0).mean()), tuple(map(float, norms)))
