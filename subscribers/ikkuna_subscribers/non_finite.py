"""How much of a tensor is no number any more, and who made the first of it."""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import Message, NetworkMessage, Stamp
from ikkuna.export.messages.kinds import FORWARD_KINDS, MICRO_KINDS, PARAMETER_KINDS
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import all_finite
from ikkuna_subscribers._helpers.producer import producer_of

__all__ = ["NonFiniteSubscriber"]

log = logging.getLogger("ikkuna")

_EVERYTHING = ("input_data", *FORWARD_KINDS, "loss", *MICRO_KINDS, *PARAMETER_KINDS, "batch_finished")
_BACKWARD = ("layer_gradients", *MICRO_KINDS, "weight_gradients", "bias_gradients")


class NonFiniteSubscriber(PlotSubscriber):
    r"""The number of elements that are NaN or infinite, :math:`\#\{i : x_i \in \{\mathrm{NaN}, \pm\infty\}\}`, or who made the first.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_nonfinite``, a count, at least 0.
    Over several calls and micro-batches it is the count over all of them; of a loss it is 0 or 1.
    Unlike other metrics it also publishes for steps that a gradient scaler skipped, which are skipped for such elements.
    An empty tensor publishes nothing.

    Without a `kind` it takes everything there is in a step and names the *producer*:
    whatever was called with finite numbers and made others of them, in the forward pass, the backward pass or the optimizer's step.
    It publishes ``nonfinite_tensors``, of the whole network, the number of tensors with such an element,
    and ``nonfinite_producer``, 1 under the name of the module or parameter that made the first; it is also said in the log, once,
    and shown as a text.  After a step in which everything is finite it is ready to name another.
    Infinite gradients that make a gradient scaler skip a step are its way to find a scale, and name nobody.

    The order of the calls decides, so everything seen before the first was finite.
    Where a gradient is not, it was made by the module whose own gradient came last, or by a function of torch between the two;
    inputs given by keyword are not seen; a loss is seen only after ``set_loss``.
    It costs about three passes over every tensor, and never waits for a device.

    Look for: anything above 0.

    Parameters
    ----------
    kind : str, optional
        What to look at; by default everything.
    **options
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
        self._names = kind is None
        self._seen: list[tuple[Stamp, list[Message]]] = []
        self._broken: list[tuple[float, Message]] = []
        self._skipped = False
        self._is_finite = True

    @property
    def measures(self) -> bool:
        """Whether it has to know the order of calls."""
        return self._names

    def measure(self, message: Message) -> Tensor | None:
        """Return which tensor of the step this is if it is not finite, else infinity."""
        if (finite := all_finite(message.data)) is None:
            return None
        if not self._seen or self._seen[-1][0] is not message.stamp:
            self._seen.append((message.stamp, []))
        events = self._seen[-1][1]
        events.append(message.carrying(None))
        return torch.where(finite, math.inf, float(len(events) - 1)).reshape(1)

    def compute(self, message: Message) -> None:
        """Emit the count, or keep it until the step is over."""
        if not self._names:
            assert message.record is not None
            self.emit(message, message.record.nonfinite)
        elif isinstance(message, NetworkMessage) and message.kind == "batch_finished":
            self._skipped = message.skipped
        elif message.record is not None and message.record.nonfinite:
            self._broken.append((message.data[0], message))

    def finish(self, stamp: Stamp) -> None:
        """Emit how many tensors are not finite, and name the producer if there was none before."""
        if not self._names:
            return
        events, broken = self._take(stamp), self._broken
        self._broken = []
        self.emit(NetworkMessage(stamp, self.publishes[0]), len(broken), self.publishes[0])
        was_finite, self._is_finite = self._is_finite, not broken
        if broken and was_finite:
            self._name(events, broken)

    def _take(self, stamp: Stamp) -> list[Message]:
        """Return what was seen in a step, and forget those before it."""
        events: list[Message] = []
        while self._seen and not events:
            seen, found = self._seen[0]
            if seen.global_step > stamp.global_step:
                break
            del self._seen[0]
            if seen is stamp:
                events = found
        return events

    def _name(self, events: list[Message], broken: list[tuple[float, Message]]) -> None:
        first = int(min(order for order, _ in broken))
        if self._skipped and events[first].kind in _BACKWARD:
            self._is_finite = True  # the weights stay as they were
            return
        message, told = producer_of(events, first, [message for _, message in broken])
        text = f"Step {message.global_step}: the first NaN or Inf was made by {told}."
        log.warning("step %d: the first NaN or Inf was made by %s", message.global_step, told)
        self.emit(message, 1.0, self.publishes[1])
        self.show(message.carrying(None, kind=self.publishes[1]), text)
