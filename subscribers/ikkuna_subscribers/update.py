"""What metrics of an update have in common that need the weight it was made to."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["UpdateSubscriber"]


class UpdateSubscriber(PlotSubscriber):
    """Sees each update of a weight together with the weight before it, of which it keeps a copy during the step.

    Takes ``weights`` and ``weight_updates``.

    Parameters
    ----------
    **options
        See `Subscriber`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(["weights", "weight_updates"], **options)
        self._before: dict[str | None, Tensor] = {}
        self._stamp: Stamp | None = None

    @abstractmethod
    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the row of an update; `before` is a copy that may be written to."""

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Keep a weight; return the row of its update."""
        if message.stamp != self._stamp:
            self._before.clear()  # weights of the last step that got no update
            self._stamp = message.stamp
        if message.kind == "weights":
            self._before[message.series_name] = message.data.clone()
            return None
        before = self._before.pop(message.series_name, None)
        return None if before is None else self.measure_update(before, message.data)
