"""The shared statistics that rules read, under the names of the results that metrics publish."""

from collections.abc import Callable, Iterable
from typing import Any

from ikkuna.export.messages.kinds import EVENT_KINDS, is_built_in
from ikkuna.export.messages.message import Message
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.numerics.statistics import Record

__all__ = ["STATISTICS", "StatisticsReader", "shared_kinds"]

STATISTICS: dict[str, tuple[tuple[str, ...], Callable[[Record], float]]] = {
    "norm2": (("sumsq",), lambda record: record.l2_norm),
    "mean": (("mean",), lambda record: record.mean),
    "variance": (("m2", "sumsq"), lambda record: record.variance()),
    "sparsity": (("zeros",), lambda record: record.sparsity),
    "nonfinite": (("nans", "infs"), lambda record: record.nonfinite),
    "min": (("min",), lambda record: record.min if record.min is not None else float("nan")),
    "max": (("max",), lambda record: record.max if record.max is not None else float("nan")),
}
"""For each ending of a kind the statistics it needs, and the function that computes it."""


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


class StatisticsReader(Subscriber):
    """Passes the shared statistics of one kind on to the rules, and shows those that no other subscriber shows.

    Parameters
    ----------
    kind : str
        The kind.
    statistics : tuple of str
        Keys of `STATISTICS`.
    receive : callable
        ``receive(message, kind, value)`` takes each value.
    is_shown : callable
        Returns whether a result of this name is not published by another subscriber.
    **options : Any
        See `Subscriber`.
    """

    derived = False

    def __init__(
        self,
        kind: str,
        statistics: tuple[str, ...],
        receive: Callable[[Any, str, float], None],
        is_shown: Callable[[str], bool],
        **options: Any,
    ) -> None:
        super().__init__(kind, **options)
        self.fields = tuple(dict.fromkeys(field for name in statistics for field in STATISTICS[name][0]))
        self._results = tuple((f"{kind}_{name}", STATISTICS[name][1]) for name in statistics)
        self._receive = receive
        self._is_shown = is_shown

    def compute(self, message: Message) -> None:
        """Pass the values on."""
        record = message.record
        assert record is not None
        for kind, function in self._results:
            value = function(record)
            self._receive(message, kind, value)
            if self._is_shown(kind):
                self._show(message, value, kind)
