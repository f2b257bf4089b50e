"""The number of NaN and infinite elements, and the operation that produced the first."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.export.messages import Message, MessageBatch, NetworkMessage, Stamp
from ikkuna.export.messages.kinds import FORWARD_KINDS, MICRO_KINDS, PARAMETER_KINDS
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import all_finite, has_numbers
from ikkuna_subscribers._helpers.call_order import CallOrder, first_places, site_of
from ikkuna_subscribers._helpers.nonfinite_producer import find_producer

__all__ = ["NonFiniteSubscriber"]

log = logging.getLogger("ikkuna")

_EVERYTHING = ("input_data", *FORWARD_KINDS, "loss", *MICRO_KINDS, *PARAMETER_KINDS, "batch_finished")
_BACKWARD = ("layer_gradients", *MICRO_KINDS, "weight_gradients", "bias_gradients")


class NonFiniteSubscriber(PlotSubscriber):
    r"""The number of elements that are NaN or infinite, or the operation that produced the first one.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_nonfinite``, a count, at least 0.
    Over several calls and micro-batches it is the count over all of them; for a loss it is 0 or 1.
    Unlike other metrics it also publishes for steps that a gradient scaler skipped, because such elements are why it skips them.
    An empty tensor publishes nothing.

    Without a `kind` it takes every kind of a step and names the *producer*:
    the operation of the forward pass, the backward pass or the optimizer's step that got finite numbers and returned others.
    It then publishes ``nonfinite_tensors``, for the whole network, the number of tensors with such an element,
    and ``nonfinite_producer``, 1 under the name of the module or parameter that produced the first.
    The producer is also logged once and shown as a text.  After a step in which everything is finite it can name another one.
    Infinite gradients that make a gradient scaler skip a step are part of its search for a scale and have no producer.

    The order of the calls decides: everything before the first non-finite tensor was finite.
    If each tensor occurs once in a step, the order is learned in the first sampled step, and again when a new tensor appears;
    other steps cost no more than their shared statistics.
    A non-finite gradient was produced by the module whose own gradient came last, or by a function of torch between the two modules.
    Inputs given as keyword arguments are not seen; a loss is seen only after ``set_loss``.
    If a tensor occurs several times in a step, as with micro-batches, the order is observed in every sampled step,
    and each occurrence is checked by itself, in a further pass.
    It takes all tensors of a step, also those that no other metric takes, and never waits for the device.

    Look for: anything above 0.

    Parameters
    ----------
    kind : str, optional
        The kind to measure; by default all kinds, to find the producer.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> NonFiniteSubscriber("weight_gradients").publishes, NonFiniteSubscriber().publishes
    (('weight_gradients_nonfinite',), ('nonfinite_tensors', 'nonfinite_producer'))
    """

    fields = ("nans", "infs")
    merge = "min"
    derived = True
    sees_skipped = True

    def __init__(self, kind: str | None = None, **options: Any) -> None:
        if kind is None:
            name_results(options, "nonfinite_tensors", "nonfinite_producer")
        else:
            options.setdefault("publishes", f"{kind}_nonfinite")
        super().__init__(_EVERYTHING if kind is None else kind, **options)
        self._finds_producer = kind is None
        self.state = ("_is_finite",) if kind is None else ()
        self._seen: list[tuple[Stamp, list[Message]]] = []
        self._order = CallOrder()
        self._broken: list[Message] = []
        self._skipped = False
        self._is_finite = True
        self._latest: int | None = None

    @property
    def measures(self) -> bool:
        """Whether the order of calls is needed and not known."""
        return self._finds_producer and not self._order.is_known

    def measure(self, message: Message) -> Tensor | None:
        """Store the position of the tensor in its step; return it if the record cannot tell which occurrence is not finite.

        The position is infinite if the tensor is known to be finite.
        """
        is_single = self._order.is_single(message)
        finite = None if is_single else all_finite(message.data)
        if finite is None and not (is_single and has_numbers(message.data)):
            return None
        if not self._seen or self._seen[-1][0] != message.stamp:
            self._seen.append((message.stamp, []))
        events = self._seen[-1][1]
        events.append(message.carrying(None))
        return None if finite is None else torch.where(finite, math.inf, float(len(events) - 1)).reshape(1)

    def compute(self, message: Message) -> None:
        """Emit the count, or store the message until the step is over."""
        if not self._finds_producer:
            assert message.record is not None
            self.emit(message, message.record.nonfinite)
        elif isinstance(message, NetworkMessage) and message.kind == "batch_finished":
            self._skipped = message.skipped
        elif message.record is not None and message.record.nonfinite:
            self._broken.append(message)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the counts of all modules, or store the messages of those that are not finite until the step is over."""
        counts = batch.records.nonfinite
        if not self._finds_producer:
            self.emit_batch(batch, counts)
            return
        self._order.check(batch.kind, batch.names)
        self._broken += map(batch.message, np.flatnonzero(counts).tolist())

    def abandon(self, stamp: Stamp) -> None:
        """Forget the tensors of a step of which some are missing."""
        self._take(stamp)
        self._broken = []

    def finish(self, stamp: Stamp) -> None:
        """Emit the number of tensors that are not finite, and the producer if the previous step was finite."""
        if not self._finds_producer:
            return
        events, broken, self._broken = self._take(stamp), self._broken, []
        if events:
            self._order.learn(events)
        self.emit(NetworkMessage(stamp, self.publishes[0]), len(broken), self.publishes[0])
        was_finite, self._is_finite = self._is_finite, not broken
        latest, self._latest = self._latest, stamp.global_step
        if broken and was_finite:
            self._emit_producer([replace(event, stamp=stamp) for event in self._order.events], broken, latest)

    def _take(self, stamp: Stamp) -> list[Message]:
        """Return the tensors of a step, and drop those of earlier steps."""
        events: list[Message] = []
        while self._seen and not events:
            seen, found = self._seen[0]
            if seen.global_step > stamp.global_step:
                break
            del self._seen[0]
            if seen == stamp:
                events = found
        return events

    def _emit_producer(self, events: list[Message], broken: list[Message], latest: int | None) -> None:
        places = first_places(events)
        new = [message for message in broken if site_of(message) not in places]
        places.update((site_of(message), len(events) + i) for i, message in enumerate(new))  # their order is unknown
        events += new
        orders = [places[site_of(m)] if m.data is None else m.data[0] for m in broken]
        first = int(min(orders))
        if self._skipped and events[first].kind in _BACKWARD:
            self._is_finite = True  # the step did not change the weights
            return
        message, description = find_producer(events, first, broken, latest)
        text = f"Step {message.global_step}: {description}."
        log.warning("step %d: %s", message.global_step, description)
        self.emit(message, 1.0, self.publishes[1])
        self.show(message.carrying(None, kind=self.publishes[1]), text)
