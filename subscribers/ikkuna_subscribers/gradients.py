"""Metrics of gradients: noise scale, signal to noise, agreement of signs, clipping."""

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
from ikkuna.export.messages import MeasuredStep, Message, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.metrics.messages.kinds import MICRO_KINDS, PARAMETER_KINDS, UNCLIPPED_KINDS
from ikkuna.numerics.elements import readable
from ikkuna.numerics.geometry import dot, spread_elements, squared_norm
from ikkuna.numerics.noise import RunningNoise, gradient_snr, pairwise_noise_scale, sign_agreement, signs_of
from ikkuna_subscribers._helpers import SampleCount, require_integers

log = logging.getLogger("ikkuna")

SQUARES, COUNT, PRODUCTS, PAIRS, FIRST = range(5)
"""The positions in a row.  All are summed over micro-batches and ranks; on each rank one gradient is the first of a window."""

_GRADIENTS = ("weight_gradients", "bias_gradients")


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
    The terms belong to the loss without the factor of a gradient scaler.  Layers that mix samples, such as batch norm, bias it.

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

    quantity = Quantity(scale="log")
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
        kinds = (*MICRO_KINDS, *(_GRADIENTS if ranks else ()), *(("input_data",) if batch_size is None else ()))
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
        if (read := readable(message.data, magnitudes=False)) is None:
            return None
        gradient = read[0]
        square = squared_norm(gradient)
        if message.kind in _GRADIENTS:
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
        elif message.kind in _GRADIENTS:
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


@dataclass(slots=True)
class _Moments:
    """The mean and the sum of squared deviations of each element in a window so far."""

    stamp: Stamp
    mean: Tensor
    m2: Tensor
    count: int = 0

    def add(self, x: Tensor) -> None:
        self.count += 1
        deviation = x - self.mean
        self.mean.add_(deviation / self.count)
        self.m2.addcmul_(deviation, x - self.mean)


class GradientSNRSubscriber(PlotSubscriber):
    r"""The signal-to-noise ratio of a gradient, :math:`\bar g_j^2 / \operatorname{var}(g_j)`, averaged over its elements j.

    Mean and variance of each element are taken over a window of successive gradients.  If `window` is the number of micro-batches,
    this is one step; otherwise it covers several steps, between which the weights should change little.

    Takes ``weight_micro_gradients`` or another kind with one tensor per parameter at a time;
    publishes ``{kind}_snr``, without unit, at least 0, at the end of each window.
    If a step has several windows, the last one counts; of several ranks one counts, because each has its own micro-batches.
    Elements that never change are left out; if none is left, or if the window has a NaN or Inf, the value is NaN.
    For pure noise the mean is 1 / window or more, the median about half of that.
    After a change of shape, dtype or device a new window begins.  It keeps two copies of every tensor it takes.

    Look for: a fall over training, as the gradients of different samples cease to agree; a layer far below the others learns noise.

    Parameters
    ----------
    kind : str
        The kind to measure.
    window : int
        The number of gradients, at least 2.
    reduction : {'median', 'mean'}
        The average over elements; the ratio has heavy tails, so the median is more stable.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a number is out of range, or the reduction or the kind is not supported.

    References
    ----------
    J. Liu et al., Understanding why neural networks generalize well through GSNR of parameters, 2020.

    Examples
    --------
    >>> GradientSNRSubscriber(window=8).publishes
    ('weight_micro_gradients_snr',)
    """

    quantity = Quantity(low=0.0, scale="log", larger="good")
    merge = "last"
    state = ("_moments",)
    state_types = (_Moments,)

    def __init__(
        self, kind: str = "weight_micro_gradients", *, window: int = 16, reduction: str = "median", **options: Any
    ) -> None:
        if kind not in (known := (*MICRO_KINDS, *PARAMETER_KINDS)):
            raise ConfigError(f"GradientSNRSubscriber needs one of the kinds {', '.join(known)}; got {kind!r}")
        require_integers("GradientSNRSubscriber", 2, window=window)
        if reduction not in ("mean", "median"):
            raise ConfigError(f"GradientSNRSubscriber needs a reduction 'mean' or 'median', got {reduction!r}")
        options.setdefault("publishes", f"{kind}_snr")
        super().__init__(kind, **options)
        self.window = window
        self.reduction = reduction
        self._moments: dict[str | None, _Moments] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Add a gradient to the window; return the ratio if it is the last one of the window."""
        if (read := readable(message.data)) is None:
            return None
        moments = self._moments_for(message, read[0])
        moments.add(read[0])
        moments.stamp = message.stamp
        if moments.count < self.window:
            return None
        del self._moments[message.series_name]
        return gradient_snr(moments.mean, moments.m2, moments.count, self.reduction).reshape(1)

    def _moments_for(self, message: ModuleMessage, x: Tensor) -> _Moments:
        known = self._moments.get(message.series_name)
        dtype = torch.promote_types(x.dtype, torch.float32)
        fits = known is not None and (known.mean.shape, known.mean.dtype, known.mean.device) == (
            x.shape,
            dtype,
            x.device,
        )
        if known is None or not fits or (known.stamp == message.stamp and known.stamp is not message.stamp):
            zeros = torch.zeros(x.shape, dtype=dtype, device=x.device)  # a repeated step starts a new window
            known = self._moments[message.series_name] = _Moments(message.stamp, zeros, zeros.clone())
        return known

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        self.emit(message, message.data[0])


class SignAgreementSubscriber(PlotSubscriber):
    r"""The share of elements of which gradient and momentum have the same sign.

    It is :math:`\#\{g_i m_i > 0\} / \#\{g_i m_i \ne 0\}`.
    The momentum :math:`m` is the one after the step, which contains the gradient :math:`g` already.
    The share is the one of the elements that a cautious optimizer updates.

    Takes ``weight_gradients`` and ``weight_state_{field}``; publishes ``gradient_momentum_agreement``, between 0 and 1.
    An optimizer without such a field publishes nothing; without an element that is 0 in neither tensor, or with a NaN or Inf, it is NaN.
    It keeps the signs of each gradient during the step, one byte for each element.

    Look for: 1 in the first step, then a fall to 0.5 or a little more, as noise outweighs the gradient;
    values below 0.5 show that weights oscillate, and that the learning rate is too large.

    Parameters
    ----------
    field : str
        The key of the momentum in the optimizer's state: ``exp_avg`` of Adam, ``momentum_buffer`` of SGD.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `field` is not a name.

    References
    ----------
    K. Liang et al., Cautious optimizers: improving training with one line of code, 2024.

    Examples
    --------
    >>> SignAgreementSubscriber("momentum_buffer").publishes
    ('gradient_momentum_agreement',)
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share", larger="good")

    def __init__(self, field: str = "exp_avg", **options: Any) -> None:
        if not isinstance(field, str) or not field.isidentifier():
            raise ConfigError(f"SignAgreementSubscriber needs a field such as 'exp_avg', got {field!r}")
        options.setdefault("publishes", "gradient_momentum_agreement")
        super().__init__(["weight_gradients", f"weight_state_{field}"], **options)
        self._signs: dict[str | None, Tensor] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Store the signs of a gradient, or return the counts of its momentum."""
        read = readable(message.data)
        if read is None or read[1]:  # a sparse gradient has other elements than its momentum
            return None
        if message.kind == "weight_gradients":
            self._signs[message.series_name] = signs_of(read[0])
            return None
        known = self._signs.pop(message.series_name, None)
        return None if known is None or known.shape != read[0].shape else sign_agreement(known, read[0])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        same, counted = message.data
        self.emit(message, same / counted if counted else math.nan)


class ClippingSubscriber(PlotSubscriber):
    r"""The L2 norm of all gradients before clipping, and the share of steps whose gradients were clipped.

    A step is clipped if its norm after clipping is below :math:`1 - 10^{-4}` times the norm before.

    Takes ``weight_gradients_unclipped``, ``bias_gradients_unclipped``, ``weight_gradients`` and ``bias_gradients``.
    Publishes ``gradient_norm_unclipped`` in the unit of the gradients and ``clipped_share`` between 0 and 1, of the whole network,
    once a step; the share is that of the last `window` sampled steps.
    A NaN or Inf among the gradients makes the norm NaN, and the step does not count for the share.

    Look for: a share near 1, because then the threshold and not the learning rate determines the length of every step;
    spikes of the norm that clipping hides.

    Parameters
    ----------
    window : int
        The number of sampled steps over which the share is computed.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `window` is not a positive integer.

    Examples
    --------
    >>> ClippingSubscriber().publishes
    ('gradient_norm_unclipped', 'clipped_share')
    """

    quantity = (
        Quantity(low=0.0, scale="log"),
        Quantity(low=0.0, high=1.0, scale="share", larger="bad"),
    )
    fields = ("sumsq",)
    of_network = True
    state = ("_clipped",)

    def __init__(self, *, window: int = 100, **options: Any) -> None:
        require_integers("ClippingSubscriber", window=window)
        name_results(options, "gradient_norm_unclipped", "clipped_share")
        super().__init__((*UNCLIPPED_KINDS, *_GRADIENTS), **options)
        self.window = window
        self._clipped: list[bool] = []

    def compute_step(self, step: MeasuredStep) -> None:
        """Emit the norm before clipping, and the share of clipped steps."""
        norms: dict[bool, list[float]] = {True: [], False: []}
        for batch in step:
            norms[batch.kind in UNCLIPPED_KINDS] += batch.records.l2_norm.tolist()
        if not (norms[True] and norms[False]):
            return
        before, after = math.hypot(*norms[True]), math.hypot(*norms[False])
        norm_kind, share_kind = self.publishes
        message = NetworkMessage(step.stamp, norm_kind)
        self.emit(message, before, norm_kind)
        if math.isfinite(before):
            self._clipped = [*self._clipped, after < before * (1 - 1e-4)][-self.window :]
            self.emit(message, sum(self._clipped) / len(self._clipped), share_kind)


_SPREAD = 1024


class LossChangeBoundSubscriber(PlotSubscriber):
    r"""An upper bound on how much the movement of the weights since the last sample has changed the loss.

    .. math:: b_t = \sum_l \left\langle g_l(w_t), \; w_{l,t} - w_{l,s} \right\rangle

    with the gradients :math:`g_l` of the present batch before clipping, and the weights :math:`w_{l,s}` of the last sample.
    If the loss is convex between the two samples, :math:`L(w_t) - L(w_s) \le b_t`: a fixed function of the weights cannot have risen by
    more.  The sum of the bounds over a training is compared with the rise of the loss.  A rise that exceeds it was not made by the steps:
    the labels, the data, or the weights of another model have changed, as in reinforcement learning, in a game, or with a teacher.

    Takes ``weight_gradients_unclipped``, ``bias_gradients_unclipped``, ``weights`` and ``biases``.
    Publishes ``loss_change_bound`` of the whole network, in the unit of the loss, from the second sample on.
    It is NaN if an element is NaN or Inf.  A sum over 1,024 elements of a tensor, at equal distances, stands for that over all of them;
    the subscriber keeps a copy of these elements.  Sparse gradients, and optimizers that evaluate a closure, are left out.

    Look for: positive values, which show steps that are too long.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> LossChangeBoundSubscriber().publishes
    ('loss_change_bound',)
    """

    quantity = Quantity(scale="signed", larger="bad")
    merge = "last"
    of_network = True
    needs_whole = True
    state = ("_before",)

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "loss_change_bound")
        super().__init__((*UNCLIPPED_KINDS, "weights", "biases"), **options)
        self._before: dict[tuple[str, str | None], Tensor] = {}
        self._gradients: dict[tuple[str, str | None], tuple[int, Tensor]] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Store elements of a gradient, or return the bound of the weight that it belongs to."""
        found = spread_elements(message.data, _SPREAD)
        if found is None:
            return None
        key = "bias" if message.kind.startswith("bias") else "weight", message.series_name
        if message.kind in UNCLIPPED_KINDS:
            self._gradients[key] = message.global_step, found
            return None
        step, gradient = self._gradients.pop(key, (-1, found))
        if step != message.global_step or gradient.shape != found.shape:
            return None
        before, self._before[key] = self._before.get(key), found
        if before is None or (before.shape, before.device) != (found.shape, found.device):
            return None
        size: int = message.data.numel()
        return (gradient * (found - before)).sum().reshape(1) * (size / max(len(found), 1))

    def compute_step(self, step: MeasuredStep) -> None:
        """Emit the bound of the whole network."""
        bounds = [float(row[0]) for batch in step for row in batch.data or ()]
        if bounds:
            self.emit(NetworkMessage(step.stamp, self.publishes[0]), math.fsum(bounds))
