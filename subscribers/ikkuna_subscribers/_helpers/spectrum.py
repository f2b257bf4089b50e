"""What metrics of singular values have in common."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.spectrum import singular_values

__all__ = ["SpectrumSubscriber"]


class SpectrumSubscriber(PlotSubscriber):
    """Decomposes a tensor ``(out, in, ...)``, read as a matrix ``(out, in * ...)``, into singular values.

    That costs :math:`4 m n^2` operations in float64, half a second for 1024 x 1024, and waits for a device:
    it is done every 100th step unless `subsample` says otherwise.  Of several calls in a step the last one counts.

    Parameters
    ----------
    kind : str
        What to look at.
    *results : str
        What to publish of it, after ``{kind}_``.
    **options
        See `Subscriber`.
    """

    merge = "last"
    needs_whole = True

    def __init__(self, kind: str, *results: str, **options: Any) -> None:
        name_results(options, *(f"{kind}_{result}" for result in results))
        super().__init__(kind, **options)

    @abstractmethod
    def results(self, values: Tensor) -> tuple[float, ...]:
        """Return what to publish of singular values, falling, on the host; they are NaN for a matrix that is not finite."""

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the singular values."""
        if (read := readable(message.data)) is None or not message.data.numel():
            return None
        return singular_values(read[0])

    def compute(self, message: ModuleMessage) -> None:
        """Emit what they tell."""
        for kind, value in zip(self.publishes, self.results(torch.from_numpy(message.data)), strict=True):
            self.emit(message, value, kind)
