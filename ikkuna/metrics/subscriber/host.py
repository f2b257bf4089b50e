"""The part of the bus that a subscriber uses, and the results that it passes to the bus."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch.optim import Optimizer

from ikkuna.backends.run import Run
from ikkuna.metrics.messages.batch import BatchNames
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.subscription import Sampling
from ikkuna.store.values import ModuleEntry
from ikkuna.support.device_thread import Pending
from ikkuna.support.modules import NamedModule

Name = tuple[str | None, str, str | None]
"""Module, path and name of a message."""


class _Thread(Protocol):
    """The state of a thread, see `ErrorGuard`."""

    subscriber_is_running: bool


class Host(Protocol):
    """The part of a message bus that a subscriber uses."""

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The observed modules."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that own parameters of the observed models."""

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """Names, classes and parameter shapes of the observed modules."""

    @property
    def sampling(self) -> Sampling:
        """Which steps are sampled beside those of the subscriptions."""

    def register_subscriber(self, subscriber: Any) -> object:
        """Register a subscriber."""

    def open_run(self) -> Run | None:
        """Return the open run, and open one if there is none; ``None`` if another rank writes the run."""

    @property
    def thread(self) -> _Thread:
        """The state of this thread: while a subscriber's code runs, the bus takes its results afterwards."""

    def take_results(self, subscriber: Any) -> None:
        """Publish and show the results of a subscriber."""

    def drop_late(self, subscriber: Any) -> None:
        """Count a result that is not computed, because earlier ones still are."""


class Result(NamedTuple):
    """A call of a backend, and the names of the messages that are published with it.

    Parameters
    ----------
    method : str
        The name of the backend's method.
    arguments : tuple
        Its arguments.
    stamp : Stamp
        The step of the values.
    names : BatchNames, optional
        The names of their messages; ``None`` for values that are only shown.
    """

    method: str
    arguments: tuple[Any, ...]
    stamp: Stamp
    names: BatchNames | None = None


class Later(NamedTuple):
    """A result that is being computed, and the function that emits it."""

    stamp: Stamp
    pending: Pending[Any]
    then: Callable[[Pending[Any]], None]


class Numbers(NamedTuple):
    """Numbers of single messages of one kind and step, which are published and shown together."""

    stamp: Stamp
    kind: str
    names: list[Name]  # one more than values, if an interrupt came between both
    values: list[float]
