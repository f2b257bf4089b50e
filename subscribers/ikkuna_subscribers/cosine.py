"""The angle between successive gradients or updates."""

from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.geometry import cosine
from ikkuna_subscribers._helpers.tensor_copies import TensorCopies, require_parameter_kind

__all__ = ["CosineSubscriber"]


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
