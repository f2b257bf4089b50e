"""The messages of one kind and step of several modules, as arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.metrics.messages.bundle import MessageBundle
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.metrics.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics.record import Records

__all__ = ["BatchBundle", "BatchNames", "MessageBatch", "NotVectorizedError", "message_name"]


class NotVectorizedError(Exception):
    """Raised by ``compute_batch`` if the messages of a batch must be delivered one by one; nothing has been emitted then."""


def message_name(kind: str, module: str, path: str) -> str:
    """Return the name of the data of a module, as the user reads it.

    Examples
    --------
    >>> message_name("weights", "lstm", "weight_ih_l0"), message_name("activations", "lstm", "1.0")
    ('lstm.weight_ih_l0', 'lstm:1.0')
    """
    return f"{module}{':' if kind in FORWARD_KINDS else '.'}{path}" if path else module


@dataclass(frozen=True, eq=False)
class BatchNames:
    """The module, path and name of each message of a batch, in order; batches of many steps share them.

    Parameters
    ----------
    modules : tuple of str or None
        Dotted names of the modules; ``None`` for data of the whole network.
    paths : tuple of str
        The parameter's own name, or the leaf of a structured output.
    names : tuple of str or None
        The names of the curves.
    """

    modules: tuple[str | None, ...]
    paths: tuple[str, ...]
    names: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def positions(self) -> dict[tuple[str | None, str], int]:
        """The position of each module and path."""
        return {key: i for i, key in enumerate(zip(self.modules, self.paths, strict=True))}

    def select(self, positions: NDArray[np.intp]) -> "BatchNames":
        """Return the names at some positions."""
        chosen = positions.tolist()
        return BatchNames(*(tuple(part[i] for i in chosen) for part in (self.modules, self.paths, self.names)))


@dataclass(eq=False)
class MessageBatch:
    """The messages of one kind and step, with their statistics as arrays.

    Parameters
    ----------
    stamp : Stamp
        The step, epoch and pass.
    kind : str
        The kind of the data.
    names : BatchNames
        The modules, paths and names.
    records : Records
        The merged statistics; of a result those of single numbers.
    data : array, optional
        Of a result the numbers.

    Examples
    --------
    >>> batch = MessageBatch.of_results(Stamp(0, 0, 0), "weights_norm2", BatchNames(("a", "b"), ("", ""), ("a", "b")), [3.0, 4.0])
    >>> [(message.module, message.data) for message in batch.messages()]
    [('a', 3.0), ('b', 4.0)]
    """

    stamp: Stamp
    kind: str
    names: BatchNames
    records: Records
    data: NDArray[np.float64] | None = None

    @classmethod
    def of_results(cls, stamp: Stamp, kind: str, names: BatchNames, values: Any) -> "MessageBatch":
        """Return the messages of values that were computed."""
        data = np.asarray(values, np.float64)
        return cls(stamp, kind, names, Records.of(data), data)

    def __len__(self) -> int:
        return len(self.names.names)

    def result(self, kind: str, values: NDArray[np.float64]) -> "MessageBatch":
        """Return the messages of values that were computed from these, one for each."""
        return MessageBatch.of_results(self.stamp, kind, self.names, values)

    def select(self, positions: NDArray[np.intp], names: BatchNames) -> "MessageBatch":
        """Return the messages at some positions, which have these names."""
        data = None if self.data is None else self.data[positions]
        return MessageBatch(self.stamp, self.kind, names, self.records.select(positions), data)

    def only_finite(self) -> "MessageBatch":
        """Return the messages with statistics of the finite elements."""
        return MessageBatch(self.stamp, self.kind, self.names, self.records.only_finite(), self.data)

    def messages(self) -> Iterator[Message]:
        """Yield the messages one by one."""
        return map(self.message, range(len(self)))

    def message(self, i: int) -> Message:
        """Return one message."""
        module, path = self.names.modules[i], self.names.paths[i]
        data = None if self.data is None else float(self.data[i])
        record = self.records[i]
        if module is None:
            return NetworkMessage(self.stamp, self.kind, data, record, path)
        return ModuleMessage(self.stamp, self.kind, data, record, module, path, self.names.names[i] or module)


@dataclass(eq=False)
class BatchBundle:
    """One batch of each kind of a joined subscription, all with the same stamp, modules and paths.

    Parameters
    ----------
    batches : mapping of str to MessageBatch
        The batches by kind, in the order of the subscription's kinds.
    """

    batches: Mapping[str, MessageBatch]

    @property
    def first(self) -> MessageBatch:
        """The batch of the first kind, whose names the results of the bundle carry."""
        return next(iter(self.batches.values()))

    @property
    def stamp(self) -> Stamp:
        """The stamp that all messages share."""
        return self.first.stamp

    @property
    def names(self) -> BatchNames:
        """The modules, paths and names."""
        return self.first.names

    def __len__(self) -> int:
        return len(self.names.names)

    def __getitem__(self, kind: str) -> MessageBatch:
        return self.batches[kind]

    def result(self, kind: str, values: NDArray[np.float64]) -> MessageBatch:
        """Return the messages of values that were computed from this bundle, one for each module and path."""
        return self.first.result(kind, values)

    def messages(self) -> Iterator[MessageBundle]:
        """Yield the bundles of messages one by one."""
        for i in range(len(self)):
            yield MessageBundle({kind: batch.message(i) for kind, batch in self.batches.items()})
