"""The gradient of recurrent layers at single timesteps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna_subscribers._helpers.recurrent_layers import RecurrentLayers

__all__ = ["TIMESTEPS", "TimestepGradientSubscriber"]

TIMESTEPS = (-1, -2, -4, -8, -16, -32, -64, -128)
"""The default timesteps: powers of 2 from the last one back."""

_SMALL = 0.01


class TimestepGradientSubscriber(PlotSubscriber):
    r"""The gradient with respect to the output of a layer at single timesteps, and the share of timesteps it reaches.

    For the timestep t it is :math:`g_t = \sqrt{\sum_{n, c} (\partial L / \partial y_{n t c})^2}` over samples and channels;
    the reach is the share of timesteps with :math:`g_t \ge \max_s g_s / 100`.

    Takes ``layer_gradients``; publishes ``layer_gradients_timestep_norm2``, in the unit of the gradient, with a series for each timestep
    (``lstm.t-1`` for the last one), and ``layer_gradients_timestep_reach``, between 0 and 1.
    Over several calls and micro-batches norms are those of all elements together, and the reach is the mean.
    It measures the first output of recurrent layers, or of the modules in ``modules=``, if it has a batch, timesteps and channels;
    the output of a recurrent layer may also have no batch.  A timestep that no sequence has publishes nothing.
    In a packed sequence, negative timesteps count from the end of each sequence, and so does the reach;
    packed sequences are measured only if the layer is not compiled.
    A gradient that is 0 everywhere has reach NaN; one with a NaN or Inf has NaN.

    Look for: whether the network learns long-term dependencies.  If ``t-64`` is orders of magnitude below ``t-1``, the network learns
    nothing from inputs 64 steps ago.  If the loss uses only the last output, its gradient exists at that one timestep:
    then measure the layer below (``modules="embedding"``), whose gradient has passed through time.

    Parameters
    ----------
    timesteps : sequence of int
        The timesteps, from 0 at the beginning or, if negative, from the end as in Python.
    batch_first : bool
        As for the layer: whether its output is (batch, time, channel) in place of (time, batch, channel).
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `timesteps` is empty, has an element that is not an int, or has a timestep twice.

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
        """Return sums of squares by timestep, numbers of calls with that timestep, the sum of reaches and the number of calls."""
        if not message.data.numel() or message.path or not self._is_wanted(message.module):
            return None
        if (squares := self._squares(message)) is None:
            return None
        forward, backward = (torch.where(torch.isfinite(s), s, math.nan) for s in squares)
        length = len(forward)
        there = [-length <= t < length for t in self.timesteps]
        picked = [
            (forward if t >= 0 else backward)[t] if has else torch.zeros_like(forward[0])
            for t, has in zip(self.timesteps, there, strict=True)
        ]
        reach = (backward >= backward.max() * _SMALL**2).double().mean()
        reach = torch.where(backward.max() > 0, reach, math.nan)
        one, none = torch.ones_like(reach), torch.zeros_like(reach)  # created on the device of the data, without a copy
        return torch.stack([*picked, *(one if has else none for has in there), reach, one])

    def _squares(self, message: Any) -> tuple[Tensor, Tensor] | None:
        """Return sums of squares by timestep, ``(T,)``, once counted from the start of each sequence and once from its end."""
        x = message.data
        if (read := readable(x)) is None:
            return None
        sizes = getattr(x, "batch_sizes", None)
        squares = read[0].double().square()
        if sizes is not None:
            rows = squares.flatten(1).sum(1)
            forward, backward = (at.to(rows.device, non_blocking=True) for at in _timesteps_of_rows(sizes))
            none = rows.new_zeros(len(sizes))
            return none.index_add(0, forward, rows), none.index_add(0, backward, rows)
        if x.ndim == 3:
            summed = squares.sum((0, 2) if self.batch_first else (1, 2))
        elif x.ndim == 2 and self._layers.is_sequential(message.module):
            summed = squares.sum(1)
        else:
            return None
        return summed, summed

    def _is_wanted(self, module: str) -> bool:
        return self._takes_any or self._layers.is_recurrent(module)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the norms and the reach."""
        norm, reach = self.publishes
        squares, counts = message.data[:-2].reshape(2, -1)
        total, calls = message.data[-2:]
        for timestep, square, count in zip(self.timesteps, squares, counts, strict=True):
            if count:
                part = replace(message, path=f"t{timestep}", name=f"{message.name}.t{timestep}")
                self.emit(part, math.sqrt(square), norm)
        self.emit(message, total / calls, reach)


def _timesteps_of_rows(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the timestep of each row of a packed sequence, counted from the start and aligned at the end.

    Parameters
    ----------
    sizes : Tensor
        ``(T,)``, the number of sequences at each timestep, the longest sequences first.

    Examples
    --------
    >>> forward, backward = _timesteps_of_rows(torch.tensor([2, 1, 1]))     # lengths 3 and 1
    >>> forward.tolist(), backward.tolist()
    ([0, 0, 1, 2], [0, 2, 1, 2])
    """
    forward = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
    sequence = torch.arange(len(forward), device="cpu") - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    lengths = (sizes > torch.arange(int(sizes[0]), device="cpu").unsqueeze(1)).sum(1)
    return forward, forward + len(sizes) - lengths[sequence]
