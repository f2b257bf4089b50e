"""What the recorder measures itself: everything for a few steps after a dump, and hashes of the inputs."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.flight_recorder.ring import measured_columns
from ikkuna.metrics.bus.bus import Handle, MessageBus
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.elements import fingerprint
from ikkuna.numerics.statistics import FIELDS
from ikkuna.observation.rows.rows import Rows

__all__ = ["Burst", "BurstSubscriber", "InputHashSubscriber", "names_of"]

_OF_PARAMETERS = tuple(
    f"{kind}{what}" for kind in ("weight", "bias") for what in (("s", "es")[kind == "bias"], "_gradients", "_updates")
)


class BurstSubscriber(Subscriber):
    """Requests all statistics and exact histograms of all modules at every step; it shows nothing.

    Takes the kinds of modules; publishes nothing.

    Parameters
    ----------
    in_modules : bool
        Whether also activations, inputs and gradients of modules are measured.
    sees_loss : bool
        Whether the module that computes the loss is known.
    """

    fields = tuple(name for name in FIELDS if name != "sampled_codes")

    def __init__(self, in_modules: bool = True, sees_loss: bool = False) -> None:
        kinds = [*_OF_PARAMETERS, *(FORWARD_KINDS if in_modules else ()), *(("loss",) if sees_loss else ())]
        super().__init__(kinds, backend="null")

    def compute(self, message: Message) -> None:
        """Do nothing: the rows are kept as a whole."""


class Burst:
    """Collects the rows of the next steps, then passes them on.

    Parameters
    ----------
    bus : MessageBus
        The bus, on which a subscriber is registered until the burst is over.
    subscriber : BurstSubscriber
        Asks for what is measured.
    steps : int
        Number of steps.
    finish : callable
        Called once with the arrays of ``burst.npz``.
    """

    def __init__(
        self,
        bus: MessageBus,
        subscriber: BurstSubscriber,
        steps: int,
        finish: Callable[[dict[str, NDArray[Any]]], None],
    ) -> None:
        self._steps = steps
        self._finish = finish
        self._kept: list[tuple[int, Any, NDArray[np.float64], dict[int, Any]]] = []
        self._keys: Any = ()
        self._handle: Handle | None = bus.register_subscriber(subscriber)
        self._subscriber = subscriber

    @property
    def is_over(self) -> bool:
        """Whether all steps were collected."""
        return self._handle is None

    def add(self, rows: Rows) -> None:
        """Keep the rows of a step that was measured for the burst."""
        if self._handle is None or not any(r.subscriber is self._subscriber for r in rows.plan.subscriptions):
            return
        codes = {row: _sparse(found["codes"]) for row, found in rows.codes.items() if "codes" in found}
        self._kept.append((rows.stamp.global_step, rows.plan, rows.values, codes))
        self._keys = rows.keys
        if len(self._kept) >= self._steps:
            self.end()

    def end(self) -> None:
        """Remove the subscriber, and pass on what was collected; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.remove()
        kept, self._kept = self._kept, []
        if kept:
            self._finish(_arrays(kept, list(self._keys)))


def _sparse(counts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    used = np.flatnonzero(counts)
    return used.astype(np.int32), counts[used]


def _arrays(
    kept: list[tuple[int, Any, NDArray[np.float64], dict[int, Any]]], keys: list[Any]
) -> dict[str, NDArray[Any]]:
    rows = max(len(values) for _, _, values, _ in kept)
    table = np.full((len(kept), rows, kept[0][2].shape[1]), np.nan)
    histograms: list[NDArray[Any]] = []
    for i, (_, plan, values, codes) in enumerate(kept):
        is_known = measured_columns(plan, keys[: len(values)]) & (values[:, :1] > 0)
        table[i, : len(values)] = np.where(is_known, values, np.nan)
        for row, (used, counts) in codes.items():
            place = np.broadcast_to(np.array([i, row]), (len(used), 2))
            histograms.append(np.column_stack([place, used, counts]))
    return {
        "steps": np.array([step for step, *_ in kept], np.int64),
        "values": table,
        "histograms": np.concatenate(histograms) if histograms else np.zeros((0, 4), np.int64),
        **names_of(keys[:rows]),
    }


def names_of(keys: list[Any]) -> dict[str, NDArray[Any]]:
    """Return kind, module and path of each row as arrays of texts."""
    return {
        "kinds": np.array([site.kind for site, _ in keys], np.str_),
        "modules": np.array([site.module or "" for site, _ in keys], np.str_),
        "paths": np.array([path for _, path in keys], np.str_),
    }


class InputHashSubscriber(Subscriber):
    """Keeps a hash of the inputs and labels of the last sampled steps, see :func:`~ikkuna.numerics.elements.fingerprint`.

    The hashes of micro-batches and ranks are added.

    Takes ``input_data`` and ``input_labels``; publishes nothing.

    Parameters
    ----------
    sees_labels : bool
        Whether the module that computes the loss is known.
    length : int
        Number of steps.
    **options : Any
        See `Subscriber`.
    """

    def __init__(self, sees_labels: bool, length: int, **options: Any) -> None:
        super().__init__(["input_data", *(("input_labels",) if sees_labels else ())], backend="null", **options)
        self._kept: deque[tuple[int, str, float]] = deque(maxlen=4 * length)

    def measure(self, message: Any) -> Tensor | None:
        """Return the hash of a tensor."""
        return fingerprint(message.data).reshape(1) if message.data.numel() else None

    def compute(self, message: Message) -> None:
        """Keep a hash."""
        path = getattr(message, "path", "")
        self._kept.append((message.global_step, message.kind + (f" {path}" if path else ""), float(message.data[0])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the hashes with their steps and names."""
        kept = list(self._kept)
        return {
            "hash_steps": np.array([step for step, _, _ in kept], np.int64),
            "hash_names": np.array([name for _, name, _ in kept], np.str_),
            "hashes": np.array([value for _, _, value in kept], np.float64),
        }
