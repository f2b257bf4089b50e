"""The base class of metrics that need an update together with the weight before it."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["UpdateSubscriber"]


class UpdateSubscriber(PlotSubscriber):
    """A metric of each update and the weight before it; it keeps a copy of the weight during the step.

    Takes ``weights`` and ``weight_updates``.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.
    """

    def __init__(self, **options: Any) -> None:
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
