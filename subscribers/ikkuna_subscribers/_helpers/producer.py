"""Who made the first NaN or Inf of a step, apart from those that pass it on."""

from collections.abc import Sequence
from typing import NamedTuple

from ikkuna.export.messages import Message, ModuleMessage
from ikkuna.export.messages.kinds import MICRO_KINDS

__all__ = ["Producer", "producer_of"]

_BEFORE = ("weights", "biases")
_FINAL = ("weight_gradients", "bias_gradients")


class Producer(NamedTuple):
    """Who it was.

    Parameters
    ----------
    message : of the one to be named
    told : what it did, as a person says it
    """

    message: Message
    told: str


def producer_of(events: Sequence[Message], first: int, broken: Sequence[Message]) -> Producer:
    """Tell who made the first NaN or Inf.

    What was seen before it was finite, so it was made by whatever came last.
    Weights are the exception: they are seen when the optimizer steps, but were there before the forward pass.

    Parameters
    ----------
    events : everything seen in the step, in the order of its calls: inputs and outputs of modules, gradients as they arrive
    first : which of them is the first that is not finite
    broken : all that are not finite

    Examples
    --------
    >>> from ikkuna.export.messages import Stamp
    >>> seen = [
    ...     ModuleMessage(Stamp(0, 0, 0), kind, module=name, name=name)
    ...     for kind, name in [("layer_inputs", "a"), ("activations", "a"), ("layer_gradients", "a"), ("layer_gradients", "root")]
    ... ]
    >>> producer_of(seen, 1, seen[1:]).told
    "the forward pass of 'a'"
    >>> producer_of(seen, 3, seen[3:]).told
    "the backward pass of 'a', or of what comes between 'root' and 'a'"
    """
    if found := next((message for message in broken if message.kind in _BEFORE), None):
        return Producer(found, f"nobody in this step: {_named(found)} was not finite before it")
    message, before = events[first], events[:first]
    tell = _TELLERS.get(message.kind, _of_module)
    return tell(message, before)


def _named(message: Message) -> str:
    return f"{message.kind} of {message.series_name!r}"


def _of_data(message: Message, before: Sequence[Message]) -> Producer:
    return Producer(message, "the data the network was called with")


def _of_loss(message: Message, before: Sequence[Message]) -> Producer:
    return Producer(message, "the loss function")


def _of_module(message: Message, before: Sequence[Message]) -> Producer:
    return Producer(message, f"the forward pass of {message.series_name!r}")


def _of_input(message: Message, before: Sequence[Message]) -> Producer:
    last = next((m for m in reversed(before) if m.kind == "activations"), None)
    after = f"{last.series_name!r} and " if last is not None else "the beginning and "
    return Producer(message, f"no module: it came between {after}the call of {message.series_name!r}")


def _of_gradient(message: Message, before: Sequence[Message]) -> Producer:
    known = [m for m in before if m.kind == "layer_gradients" and isinstance(m, ModuleMessage)]
    module = message.module if isinstance(message, ModuleMessage) else None
    last = next((m for m in reversed(known) if m.module != module), None)
    if last is None:
        return Producer(message, f"the backward pass of the loss, or of what comes after {message.series_name!r}")
    between = f"what comes between {message.series_name!r} and {last.series_name!r}"
    return Producer(last, f"the backward pass of {last.series_name!r}, or of {between}")


def _of_micro_gradient(message: Message, before: Sequence[Message]) -> Producer:
    return Producer(message, f"the backward pass of {message.series_name!r}, in the gradient of its parameter")


def _of_final_gradient(message: Message, before: Sequence[Message]) -> Producer:
    what = "what comes between the backward pass and the optimizer: adding up, unscaling or clipping of gradients"
    return Producer(message, f"{what}, at {_named(message)}")


def _of_update(message: Message, before: Sequence[Message]) -> Producer:
    return Producer(message, f"the optimizer, in its step of {_named(message)}")


_TELLERS = {
    "input_data": _of_data,
    "loss": _of_loss,
    "layer_inputs": _of_input,
    "layer_gradients": _of_gradient,
    **dict.fromkeys(MICRO_KINDS, _of_micro_gradient),
    **dict.fromkeys(_FINAL, _of_final_gradient),
    **dict.fromkeys(("weight_updates", "bias_updates"), _of_update),
}
