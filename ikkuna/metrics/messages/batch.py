"""The messages of one kind and step of several modules, as arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.metrics.messages.message import Message, MessageBundle, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics.record import Records


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


_NETWORK = BatchNames((None,), ("",), (None,))


@dataclass(eq=False, slots=True)
class MessageBatch:
    """The messages of one kind and step; ``batch[i]`` is one of them.

    If the kinds of a subscription are joined, the batch has one batch of each kind, ``batch["weights"]``, all of the same modules
    and paths, and ``batch[i]`` is a `MessageBundle`.

    Parameters
    ----------
    stamp : Stamp
        The step, epoch and pass.
    kind : str
        The kind of the data; the first one if several are joined.
    names : BatchNames
        The modules, paths and names.
    statistics : Records, optional
        The merged statistics, see :attr:`records`.
    data : array or sequence, optional
        ``(messages,)``, the numbers of a result; or the row of each message, if the subscriber measures the tensors itself.
    parts : mapping of str to MessageBatch
        The batches by kind, in the order of the subscription's kinds, if they are joined.
    messages : sequence of Message or MessageBundle
        The messages, if they were not made of arrays, such as an event.

    Examples
    --------
    >>> batch = MessageBatch(Stamp(0, 0, 0), "weights_norm2", BatchNames(("a", "b"), ("", ""), ("a", "b")), data=np.array([3.0, 4.0]))
    >>> [(message.module, message.data) for message in batch]
    [('a', 3.0), ('b', 4.0)]
    """

    stamp: Stamp
    kind: str
    names: BatchNames
    statistics: Records | None = None
    data: NDArray[np.float64] | Sequence[Any] | None = None
    parts: Mapping[str, "MessageBatch"] = field(default_factory=dict)
    messages: Sequence[Any] = ()

    @classmethod
    def of(cls, message: Message) -> "MessageBatch":
        """Return the batch of one message."""
        module, path = getattr(message, "module", None), getattr(message, "path", "")
        is_plain = module is None and not path
        data = np.array([message.data]) if isinstance(message.data, float) else [message.data]
        names = _NETWORK if is_plain else BatchNames((module,), (path,), (message.series_name,))
        return cls(message.stamp, message.kind, names, data=data, messages=(message,))

    @classmethod
    def joined(cls, parts: Mapping[str, "MessageBatch"], data: Sequence[Any] | None = None) -> "MessageBatch":
        """Return the batch of several kinds, which have the same modules and paths; their names are those of the first kind."""
        first = next(iter(parts.values()))
        return cls(first.stamp, first.kind, first.names, data=data, parts=parts)

    @classmethod
    def of_network(cls, stamp: Stamp, kinds: Sequence[str], data: Any) -> "MessageBatch":
        """Return the batch of several kinds of the whole network, with the row that a subscriber has measured of them together."""
        messages = {kind: NetworkMessage(stamp, kind) for kind in kinds}
        parts = {kind: cls(stamp, kind, _NETWORK, data=[None], messages=(each,)) for kind, each in messages.items()}
        return cls(stamp, kinds[0], _NETWORK, data=[data], parts=parts, messages=(MessageBundle(messages, data),))

    @property
    def records(self) -> Records:
        """The statistics of each message; of a result those of its number.

        Raises
        ------
        ConfigError
            If the messages have none.
        """
        if self.statistics is None:
            if isinstance(self.data, np.ndarray):
                self.statistics = Records.of(self.data)
            elif len(self.messages) == 1 and not self.parts and self.messages[0].record is not None:
                self.statistics = Records.of_record(self.messages[0].record)
            else:
                raise ConfigError(
                    f"messages of {self.kind!r} have no statistics; name them in the subscriber's `fields`"
                )
        return self.statistics

    def __len__(self) -> int:
        return len(self.names.names)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.messages) if self.messages else map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, key: int) -> Any: ...

    @overload
    def __getitem__(self, key: str) -> "MessageBatch": ...

    def __getitem__(self, key: int | str) -> Any:
        """Return the message at a position, or the batch of a kind of a joined batch."""
        if isinstance(key, str):
            return self.parts[key]
        if self.messages:
            return self.messages[key]
        data: Any = None if self.data is None else self.data[key]
        if self.parts:
            return MessageBundle({kind: part[key] for kind, part in self.parts.items()}, data)
        is_result = isinstance(self.data, np.ndarray)
        record = self.records[key] if is_result or self.statistics is not None else None
        if record is not None and not record.n:  # measured by the subscriber itself, which reads no statistics of it
            record = None
        module, path, data = self.names.modules[key], self.names.paths[key], float(data) if is_result else data
        if module is None:
            return NetworkMessage(self.stamp, self.kind, data, record, path)
        return ModuleMessage(self.stamp, self.kind, data, record, module, path, self.names.names[key] or module)

    def select(self, positions: NDArray[np.intp], names: BatchNames) -> "MessageBatch":
        """Return the messages at some positions, which have these names."""
        at = positions.tolist()
        statistics = None if self.statistics is None else self.statistics.select(positions)
        data: Any = self.data
        if data is not None:
            data = data[positions] if isinstance(data, np.ndarray) else [data[i] for i in at]
        messages = [self.messages[i] for i in at] if self.messages else ()
        return MessageBatch(self.stamp, self.kind, names, statistics, data, messages=messages)

    @staticmethod
    def concatenated(batches: "Sequence[MessageBatch]") -> "MessageBatch":
        """Return the messages of several batches of one kind and step, as messages of their own."""
        if len(batches) == 1:
            return batches[0]
        names = BatchNames(
            *(sum((getattr(batch.names, part) for batch in batches), ()) for part in ("modules", "paths", "names"))
        )
        stamp, kind = batches[0].stamp, batches[0].kind
        if all(isinstance(batch.data, np.ndarray) for batch in batches):
            return MessageBatch(stamp, kind, names, data=np.concatenate([np.asarray(batch.data) for batch in batches]))
        return MessageBatch(stamp, kind, names, messages=[message for batch in batches for message in batch])


class NamedRows(Protocol):
    """The kind and the names of a batch."""

    kind: str
    names: BatchNames


class MeasuredStep:
    """The measurements of a step for one subscriber, before any batch is made of them.

    Parameters
    ----------
    stamp : Stamp
        The step.
    rows : sequence of NamedRows
        Kind and names of each batch with shared statistics; the same object at steps that measure the same tensors.
    is_plain : bool
        Whether the subscriber reads shared statistics alone, and every element of the step is known to be finite.
    make : callable
        Returns the batches.
    """

    __slots__ = ("_make", "is_plain", "rows", "stamp")

    def __init__(
        self, stamp: Stamp, rows: Sequence[NamedRows], is_plain: bool, make: Callable[[], Iterable[MessageBatch]]
    ) -> None:
        self.stamp, self.rows, self.is_plain, self._make = stamp, rows, is_plain, make

    def __iter__(self) -> Iterator[MessageBatch]:
        """Iterate over the batches, one for each kind."""
        return iter(self._make())


@dataclass(slots=True)
class StepLosses:
    """The losses of training steps in a row, and the norms of some of their gradients.

    Parameters
    ----------
    first : Stamp, optional
        The first of the steps.
    losses : list of float
        The losses.
    gradients : dict of int to float
        By the number of a step among them the global norm of the gradients that the optimizer has received, where it was read.
    objectives : dict of int to float
        In the same way what ``backward()`` was called on, where that is another number than what the loss module has returned.
    rates : list of list
        The learning rates of the parameter groups of each step; perhaps those of one step more.
    names : tuple of str
        The names of the groups.
    began : float
        The time of the end of the step before, in seconds of the clock.
    ends : list of float
        The time of the end of each step.
    """

    first: Stamp | None = None
    names: tuple[str, ...] = ()
    began: float = 0.0
    losses: list[float] = field(default_factory=list)
    rates: list[list[Any]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    gradients: dict[int, float] = field(default_factory=dict)
    objectives: dict[int, float] = field(default_factory=dict)

    @property
    def last(self) -> Stamp:
        """The last of the steps."""
        return self.stamp(len(self.losses) - 1)

    def stamp(self, i: int) -> Stamp:
        """Return the stamp of the step with a number among them."""
        assert self.first is not None
        return Stamp(self.first.global_step + i, self.first.train_step + i, self.first.epoch)
