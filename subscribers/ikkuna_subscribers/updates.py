"""Metrics of an update in relation to the weight: ratios, angles, distances, decay."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages import MessageBatch, ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.geometry import (
    adam_decay,
    cosine,
    count_moved,
    decay_row,
    decoupled_decay,
    sgd_decay,
    squared_distance,
    squared_norm,
)
from ikkuna.support.modules import parameters_of
from ikkuna_subscribers._helpers import TensorCopies, require_parameter_kind


class UpdateSubscriber(PlotSubscriber):
    """A metric of each update and the weight before it; it keeps a copy of the weight during the step.

    Takes ``weights`` and ``weight_updates``; publishes `result`.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.
    """

    result = ""

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", self.result)
        super().__init__(["weights", "weight_updates"], **options)
        self._before: dict[str | None, Tensor] = {}

    @abstractmethod
    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the row of an update; `before` is a copy that may be overwritten."""

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Copy a weight, or return the row of its update."""
        if message.kind == "weights":
            self._before[message.series_name] = message.data.clone()
            return None
        before = self._before.pop(message.series_name, None)
        return None if before is None else self.measure_update(before, message.data)


class RatioSubscriber(PlotSubscriber):
    r"""The ratio of the L2 norms of two quantities of the same module, :math:`\lVert a \rVert_2 / \lVert b \rVert_2`.

    Takes two kinds with a tensor, or two results of other subscribers, of which it is the quotient itself.
    Publishes ``{dividend}_{divisor}_ratio``, without unit.  A divisor of 0 gives NaN.

    Look for: ``weight_updates`` over ``weights`` is near 1e-3 in a healthy run; below 1e-4 the learning rate is too small,
    above 1e-2 it is too large.

    Parameters
    ----------
    kinds : list of str
        The dividend and the divisor.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `kinds` are not two different kinds.

    Examples
    --------
    >>> RatioSubscriber(["weight_updates", "weights"]).publishes
    ('weight_updates_weights_ratio',)
    """

    quantity = Quantity(low=0.0, scale="log")
    fields = ("sumsq",)
    derived = True

    def __init__(self, kinds: Sequence[str], **options: Any) -> None:
        if isinstance(kinds, str) or len(kinds) != 2:
            given = [kinds] if isinstance(kinds, str) else list(kinds)
            raise ConfigError(
                f"RatioSubscriber needs 2 kinds (dividend, divisor), got {len(given)}: {', '.join(map(repr, given))}"
            )
        if kinds[0] == kinds[1]:
            raise ConfigError(f"RatioSubscriber needs two different kinds, got {list(kinds)}")
        options.setdefault("publishes", f"{kinds[0]}_{kinds[1]}_ratio")
        super().__init__(kinds, join=True, **options)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the ratios of all modules."""
        dividend, divisor = (
            each.data if isinstance(each.data, np.ndarray) else each.records.l2_norm for each in batch.parts.values()
        )
        with np.errstate(all="ignore"):
            self.emit_batch(batch, np.where(divisor != 0, dividend / divisor, math.nan), self.publishes[0])


class TrustRatioSubscriber(UpdateSubscriber):
    r"""The norm of a weight over the norm of its update, :math:`\lVert W_t \rVert_2 / \lVert W_t - W_{t-1} \rVert_2`.

    Takes ``weights`` and ``weight_updates``; publishes ``trust_ratio``, without unit, once for each weight.
    The weight is the one after the step.  The ratio is about the reciprocal of the ratio of updates to weights.
    A weight that did not change, or one with a NaN or Inf, has NaN.
    It keeps a copy of each weight during the step.

    Look for: about 1000 in a healthy run, with similar values in all layers; a layer far below the others limits the learning rate of all.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    References
    ----------
    Y. You, I. Gitman and B. Ginsburg, Large batch training of convolutional networks, 2017.

    Examples
    --------
    >>> TrustRatioSubscriber().publishes
    ('trust_ratio',)
    """

    quantity = Quantity(low=0.0, scale="log")
    result = "trust_ratio"

    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the squares of both norms, which can be summed over the parts of a weight."""
        is_wide = before.dtype.itemsize > 1  # torch has no arithmetic for fp8
        after = before.add_(update) if is_wide else before.float().add_(update.float())
        return torch.stack([squared_norm(after), squared_norm(update)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        weight, update = map(math.sqrt, message.data)
        self.emit(message, weight / update if update else math.nan)


class CosineSubscriber(PlotSubscriber):
    r"""The cosine of the angle between a tensor and its previous sample, :math:`\cos \angle(x_t, x_{t-1})`.

    The angle is :math:`2 \operatorname{atan2}(\lVert \hat a - \hat b \rVert, \lVert \hat a + \hat b \rVert)` with
    :math:`\hat a = a / \lVert a \rVert`, which is accurate for small angles as well.

    Takes weights, gradients, updates or states of the optimizer; publishes ``{kind}_cosine``, between -1 and 1, from the second sample on.
    A tensor of zeros, or one with a NaN or Inf, has NaN; after a change of shape, dtype or device the comparison starts again.
    It keeps a copy of every tensor it takes.

    Look for: gradients are near 0, updates near the momentum; towards -1 training oscillates and the learning rate is too large.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a module can have several tensors of this kind in a step.

    References
    ----------
    W. Kahan, How futile are mindless assessments of roundoff in floating-point computation?, 2006.

    Examples
    --------
    >>> CosineSubscriber("weight_updates").publishes
    ('weight_updates_cosine',)
    """

    quantity = Quantity(low=-1.0, high=1.0, scale="signed")
    merge = "last"
    needs_whole = True
    state = ("_previous",)

    def __init__(self, kind: str = "weight_gradients", **options: Any) -> None:
        require_parameter_kind("CosineSubscriber", kind)
        options.setdefault("publishes", f"{kind}_cosine")
        super().__init__(kind, **options)
        self._previous = TensorCopies()

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the cosine, and copy the tensor for the next sample."""
        previous = self._previous.find(message)
        self._previous.store(message)
        return None if previous is None else cosine(previous, message.data).reshape(1)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the cosine."""
        self.emit(message, message.data[0])


class EffectiveUpdateSubscriber(UpdateSubscriber):
    r"""The share of weights that a step changes after rounding to their dtype, :math:`\#\{i : w_i + u_i \ne w_i\} / n`.

    Without `dtype` it is the share of all elements of a weight that differ from their value before the step.
    With `dtype` it is the share of nonzero updates, :math:`u_i \ne 0`, that would change a weight stored in this dtype.

    Takes ``weights`` and ``weight_updates``; publishes ``effective_update_fraction``, between 0 and 1, once for each weight.
    It is NaN if no update is wanted.  It keeps a copy of each weight during the step.

    Look for: values near 1 in float32.  Bfloat16 has steps of 1/128 to 1/256 of a number, so a usual update of 1/1000 of a weight
    leaves four of five weights unchanged: keep the weights in float32, or use stochastic rounding.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The dtype in which weights are assumed to be stored.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `dtype` is not a floating dtype.

    Examples
    --------
    >>> EffectiveUpdateSubscriber(torch.bfloat16).publishes
    ('effective_update_fraction',)
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share", zero="bad", larger="good")
    result = "effective_update_fraction"

    def __init__(self, dtype: torch.dtype | None = None, **options: Any) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigTypeError(f"EffectiveUpdateSubscriber needs a floating torch.dtype, got {dtype!r}")
        super().__init__(**options)
        self.dtype = dtype

    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the numbers of changed weights and of weights with a nonzero update."""
        if self.dtype is not None:
            return count_moved(before, update, self.dtype)
        moved = torch.count_nonzero(update)
        return torch.stack([moved, torch.full_like(moved, update.numel())])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        moved, wanted = message.data
        self.emit(message, moved / wanted if wanted else math.nan)


class DistanceFromInitSubscriber(PlotSubscriber):
    r"""The distance of a weight from its first recorded value, :math:`\lVert W_t - W_0 \rVert_2`.

    The relative distance is this distance over :math:`\lVert W_0 \rVert_2`.

    Takes weights, biases or other kinds with one tensor per parameter and step.
    Publishes ``{kind}_distance_from_init``, in the unit of the weight, and ``{kind}_relative_distance``, without unit; both start at 0.
    A weight that was zero at first, as biases are, has a relative distance of NaN; a weight with a NaN or Inf has NaN for both.
    After a change of shape, dtype or device the measurement starts again.  It keeps a copy of every tensor it takes.

    Look for: growth like the logarithm or the square root of time; a jump is an instability,
    and a layer that stays near 0 while others move does not learn.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a module can have several tensors of this kind in a step.

    Examples
    --------
    >>> DistanceFromInitSubscriber().publishes
    ('weights_distance_from_init', 'weights_relative_distance')
    """

    quantity = Quantity(low=0.0, scale="log")
    state = ("_first",)

    def __init__(self, kind: str = "weights", **options: Any) -> None:
        require_parameter_kind("DistanceFromInitSubscriber", kind)
        name_results(options, f"{kind}_distance_from_init", f"{kind}_relative_distance")
        super().__init__(kind, **options)
        self._first = TensorCopies()

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the squares of the distance and of the initial norm, which can be summed over the parts of a weight."""
        first = self._first.find(message)
        if first is None:
            self._first.store(message)
            first = message.data
        return torch.stack([squared_distance(message.data, first), squared_norm(first)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit both distances."""
        distance, initial = map(math.sqrt, message.data)
        self.emit(message, distance, self.publishes[0])
        self.emit(message, distance / initial if initial else math.nan, self.publishes[1])


class WeightDecaySubscriber(UpdateSubscriber):
    r"""The share of an update that weight decay makes, :math:`\lVert d \rVert / (\lVert d \rVert + \lVert u - d \rVert)`.

    The update :math:`u` is that of the optimizer, and :math:`d` the part of it that weight decay causes,
    with the learning rate :math:`\eta` and the decay :math:`\lambda` of the parameter's group:

    - AdamW, and other optimizers with ``decoupled_weight_decay``: :math:`d = -\eta \lambda w`.
    - SGD: :math:`d = -\eta \lambda c\, w`; *c* is 1 without momentum, and :math:`(1 - \tau) / (1 - \mu)` with momentum :math:`\mu`
      and dampening :math:`\tau`.
    - Adam: :math:`d = -\eta \lambda w / (\sqrt{\hat v} + \epsilon)`, with its corrected second moment.

    The second and third formula assume that weights change little over the steps that the momentum averages.

    Takes ``weights`` and ``weight_updates``; publishes ``weight_decay_share``, between 0 and 1, once for each weight.
    A weight without decay, of another optimizer, or of several optimizers publishes nothing; an update of 0, such as that of a
    weight without gradient, a NaN or an Inf gives NaN.
    It keeps a copy of each weight during the step, and makes four passes over it.

    Look for: about 0 at the beginning; 1/2 is the equilibrium in which decay and gradient change a weight equally.
    Above 1/2 the weights shrink; a share near 1 means that the gradients have vanished and only decay is left.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    References
    ----------
    I. Loshchilov and F. Hutter, Decoupled weight decay regularization, 2019.
    A. Kosson, B. Messmer and M. Jaggi, Rotational equilibrium: how weight decay balances learning across neural networks, 2024.

    Examples
    --------
    >>> WeightDecaySubscriber().publishes
    ('weight_decay_share',)
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share")
    result = "weight_decay_share"
    reads_model = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._parameters: dict[str, nn.Parameter] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Copy a weight, or return the squares of both parts of its update, and the number of its changed elements."""
        if message.kind == "weights":
            return super().measure(message)
        before = self._before.pop(message.series_name, None)
        decay = None if before is None else self._decay(message.name, before)
        return None if decay is None or decay.shape != message.data.shape else decay_row(message.data, decay)

    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the row of an update without weight decay."""
        return decay_row(update, before.zero_())

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        decay, rest = map(math.sqrt, message.data[:2])
        self.emit(message, decay / (decay + rest) if message.data[2] and decay + rest else math.nan)

    def _decay(self, name: str, weight: Tensor) -> Tensor | None:
        """Return the part of weight decay; ``None`` if there is none, or if it is unknown."""
        parameter = self._parameter(name)
        owners = [
            (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if any(parameter is other for other in group["params"])
        ]
        if parameter is None or len(owners) != 1:
            return None
        optimizer, group = owners[0]
        return _part(optimizer, group, parameter, weight if weight.dtype.itemsize > 1 else weight.float())

    def _parameter(self, name: str) -> nn.Parameter | None:
        if name not in self._parameters:
            weights = (named for named in parameters_of(self.modules) if not named.is_bias)
            self._parameters = {named.name: named.parameter for named in weights}
        return self._parameters.get(name)


def _part(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, weight: Tensor) -> Tensor | None:
    decay, rate = group.get("weight_decay"), group.get("lr")
    if not isinstance(decay, float | int) or not decay or rate is None:
        return None
    if group.get("decoupled_weight_decay"):
        return decoupled_decay(weight, rate, decay)
    if isinstance(optimizer, SGD):
        return sgd_decay(weight, rate, decay, *(group[key] for key in ("momentum", "dampening", "nesterov")))
    if not isinstance(optimizer, Adam):
        return None
    state = optimizer.state.get(parameter, {})
    second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if not isinstance(second, Tensor) or second.shape != weight.shape:  # that of a sharded parameter
        return None
    return adam_decay(weight, rate, decay, second, state["step"], group["betas"][1], group["eps"])
