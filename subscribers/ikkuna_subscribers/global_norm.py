"""The norm of a quantity over the whole network."""

import math
from collections.abc import Iterable
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MessageBatch, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["GlobalNormSubscriber"]


class GlobalNormSubscriber(PlotSubscriber):
    r"""The L2 norm of a quantity over all modules together, :math:`\sqrt{\sum_l \lVert x_l \rVert_2^2}`.

    Takes one or several kinds with a tensor, and results of other subscribers, of which the square is summed.
    Publishes ``{kind}_global_norm`` of the whole network once a step, in the unit of x; several kinds are published under their common
    last word, or under their names joined by ``_``.
    A parameter shared by several modules counts once.  One NaN or Inf makes the norm NaN, unless `finite_only` is set.
    A step without a message publishes nothing.

    The norm that ``clip_grad_norm_`` clips is that of ``["weight_gradients", "bias_gradients"]``.
    Gradients are measured after clipping, so a curve at the threshold means that every step is clipped.

    Look for: jumps to ten times the usual value, which precede a loss spike; a slow fall to 0.

    Parameters
    ----------
    kinds : str or list of str
        The kinds to measure.
    finite_only : bool
        Whether NaN and infinite elements are left out.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `kinds` is empty.

    Examples
    --------
    >>> GlobalNormSubscriber(["weight_gradients", "bias_gradients"]).publishes
    ('gradients_global_norm',)
    """

    fields = ("sumsq",)
    derived = True
    of_network = True

    def __init__(
        self,
        kinds: str | Iterable[str] = ("weight_gradients", "bias_gradients"),
        *,
        finite_only: bool = False,
        **options: Any,
    ) -> None:
        names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not names:
            raise ConfigError("GlobalNormSubscriber needs at least one kind, got an empty list")
        options.setdefault("publishes", f"{_common_name(names)}_global_norm")
        super().__init__(names, **options)
        self.finite_only = finite_only
        self._norms: list[float] = []

    def compute(self, message: ModuleMessage) -> None:
        """Store the norm of one tensor until the step is over."""
        assert message.record is not None
        self._norms.append(message.record.l2_norm)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Store the norms of all tensors of a kind until the step is over."""
        self._norms += batch.records.l2_norm.tolist()

    def finish(self, stamp: Stamp) -> None:
        """Emit the norm of all tensors of the step."""
        norms, self._norms = self._norms, []
        if norms:
            self.emit(NetworkMessage(stamp, self.publishes[0]), math.hypot(*norms))


def _common_name(names: tuple[str, ...]) -> str:
    words = {str(name).rsplit("_", 1)[-1] for name in names}
    return words.pop() if len(words) == 1 < len(names) else "_".join(map(str, names))
