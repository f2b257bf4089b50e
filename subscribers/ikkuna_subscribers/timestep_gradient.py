"""How far back in time the gradient reaches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna_subscribers.naming import name_results
from ikkuna_subscribers.recurrent import RecurrentLayers

__all__ = ["TIMESTEPS", "TimestepGradientSubscriber"]

TIMESTEPS = (-1, -2, -4, -8, -16, -32, -64, -128)
"""From the last one back, each twice as far as the one before."""

_SMALL = 0.01


class TimestepGradientSubscriber(PlotSubscriber):
    r"""The gradient of the loss with respect to what a layer returned at single timesteps, and how many of them it reaches.

    For the timestep t it is :math:`g_t = \sqrt{\sum_{n, c} (\partial L / \partial y_{n t c})^2}` over samples and channels;
    the reach is the share of timesteps with :math:`g_t \ge \max_s g_s / 100`.

    Takes ``layer_gradients``; publishes ``layer_gradients_timestep_norm2``, in the unit of the gradient, with a series for each timestep
    (``lstm.t-1`` for the last one), and ``layer_gradients_timestep_reach``, between 0 and 1.
    Over several calls and micro-batches norms are those of all elements together, and the reach is the mean.
    Looks at the first output of recurrent layers, or of the modules given, if that has a batch, timesteps and channels;
    packed and unbatched sequences publish nothing, nor does a timestep that a sequence does not have.
    A gradient that is 0 everywhere has no reach, it is NaN; one with a NaN or Inf has NaN.

    Look for: does the network learn long-term dependencies?  If ``t-64`` lies orders of magnitude below ``t-1``, what was 64 steps ago
    teaches nothing.  A loss of the last output alone is the gradient of that one timestep:
    then look at the layer below (``modules="embedding"``), whose gradient has travelled through time.

    Parameters
    ----------
    timesteps : sequence of int
        Which ones, from 0 at the beginning or, negative, from the end as in Python.
    batch_first : bool
        As for the layer: its output is (batch, time, channel) rather than (time, batch, channel).
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `timesteps` are none, no whole numbers or the same.

    Examples
    --------
    >>> TimestepGradientSubscriber(batch_first=True, subsample=10).publishes
    ('layer_gradients_timestep_norm2', 'layer_gradients_timestep_reach')
    """

    def __init__(self, timesteps: Sequence[int] = TIMESTEPS, *, batch_first: bool = False, **options: Any) -> None:
        if not timesteps or any(type(t) is not int for t in timesteps):
            raise ConfigError(f"TimestepGradientSubscriber needs timesteps such as (0, -1), got {timesteps!r}")
        if len(set(timesteps)) < len(timesteps):
            raise ConfigError(
                f"TimestepGradientSubscriber needs timesteps that differ from each other, got {timesteps!r}"
            )
        name_results(options, "layer_gradients_timestep_norm2", "layer_gradients_timestep_reach")
        super().__init__("layer_gradients", **options)
        self.timesteps = tuple(timesteps)
        self.batch_first = batch_first
        self._takes_any = options.get("modules") is not None
        self._layers = RecurrentLayers(lambda: self.network)

    def measure(self, message: Any) -> Tensor | None:
        """Return sums of squares by timestep, how many calls have that timestep, the sum of reaches and the number of calls."""
        x = message.data
        if x.ndim != 3 or not x.numel() or message.path or not self._is_wanted(message.module):
            return None
        squares = x.double().square().sum((0, 2) if self.batch_first else (1, 2))
        squares = torch.where(torch.isfinite(squares), squares, math.nan)
        length = len(squares)
        there = [-length <= t < length for t in self.timesteps]
        picked = [
            squares[t] if has else torch.zeros_like(squares[0]) for t, has in zip(self.timesteps, there, strict=True)
        ]
        reach = (squares >= squares.max() * _SMALL**2).double().mean()
        reach = torch.where(squares.max() > 0, reach, math.nan)
        one, none = torch.ones_like(reach), torch.zeros_like(reach)  # made where the data is: nothing is copied there
        return torch.stack([*picked, *(one if has else none for has in there), reach, one])

    def _is_wanted(self, module: str) -> bool:
        return self._takes_any or self._layers.is_recurrent(module)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the norms, and the reach."""
        norm, reach = self.publishes
        squares, counts = message.data[:-2].reshape(2, -1)
        total, calls = message.data[-2:]
        for timestep, square, count in zip(self.timesteps, squares, counts, strict=True):
            if count:
                part = replace(message, path=f"t{timestep}", name=f"{message.name}.t{timestep}")
                self.emit(part, math.sqrt(square), norm)
        self.emit(message, total / calls, reach)
