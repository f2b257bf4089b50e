"""The number of NaN and infinite elements, and the operation that produced the first."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ikkuna.export.messages import MeasuredStep, Message, MessageBatch, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.metrics.messages.batch import BatchNames, NamedRows
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, PARAMETER_KINDS, UNCLIPPED_KINDS
from ikkuna.numerics.elements import all_finite, has_numbers, is_true_on_host

_MOST_CHANGES = 3
_Site = tuple[str, str | None]


class CallOrder:
    """The order of the tensors of a step: kind and name of each in the last step of which all calls were seen.

    It is known while each tensor occurs once in a step and none is new; then the calls of further steps need not be seen.
    If new tensors have appeared three times, or if one occurs several times in a step, it is never known.

    Attributes
    ----------
    events : sequence of Message
        The messages of that step in the order of their calls, without data.

    Examples
    --------
    >>> from ikkuna.export.messages import ModuleMessage, Stamp
    >>> message, order = ModuleMessage(Stamp(0, 0, 1), "activations", module="fc"), CallOrder()
    >>> order.is_known, order.is_single(message), order.learn([message]), order.is_known, order.is_single(message)
    (False, False, None, True, True)
    """

    def __init__(self) -> None:
        self.events: Sequence[Message] = ()
        self._sites: set[_Site] = set()
        self._repeated: set[_Site] = set()
        self._is_complete = False
        self._changes = 0
        self._known_names: WeakSet[BatchNames] = WeakSet()

    @property
    def is_known(self) -> bool:
        """Whether the order of the next step is expected to be that of `events`."""
        return self._is_complete and not self._repeated and self._changes < _MOST_CHANGES

    def is_single(self, message: Message) -> bool:
        """Return whether the tensor of a message occurred once in each step that was learned, and in one step at least."""
        site = site_of(message)
        return site in self._sites and site not in self._repeated

    def learn(self, events: Sequence[Message]) -> None:
        """Learn the order of the messages of a step."""
        found = Counter(map(site_of, events))
        self._repeated.update(site for site, times in found.items() if times > 1)
        self._sites.update(found)
        self.events, self._is_complete = events, True

    def check(self, kind: str, names: BatchNames) -> None:
        """Compare the tensors of a step with the known ones; if one of them is new, the order is unknown until a step is learned."""
        if names in self._known_names:
            return
        if all((kind, name) in self._sites for name in names.names):
            self._known_names.add(names)
        elif self._is_complete:
            self._is_complete = False
            self._changes += 1


def site_of(message: Message) -> _Site:
    """Return kind and name of the tensor of a message."""
    return message.kind, message.series_name


def first_places(events: Iterable[Message]) -> dict[_Site, int]:
    """Return for each tensor the position of its first message."""
    places: dict[_Site, int] = {}
    for place, message in enumerate(events):
        places.setdefault(site_of(message), place)
    return places


_PARAMETERS = ("weights", "biases")
_FINAL_GRADIENTS = ("weight_gradients", "bias_gradients")


class Producer(NamedTuple):
    """The origin of the first NaN or Inf of a step.

    Parameters
    ----------
    message : Message
        A message of the module or parameter to name.
    description : str
        A sentence for the log.
    """

    message: Message
    description: str


def find_producer(
    events: Sequence[Message], first: int, broken: Sequence[Message], latest: int | None = None
) -> Producer:
    """Return the producer of the first NaN or Inf.

    Everything before the first non-finite tensor was finite, so the operation just before it produced the NaN or Inf.
    Weights are the exception: they are recorded when the optimizer steps, but existed before the forward pass.

    Parameters
    ----------
    events : sequence of Message
        The tensors of the step in the order of their calls: inputs and outputs of modules, and gradients as they arrive;
        then those of parameters that are not finite.
    first : int
        The index of the first non-finite tensor in `events`.
    broken : sequence of Message
        All non-finite tensors.
    latest : int, optional
        The last step before this one that was sampled.

    Examples
    --------
    >>> from ikkuna.export.messages import Stamp
    >>> seen = [
    ...     ModuleMessage(Stamp(0, 0, 0), kind, module=name, name=name)
    ...     for kind, name in [("layer_inputs", "a"), ("activations", "a"), ("layer_gradients", "a"), ("layer_gradients", "root")]
    ... ]
    >>> find_producer(seen, 1, seen[1:]).description
    "the first NaN or Inf was produced by the forward pass of 'a'"
    >>> find_producer(seen, 3, seen[3:]).description
    "the first NaN or Inf was produced by the backward pass of 'a', or of an operation between 'root' and 'a'"
    """
    if found := next((message for message in broken if message.kind in _PARAMETERS), None):
        place, when = f"{found.kind} of {found.series_name!r}", _when(found.global_step, latest)
        return Producer(found, f"NaN or Inf already present when this step began: {place} ({when})")
    message, before = events[first], events[:first]
    if message.kind == "layer_inputs":
        operation = _before_input(message, before)
    elif message.kind == "layer_gradients":
        message, operation = _of_gradient(message, before)
    else:
        text = _OPERATIONS.get(message.kind, "the forward pass of {name!r}")
        operation = text.format(kind=message.kind, name=message.series_name)
    return Producer(message, f"the first NaN or Inf was produced by {operation}")


def _when(step: int, latest: int | None) -> str:
    """Return when weights have changed that are not finite at the begin of a step."""
    if latest == step - 1 or (latest is None and step == 0):
        return "changed outside forward, backward and optimizer step"
    if latest is None:
        return "changed before the first sampled step"
    return f"changed after step {latest}, the last one that was sampled before; every=1 samples the step of the change"


def _before_input(message: Message, before: Sequence[Message]) -> str:
    last = next((m for m in reversed(before) if m.kind == "activations"), None)
    start = f"{last.series_name!r}" if last is not None else "the beginning of the step"
    return f"an operation outside all modules, between {start} and the call of {message.series_name!r}"


def _of_gradient(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    gradients = [m for m in before if m.kind == "layer_gradients" and isinstance(m, ModuleMessage)]
    module = message.module if isinstance(message, ModuleMessage) else None
    last = next((m for m in reversed(gradients) if m.module != module), None)
    if last is None:
        return message, f"the backward pass of the loss, or of an operation after {message.series_name!r}"
    between = f"an operation between {message.series_name!r} and {last.series_name!r}"
    return last, f"the backward pass of {last.series_name!r}, or of {between}"


_OPERATIONS = {
    "input_data": "the input data",
    "loss": "the loss function",
    **dict.fromkeys(UNCLIPPED_KINDS, "the backward pass of {name!r}, in the gradient of its parameter"),
    **dict.fromkeys(_FINAL_GRADIENTS, "accumulation, unscaling or clipping of the gradients, at {kind} of {name!r}"),
    **dict.fromkeys(("weight_updates", "bias_updates"), "the optimizer, in its step of {kind} of {name!r}"),
}
"""The operations that are known from the kind of the first non-finite tensor."""


log = logging.getLogger("ikkuna")

_ORDERED = ("input_data", *FORWARD_KINDS, "loss")
"""The kinds whose order is that of the calls; those of parameters follow in the order of their kinds."""
_EVERYTHING = tuple(dict.fromkeys((*_ORDERED, *UNCLIPPED_KINDS, *_FINAL_GRADIENTS, *PARAMETER_KINDS, "batch_finished")))
_BACKWARD = ("layer_gradients", *UNCLIPPED_KINDS, *_FINAL_GRADIENTS)


class NonFiniteSubscriber(PlotSubscriber):
    r"""The number of elements that are NaN or infinite, or the operation that produced the first one.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_nonfinite``, a count, at least 0.
    Over several calls and micro-batches it is the count over all of them; for a loss it is 0 or 1.
    Unlike other metrics it also publishes for steps that a gradient scaler skipped, because such elements are why it skips them;
    these have the number of the step that follows, which then has several values.
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
    If what a module receives or returns occurs several times in a step, as with micro-batches, the order is observed in every
    sampled step, and each occurrence is checked by itself, in a further pass.
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

    quantity = Quantity("elements", low=0.0, scale="log", zero="good", larger="bad")
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
        self.measured_kinds = _ORDERED
        self.state = ("_is_finite",) if kind is None else ()
        self._seen: list[tuple[Stamp, list[Message]]] = []
        self._order = CallOrder()
        self._checked: Sequence[NamedRows] = ()  # all of them are known
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

        The position is infinite if the tensor is finite, and is left out where that is known already.
        """
        if message.kind == "loss" and message.series_name:  # it may contain the factor of a gradient scaler
            return None
        is_single = self._order.is_single(message)
        finite = None if is_single else all_finite(message.data)
        if finite is None and not (is_single and has_numbers(message.data)):
            return None
        if not self._seen or self._seen[-1][0] != message.stamp:
            self._seen.append((message.stamp, []))
        events = self._seen[-1][1]
        events.append(message.carrying(None))
        if finite is None or is_true_on_host(finite):
            return None
        return torch.where(finite, math.inf, float(len(events) - 1)).reshape(1)

    def compute_step(self, step: MeasuredStep) -> None:
        """Compare the tensors of a step in which everything is finite with the known ones; read the counts of another step."""
        if not (self._finds_producer and step.is_plain):
            super().compute_step(step)
        elif step.rows is not self._checked:
            for each in step.rows:
                if each.kind in _ORDERED:
                    self._order.check(each.kind, each.names)
            self._checked = step.rows if self._order.is_known else ()

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the counts of all modules, or store the messages of those that are not finite until the step is over."""
        if batch.kind == "batch_finished":
            self._skipped = batch[0].skipped
            return
        records = batch.records
        if not self._finds_producer:
            self.emit_batch(batch, records.nonfinite)
            return
        if batch.data is None and batch.kind in _ORDERED:  # its tensors were not measured, because their order is known
            self._order.check(batch.kind, batch.names)
        if not records.is_finite:
            self._broken += map(batch.__getitem__, np.flatnonzero(records.nonfinite).tolist())

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
