"""The shared statistics that rules read, under the names of the results that metrics publish."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ikkuna.export.messages.batch import MessageBatch
from ikkuna.export.messages.kinds import EVENT_KINDS, is_built_in
from ikkuna.export.messages.message import Message
from ikkuna.export.subscriber.base import Subscriber

__all__ = ["STATISTICS", "Receiver", "StatisticsReader", "shared_kinds"]

STATISTICS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "norm2": (("sumsq",), lambda record: record.l2_norm),
    "mean": (("mean",), lambda record: record.mean),
    "variance": (("m2", "sumsq"), lambda record: record.variance()),
    "sparsity": (("zeros",), lambda record: record.sparsity),
    "nonfinite": (("nans", "infs"), lambda record: record.nonfinite),
    "min": (("min",), lambda record: record.min if record.min is not None else float("nan")),
    "max": (("max",), lambda record: record.max if record.max is not None else float("nan")),
}
"""For each ending of a kind the statistics it needs, and the function that computes it from a `Record` or from `Records`."""


def shared_kinds(kinds: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the kinds that are functions of shared statistics, as built-in kinds with the endings of the results.

    Examples
    --------
    >>> shared_kinds(["weights_norm2", "weights_mean", "train_accuracy"])
    {'weights': ('norm2', 'mean')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for kind in kinds:
        source, _, statistic = kind.rpartition("_")
        if statistic in STATISTICS and is_built_in(source) and source not in EVENT_KINDS:
            found[source] = (*found.get(source, ()), statistic)
    return found


class Receiver(Protocol):
    """Stores the values that rules read."""

    def receive(self, message: Any, kind: str, value: float) -> None:
        """Store the value of a message."""

    def receive_all(self, batch: MessageBatch, kind: str, values: NDArray[np.float64]) -> None:
        """Store one value for each message of a batch."""

    def is_shown(self, kind: str) -> bool:
        """Return whether no other subscriber publishes a kind."""


class StatisticsReader(Subscriber):
    """Passes the shared statistics of one kind on to the rules, and shows those that no other subscriber shows.

    Parameters
    ----------
    kind : str
        The kind.
    statistics : tuple of str
        Keys of `STATISTICS`.
    receiver : Receiver
        Stores the values.
    **options : Any
        See `Subscriber`.
    """

    derived = False

    def __init__(
        self,
        kind: str,
        statistics: tuple[str, ...],
        receiver: Receiver,
        **options: Any,
    ) -> None:
        super().__init__(kind, **options)
        self.fields = tuple(dict.fromkeys(field for name in statistics for field in STATISTICS[name][0]))
        self._results = tuple((f"{kind}_{name}", STATISTICS[name][1]) for name in statistics)
        self._receiver = receiver

    def compute(self, message: Message) -> None:
        """Pass the values on."""
        record = message.record
        assert record is not None
        for kind, function in self._results:
            value = function(record)
            self._receiver.receive(message, kind, value)
            if self._receiver.is_shown(kind):
                self._show(message, value, kind)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Pass the values of all modules on."""
        for kind, function in self._results:
            with np.errstate(all="ignore"):
                values = np.broadcast_to(np.asarray(function(batch.records), np.float64), (len(batch),))
            self._receiver.receive_all(batch, kind, values)
            if self._host is not None and self._receiver.is_shown(kind):
                group = self._series_group(batch, kind)
                self._host.show_group(group, values, batch.stamp.global_step, self.backends, self._sender)
