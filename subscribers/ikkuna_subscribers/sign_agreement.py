"""The agreement of the signs of gradient and momentum."""

import math
from typing import Any

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.agreement import sign_agreement, signs_of
from ikkuna.numerics.elements import readable

__all__ = ["SignAgreementSubscriber"]


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

    def __init__(self, field: str = "exp_avg", **options: Any) -> None:
        if not isinstance(field, str) or not field:
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
