"""The interface of an exporter that a bus uses."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from ikkuna.support.modules import NamedModule

__all__ = ["Source"]


class Source(Protocol):
    """A publisher on a bus: an exporter."""

    @property
    def modules(self) -> Sequence[NamedModule]:
        """The modules it observes, in the order of the network."""

    @property
    def module_names(self) -> frozenset[str]:
        """The names of these modules."""

    @property
    def model(self) -> nn.Module | None:
        """The whole network; ``None`` if it is unknown."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that own parameters of the network."""

    def demand_changed(self) -> None:
        """Prepare for subscribers that were added or removed."""

    @property
    def evaluate(self) -> Callable[..., None]:
        """The function that runs the model over data without an effect on training."""

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has no reference to the exporter any more."""

    def close(self) -> None:
        """Stop publishing."""
