"""The batch size at which gradient noise equals the gradient."""

import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Message, NetworkMessage, Stamp
from ikkuna.export.messages.kinds import MICRO_KINDS
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.inner import dot, squared_norm
from ikkuna.numerics.noise import RunningNoise, pairwise_noise_scale
from ikkuna_subscribers._helpers.arguments import require_integers
from ikkuna_subscribers._helpers.sample_count import SampleCount

__all__ = ["GradientNoiseScaleSubscriber"]

log = logging.getLogger("ikkuna")

SQUARES, COUNT, PRODUCTS, PAIRS, FIRST = range(5)
"""The positions in a row.  All are summed over micro-batches and ranks; on each rank one gradient is the first of a window."""

_REDUCED = ("weight_gradients", "bias_gradients")


@dataclass(slots=True)
class _Total:
    """The sum of the gradients of one parameter in a window so far."""

    window: int
    stamp: Stamp
    value: Tensor
    count: int = 1


class GradientNoiseScaleSubscriber(PlotSubscriber):
    r"""The batch size at which gradient noise is as large as the gradient, :math:`B = \operatorname{tr} \Sigma / |G|^2`.

    With :math:`g_i` the mean gradient of micro-batch i of b samples, :math:`|G|^2` is the mean of
    :math:`\langle g_i, g_j \rangle` over pairs of micro-batches, and :math:`\operatorname{tr} \Sigma = b \, (E |g_i|^2 - |G|^2)`.
    Both terms are unbiased.  They are averaged over steps before they are divided, because the mean of ratios is wrong by a factor.
    Without gradient accumulation a step has one gradient, and no pair.
    Then use a window of several `steps` in place of one, over which the weights should change little,
    or, with several data-parallel ranks, let `ranks` be the micro-batches.

    Takes ``weight_micro_gradients`` and ``bias_micro_gradients``, and the number of samples from ``input_data``,
    with `ranks` also ``weight_gradients`` and ``bias_gradients``, unclipped, whose squares give the products between ranks;
    publishes ``gradient_noise_scale``, in samples.
    It also publishes its terms ``gradient_covariance_trace`` and ``gradient_square``, in the square of the unit of the gradient,
    and the flag ``noise_hides_gradient``, which is 1 if the mean of :math:`|G|^2` is not positive, else 0.
    If it is 1 the scale is NaN: average over more steps, or accumulate more micro-batches.
    All are published once for each window, for the whole network.
    They are NaN if a window has one gradient (the log warns once) and before the first window without a NaN or Inf;
    later windows with a NaN or Inf are left out.

    Gradients are those before clipping, and on each rank those before they are averaged.
    Each backward pass counts as one micro-batch; all must have the same size.
    The terms belong to the loss that is differentiated: a gradient scaler multiplies them by the square of its scale,
    and leaves the noise scale unchanged.  Layers that mix samples, such as batch norm, bias it.

    It keeps a sum of the gradients of each parameter during a window, and costs two passes over each gradient.

    Look for: growth over training.  A batch far below the noise scale can be enlarged with almost no loss of data efficiency;
    a batch far above it wastes computation.

    Parameters
    ----------
    batch_size : float, optional
        The samples (or tokens, for the noise of a token) in a micro-batch; by default counted from ``input_data``.
    steps : int
        The number of sampled steps in a window.
    ranks : bool
        Whether micro-batches of different ranks form pairs too; only with one step in a window.
    beta : float
        The coefficient of the running means, in [0, 1): they average over about ``1 / (1 - beta)`` windows.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a number is out of range, or `ranks` is combined with more than one step.

    References
    ----------
    S. McCandlish et al., An empirical model of large-batch training, 2018.

    Examples
    --------
    >>> GradientNoiseScaleSubscriber(steps=2).publishes
    ('gradient_noise_scale', 'gradient_covariance_trace', 'gradient_square', 'noise_hides_gradient')
    """

    of_network = True
    state = ("_noise", "_totals", "_sizes", "_rows")
    state_types = (_Total,)

    def __init__(
        self,
        batch_size: float | None = None,
        *,
        steps: int = 1,
        ranks: bool = False,
        beta: float = 0.99,
        **options: Any,
    ) -> None:
        if batch_size is not None and not 0 < batch_size < math.inf:
            raise ConfigError(f"GradientNoiseScaleSubscriber needs batch_size > 0 in samples, got {batch_size!r}")
        require_integers("GradientNoiseScaleSubscriber", steps=steps)
        if ranks and steps > 1:
            raise ConfigError(f"GradientNoiseScaleSubscriber takes ranks=True or steps > 1, got both ({steps=})")
        names = ("gradient_noise_scale", "gradient_covariance_trace", "gradient_square", "noise_hides_gradient")
        name_results(options, *names)
        kinds = (*MICRO_KINDS, *(_REDUCED if ranks else ()), *(("input_data",) if batch_size is None else ()))
        super().__init__(kinds, **options)
        self.ranks = ranks
        self.batch_size = batch_size
        self.steps = steps
        self._noise = RunningNoise(beta)
        self._totals: dict[tuple[str, str | None], _Total] = {}
        self._samples = SampleCount()
        self._sizes: list[tuple[float, float]] = []
        self._rows: defaultdict[tuple[str, str | None], NDArray[np.float64]] = defaultdict(lambda: np.zeros(5))
        self._reduced = 0.0
        self._warned = False

    def measure(self, message: Any) -> Tensor | None:
        """Return a row of the positions `SQUARES` to `FIRST` for one gradient.

        These are its square, 1, its product with the sum of the gradients before it, their number, and 1 if there are none.
        """
        if message.kind == "input_data":
            return self._samples.measure(message)
        if (read := readable(message.data)) is None:
            return None
        gradient = read[0]
        square = squared_norm(gradient)
        if message.kind in _REDUCED:
            return square.reshape(1)
        before = self._take_total(message, gradient)
        product = torch.zeros_like(square) if before is None else dot(before.value, gradient)
        pairs = torch.full_like(square, 0 if before is None else before.count)
        self._add(message, gradient, before)
        first = torch.full_like(square, before is None)
        return torch.stack([square, torch.ones_like(square), product, pairs, first])

    def _take_total(self, message: Message, gradient: Tensor) -> _Total | None:
        known = self._totals.get((message.kind, message.series_name))
        if known is None or known.window != self._window(message.stamp) or known.value.shape != gradient.shape:
            return None
        is_repeated = known.stamp == message.stamp and known.stamp is not message.stamp
        return None if is_repeated or known.value.device != gradient.device else known

    def _add(self, message: Message, gradient: Tensor, before: _Total | None) -> None:
        if before is None:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            total = _Total(self._window(message.stamp), message.stamp, wide)
            self._totals[message.kind, message.series_name] = total
        else:
            before.value.add_(gradient)
            before.count += 1
            before.stamp = message.stamp

    def _window(self, stamp: Stamp) -> int:
        return stamp.global_step // self.subscription.subsample // self.steps

    def compute(self, message: Any) -> None:
        """Add the rows until the window is over."""
        if message.kind == "input_data":
            self._samples.add(message)
        elif message.kind in _REDUCED:
            self._reduced += message.data.item()
        else:
            self._rows[message.kind, message.series_name] += message.data

    def abandon(self, stamp: Stamp) -> None:
        """Forget the window of a step of which some rows are missing."""
        self._samples.take()
        self._totals, self._sizes, self._reduced = {}, [], 0.0
        self._rows.clear()

    def finish(self, stamp: Stamp) -> None:
        """Emit the scale, its terms and the flag, if this is the last step of a window."""
        self._sizes.append(self._samples.take())
        if (stamp.global_step // self.subscription.subsample + 1) % self.steps:
            return
        self._totals = {key: total for key, total in self._totals.items() if total.window > self._window(stamp)}
        rows, self._rows = np.array(list(self._rows.values())).reshape(-1, 5).T, defaultdict(lambda: np.zeros(5))
        sizes, self._sizes = self._sizes, []
        reduced, self._reduced = self._reduced, 0.0
        if not rows.size:
            return
        # The loss of a micro-batch is divided by their number, so that their gradients add up to the mean.
        count = rows[COUNT].max()
        divisor = count / len(sizes) / max(rows[FIRST].max(), 1.0)
        square = divisor**2 * (rows[SQUARES] / rows[COUNT]).sum()
        product = divisor**2 * (rows[PRODUCTS] / rows[PAIRS]).sum()
        if (
            self.ranks
        ):  # for the mean g of n gradients, n² |g|² is the sum of all squares plus twice the sum of all products
            product = (count * reduced - square) / (count - 1.0)
        if count == 1 or not (self.ranks or rows[PAIRS].any()):
            self._warn()
        self._noise.update(pairwise_noise_scale(square, product, self._batch(sizes)))
        self._emit_all(NetworkMessage(stamp, self.publishes[0]))

    def _batch(self, sizes: list[tuple[float, float]]) -> float:
        if self.batch_size is not None:
            return self.batch_size
        samples, calls = (sum(numbers) for numbers in zip(*sizes, strict=True))
        return samples / calls if calls else math.nan

    def _emit_all(self, message: NetworkMessage) -> None:
        noise = self._noise.value
        hidden = math.nan if math.isnan(noise.grad_sq) else float(noise.grad_sq <= 0)
        values = (noise.noise_scale, noise.trace, noise.grad_sq, hidden)
        for kind, value in zip(self.publishes, values, strict=True):
            self.emit(message, value, kind)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "GradientNoiseScaleSubscriber has one gradient in a window and needs two; accumulate micro-batches, "
                "set steps=2, or with several ranks set ranks=True"
            )
