"""What metrics of an update have in common that need the weight it was made to."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["UpdateSubscriber"]


class UpdateSubscriber(PlotSubscriber):
    """Sees each update of a weight together with the weight before it, of which it keeps a copy until then.

    Takes ``weights`` and ``weight_updates``.

    Parameters
    ----------
    **options
        See `Subscriber`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(["weights", "weight_updates"], **options)
        self._before: dict[str | None, Tensor] = {}

    @abstractmethod
    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the row of an update; `before` is a copy that may be written to."""

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Keep a weight; return the row of its update."""
        if message.kind == "weights":
            self._before[message.series_name] = message.data.clone()
            return None
        before = self._before.pop(message.series_name, None)
        return None if before is None else self.measure_update(before, message.data)
