"""The share of an update that weight decay makes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ikkuna.export.messages import ModuleMessage
from ikkuna.modules import parameters_of
from ikkuna.numerics.decay import adam_decay, decay_row, decoupled_decay, sgd_decay
from ikkuna_subscribers._helpers.update_subscriber import UpdateSubscriber

__all__ = ["WeightDecaySubscriber"]


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
    A weight without decay, of another optimizer, or of several optimizers publishes nothing; an update of 0, a NaN or an Inf gives NaN.
    It keeps a copy of each weight during the step, and makes three passes over it.

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

    needs_model = True

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "weight_decay_share")
        super().__init__(**options)
        self._parameters: dict[str, nn.Parameter] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Copy a weight, or return the squares of both parts of its update."""
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
        decay, rest = map(math.sqrt, message.data)
        self.emit(message, decay / (decay + rest) if decay + rest else math.nan)

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
