"""Measures everything for a few steps after a dump."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.flight_recorder.recorded_steps import measured_columns, names_of
from ikkuna.metrics.bus.bus import Handle, MessageBus
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.statistics import FIELDS
from ikkuna.numerics.statistics.record import HISTOGRAMS
from ikkuna.observation.rows.rows import Rows

_OF_PARAMETERS = tuple(
    f"{kind}{what}" for kind in ("weight", "bias") for what in (("s", "es")[kind == "bias"], "_gradients", "_updates")
)


class BurstSubscriber(Subscriber):
    """Requests statistics at every step; it shows nothing.

    Takes the kinds of modules; publishes nothing.

    Parameters
    ----------
    in_modules : bool
        Whether also activations, inputs and gradients of modules are measured.
    sees_loss : bool
        Whether the module that computes the loss is known.
    histograms_of : sequence of str, optional
        Request exact histograms of these modules, and nothing else.
    """

    fields = tuple(name for name in FIELDS if name not in HISTOGRAMS)

    def __init__(
        self, in_modules: bool = True, sees_loss: bool = False, histograms_of: Sequence[str] | None = None
    ) -> None:
        kinds = [*_OF_PARAMETERS, *(FORWARD_KINDS if in_modules else ()), *(("loss",) if sees_loss else ())]
        chosen = None if histograms_of is None else frozenset(histograms_of).__contains__
        super().__init__(kinds, backend="null", modules=chosen)
        if histograms_of is not None:
            self.fields = ("codes",)

    def compute(self, message: Message) -> None:
        """Do nothing: the rows are kept as a whole."""


class Burst:
    """Collects the rows of the next steps, then passes them on.

    Parameters
    ----------
    bus : MessageBus
        The bus, on which the subscribers are registered until the burst is over.
    subscribers : sequence of BurstSubscriber
        Request what is measured; the first one is registered at each step of the burst.
    steps : int
        Number of steps.
    max_bytes : int
        The largest size of what is kept; later histograms are left out, and the burst ends earlier.
    finish : callable
        Called once with the arrays of ``burst.npz``.
    """

    def __init__(
        self,
        bus: MessageBus,
        subscribers: Sequence[BurstSubscriber],
        steps: int,
        max_bytes: int,
        finish: Callable[[dict[str, NDArray[Any]]], None],
    ) -> None:
        self._steps, self._left = steps, max_bytes
        self._finish = finish
        self._kept: list[tuple[int, Any, NDArray[np.float64], dict[int, Any]]] = []
        self._keys: Any = ()
        self._handles: list[Handle] = []
        self._subscriber = subscribers[0]
        try:
            for subscriber in subscribers:
                self._handles.append(bus.register_subscriber(subscriber))
        except BaseException:
            for handle in self._handles:
                handle.remove()
            raise

    @property
    def is_over(self) -> bool:
        """Whether all steps were collected."""
        return not self._handles

    def add(self, rows: Rows) -> None:
        """Keep the rows of a step that was measured for the burst."""
        if not self._handles or not any(r.subscriber is self._subscriber for r in rows.plan.subscriptions):
            return
        codes = {}
        for row, found in rows.codes.items():
            if "codes" in found and self._left > 0:
                codes[row] = _sparse(found["codes"])
                self._left -= sum(array.nbytes for array in codes[row])
        self._left -= rows.values.nbytes
        self._kept.append((rows.stamp.global_step, rows.plan, rows.values, codes))
        self._keys = rows.keys
        if len(self._kept) >= self._steps or self._left <= rows.values.nbytes:
            self.end()

    def end(self) -> None:
        """Remove the subscriber, and pass on what was collected; a second call does nothing."""
        handles, self._handles = self._handles, []
        if not handles:
            return
        for handle in handles:
            handle.remove()
        kept, self._kept = self._kept, []
        if kept:
            self._finish(_arrays(kept, list(self._keys)))


def _sparse(counts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    used = np.flatnonzero(counts)
    largest = int(counts.max(initial=0))
    return used.astype(np.int32), counts[used].astype(np.int32 if largest < 1 << 31 else np.int64)


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
            place = np.broadcast_to(np.array([i, row], np.int32), (len(used), 2))
            histograms.append(np.column_stack([place, used, counts]))
    return {
        "steps": np.array([step for step, *_ in kept], np.int64),
        "values": table,
        "histograms": np.concatenate(histograms) if histograms else np.zeros((0, 4), np.int64),
        **names_of(keys[:rows]),
    }
