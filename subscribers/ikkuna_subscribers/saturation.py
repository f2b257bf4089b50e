"""The share of saturated elements of an activation function."""

import math
from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.activation import count_saturated, saturation_threshold

__all__ = ["SaturationSubscriber"]


class SaturationSubscriber(PlotSubscriber):
    r"""The share of elements for which the slope of tanh or sigmoid is below *t*.

    For outputs: :math:`|y| > \sqrt{1 - t}` for tanh, :math:`|y - \tfrac 1 2| > \sqrt{\tfrac 1 4 - t}` for sigmoid;
    for inputs, with ``of="input"``: :math:`|x| > \operatorname{arcosh} t^{-1/2}` or :math:`\operatorname{arcosh}(1/2t - 1)`.

    Takes any kind with a tensor; choose the layers with `modules`.  Publishes ``{kind}_saturation``, between 0 and 1.
    Over several calls and micro-batches it is the share of all elements together.
    NaN elements are left out, infinite ones are saturated; without an element it is NaN.

    Look for: above one half almost no gradient passes the layer; a layer that saturates from the start has too large initial weights.

    Parameters
    ----------
    kind : str
        The kind to measure.
    function : {'tanh', 'sigmoid'}
        The activation function of the layers.
    slope : float
        The derivative below which an element is saturated; the largest derivative is 1 for tanh and 1/4 for sigmoid.
    of : {'output', 'input'}
        Whether `kind` is the output or the input of the function.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the function is unknown, or the slope is out of range.

    Examples
    --------
    >>> SaturationSubscriber("activations", "tanh", modules="*tanh*").publishes
    ('activations_saturation',)
    """

    def __init__(
        self,
        kind: str = "activations",
        function: str = "tanh",
        *,
        slope: float = 0.05,
        of: str = "output",
        **options: Any,
    ) -> None:
        saturation_threshold(function, slope, of)
        options.setdefault("publishes", f"{kind}_saturation")
        super().__init__(kind, **options)
        self.function = function
        self.slope = slope
        self.of = of

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the numbers of saturated and of all elements."""
        return count_saturated(message.data, self.function, self.slope, self.of)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        saturated, n = message.data
        self.emit(message, saturated / n if n else math.nan)
