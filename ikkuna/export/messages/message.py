"""What travels on the bus: one thing that was seen, with the step it belongs to."""

from dataclasses import dataclass
from typing import Any

from ikkuna.numerics.statistics import Record

__all__ = ["Message", "ModuleMessage", "NetworkMessage", "Stamp"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something was seen.

    Parameters
    ----------
    global_step : number of optimizer steps made before this one
    train_step : the same, counted from the epoch's start
    epoch : number of epochs finished before this one
    pass_name : ``"training"``, or the name of another pass over data such as ``"testing"``
    """

    global_step: int
    train_step: int
    epoch: int
    pass_name: str = "training"


@dataclass(slots=True)
class Message:  # not frozen, which would cost 3 µs a message; each subscriber gets its own
    """One thing that was seen.

    Parameters
    ----------
    stamp : when
    kind : what it is, such as ``"weights"``
    data : the borrowed tensor in ``measure``; the merged row, a float64 array, in ``compute``; a float for a result;
        for ``batch_finished`` a dict with the ``learning_rates`` by parameter group and, from the second step on,
        the ``seconds`` since the step before was over and how many of them were ikkuna's, ``own_seconds``
    record : the merged statistics in ``compute``, if the subscriber asked for fields
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
    def tag(self) -> str:
        """The pass it was seen in."""
        return self.stamp.pass_name

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two messages share that belong together in a bundle."""
        return (self.stamp,)

    @property
    def series_name(self) -> str | None:
        """The name of its curve; ``None`` for what belongs to the whole network."""
        return None

    def carrying(self, data: Any, record: Record | None = None, kind: str | None = None) -> "Message":
        """Return this message with other contents, and of another kind if one is given."""
        return Message(self.stamp, kind or self.kind, data, record)

    def result(self, kind: str, value: float) -> "Message":
        """Return the message that carries `value`, computed from this one."""
        return self.carrying(value, Record.of(value), kind)


@dataclass(slots=True)
class NetworkMessage(Message):
    """Something seen of the whole network.

    Parameters
    ----------
    path : which leaf of a structured input or output it is; empty for the first
    skipped : for ``batch_finished``, whether the optimizer left the weights as they were
    """

    path: str = ""
    skipped: bool = False

    def carrying(self, data: Any, record: Record | None = None, kind: str | None = None) -> "NetworkMessage":
        """Return this message with other contents, and of another kind if one is given."""
        return NetworkMessage(self.stamp, kind or self.kind, data, record, self.path, self.skipped)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Stamp and path."""
        return (self.stamp, self.path)

    @property
    def series_name(self) -> str | None:
        """The path of the leaf, if it is not the first."""
        return self.path or None


@dataclass(slots=True)
class ModuleMessage(Message):
    """Something seen of one module.

    Parameters
    ----------
    module : dotted name of the module
    path : the parameter's own name, or which leaf of a structured output it is; empty for the usual one
    name : module and path together, as a person reads them: ``lstm.weight_ih_l0``, ``lstm:1.0``
    """

    module: str = ""
    path: str = ""
    name: str = ""

    def carrying(self, data: Any, record: Record | None = None, kind: str | None = None) -> "ModuleMessage":
        """Return this message with other contents, and of another kind if one is given."""
        return ModuleMessage(self.stamp, kind or self.kind, data, record, self.module, self.path, self.name)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Stamp, module and path."""
        return (self.stamp, self.module, self.path)

    @property
    def series_name(self) -> str | None:
        """Module and path."""
        return self.name or self.module
