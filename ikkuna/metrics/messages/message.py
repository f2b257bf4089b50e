"""The messages that the bus delivers, and messages of several kinds that are delivered together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics import Record


@dataclass(slots=True)
class Message:  # not frozen, which would cost 3 µs for each message; each subscriber receives its own
    """Data of one kind, or an event, with the step it belongs to.

    Parameters
    ----------
    stamp : Stamp
        The step, epoch and pass.
    kind : str
        The kind of the data, such as ``"weights"``.
    data : Tensor, array, float, dict or None
        In ``measure`` the borrowed tensor; in ``compute`` the merged row, a float64 array; for a result a float.
        For ``batch_finished`` a dict with the ``learning_rates`` by parameter group, the ``unowned`` parameters, which no
        optimizer owns, and from the second step on the ``seconds`` since the end of the step before and the part of them that
        ikkuna spent, ``own_seconds``.
    record : Record, optional
        In ``compute`` the merged statistics, if the subscriber sets ``fields``.
    """

    stamp: Stamp
    kind: str
    data: Any = None
    record: Record | None = None

    @property
    def global_step(self) -> int:
        """Number of the optimizer step."""
        return self.stamp.global_step

    @property
    def train_step(self) -> int:
        """Number of the optimizer step in its epoch."""
        return self.stamp.train_step

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.stamp.epoch

    @property
    def optimizers(self) -> tuple[int, ...]:
        """The optimizers that stepped; see `Stamp`."""
        return self.stamp.optimizers

    @property
    def tag(self) -> str:
        """Name of the pass."""
        return self.stamp.pass_name

    @property
    def series_name(self) -> str | None:
        """The name of the curve; ``None`` for data of the whole network."""
        return None

    def carrying(self, data: Any, record: Record | None = None, kind: str | None = None) -> Self:
        """Return a copy of this message with other contents and, if `kind` is given, of another kind."""
        return replace(self, kind=kind or self.kind, data=data, record=record)


@dataclass(slots=True)
class NetworkMessage(Message):
    """A message of the whole network.

    Parameters
    ----------
    path : str
        The leaf of a structured input or output; empty for the first leaf.
    skipped : bool
        For ``batch_finished``, whether the optimizer left the weights unchanged.
    """

    path: str = ""
    skipped: bool = False

    @property
    def series_name(self) -> str | None:
        """The path of the leaf; ``None`` for the first leaf."""
        return self.path or None


@dataclass(slots=True)
class ModuleMessage(Message):
    """A message of one module.

    Parameters
    ----------
    module : str
        Dotted name of the module.
    path : str
        The parameter's own name, or the leaf of a structured output; empty for ``weight``, ``bias`` and the first leaf.
    name : str
        Module and path, as the user reads them: ``lstm.weight_ih_l0``, ``lstm:1.0``.
    """

    module: str = ""
    path: str = ""
    name: str = ""

    @property
    def series_name(self) -> str | None:
        """Module and path."""
        return self.name or self.module


@dataclass(slots=True)
class MessageBundle:
    """One message of each kind of a subscription, all with the same stamp, module and path.

    Parameters
    ----------
    messages : mapping of str to Message
        The messages by kind, in the order of the subscription's kinds.
    data : array, optional
        In ``compute`` the merged row, if the subscriber measured the tensors of these kinds together.

    Examples
    --------
    >>> stamp = Stamp(0, 0, 0)
    >>> bundle = MessageBundle({"loss": Message(stamp, "loss", 0.5), "train_accuracy": Message(stamp, "train_accuracy", 0.9)})
    >>> bundle["loss"].data, bundle.kinds
    (0.5, ('loss', 'train_accuracy'))
    """

    messages: Mapping[str, Message]
    data: Any = None

    @property
    def first(self) -> Message:
        """The message of the first kind, whose name the results of the bundle carry."""
        return next(iter(self.messages.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the messages."""
        return tuple(self.messages)

    @property
    def stamp(self) -> Stamp:
        """The stamp that all messages share."""
        return self.first.stamp

    @property
    def series_name(self) -> str | None:
        """The name of the curve."""
        return self.first.series_name

    def __getitem__(self, kind: str) -> Message:
        return self.messages[kind]
