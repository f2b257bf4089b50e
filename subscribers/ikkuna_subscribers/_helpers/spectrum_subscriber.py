"""The base class of metrics that are a function of singular values."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import DeferredRow, PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.spectrum import singular_values_of_each

__all__ = ["SpectrumSubscriber"]


class SpectrumSubscriber(PlotSubscriber):
    """A metric of the singular values of a tensor ``(out, in, ...)``, read as a matrix ``(out, in * ...)``.

    The decomposition costs :math:`4 m n^2` operations in float64, half a second for 1024 x 1024.
    On an accelerator it runs beside training, on a copy of the tensor, and the values arrive some steps later.
    If a step has several calls, the last one counts.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    results : sequence of str
        The last part of the name of each kind that is published.
    """

    results: Sequence[str] = ()
    merge = "last"
    needs_whole = True

    def __init__(self, kind: str = "weights", *, subsample: int = 100, **options: Any) -> None:
        name_results(options, *(f"{kind}_{result}" for result in self.results))
        super().__init__(kind, subsample=subsample, **options)

    @abstractmethod
    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return one number for each name in `results`.

        Parameters
        ----------
        sigma : Tensor
            The singular values in descending order, on the host; all NaN if the matrix has an element that is not finite.
        """

    def measure(self, message: ModuleMessage) -> DeferredRow | None:
        """Return the singular values."""
        if (read := readable(message.data)) is None or not message.data.numel():
            return None
        return DeferredRow(read[0], singular_values_of_each)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the values."""
        for kind, value in zip(self.publishes, self.values(torch.from_numpy(message.data)), strict=True):
            self.emit(message, value, kind)
