"""Find the operation that produced the first NaN or Inf of a step, among those that only passed it on."""

from collections.abc import Sequence
from typing import NamedTuple

from ikkuna.export.messages import Message, ModuleMessage
from ikkuna.export.messages.kinds import MICRO_KINDS

__all__ = ["Producer", "find_producer"]

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
        All tensors of the step in the order of their calls: inputs and outputs of modules, and gradients as they arrive.
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
        return Producer(
            found,
            f"NaN or Inf already present when this step began: {_name(found)} ({_when(found.global_step, latest)})",
        )
    message, before = events[first], events[:first]
    find = _FINDERS.get(message.kind, _of_module)
    producer, operation = find(message, before)
    return Producer(producer, f"the first NaN or Inf was produced by {operation}")


def _when(step: int, latest: int | None) -> str:
    """Return when weights have changed that are not finite at the begin of a step."""
    if latest == step - 1 or (latest is None and step == 0):
        return "changed outside forward, backward and optimizer step"
    if latest is None:
        return "changed before the first sampled step"
    return f"changed after step {latest}, the last one that was sampled before; every=1 samples the step of the change"


def _name(message: Message) -> str:
    return f"{message.kind} of {message.series_name!r}"


def _of_data(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, "the input data"


def _of_loss(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, "the loss function"


def _of_module(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, f"the forward pass of {message.series_name!r}"


def _of_input(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    last = next((m for m in reversed(before) if m.kind == "activations"), None)
    start = f"{last.series_name!r}" if last is not None else "the beginning of the step"
    return message, f"an operation outside all modules, between {start} and the call of {message.series_name!r}"


def _of_gradient(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    gradients = [m for m in before if m.kind == "layer_gradients" and isinstance(m, ModuleMessage)]
    module = message.module if isinstance(message, ModuleMessage) else None
    last = next((m for m in reversed(gradients) if m.module != module), None)
    if last is None:
        return message, f"the backward pass of the loss, or of an operation after {message.series_name!r}"
    between = f"an operation between {message.series_name!r} and {last.series_name!r}"
    return last, f"the backward pass of {last.series_name!r}, or of {between}"


def _of_micro_gradient(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, f"the backward pass of {message.series_name!r}, in the gradient of its parameter"


def _of_final_gradient(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, f"accumulation, unscaling or clipping of the gradients, at {_name(message)}"


def _of_update(message: Message, before: Sequence[Message]) -> tuple[Message, str]:
    return message, f"the optimizer, in its step of {_name(message)}"


_FINDERS = {
    "input_data": _of_data,
    "loss": _of_loss,
    "layer_inputs": _of_input,
    "layer_gradients": _of_gradient,
    **dict.fromkeys(MICRO_KINDS, _of_micro_gradient),
    **dict.fromkeys(_FINAL_GRADIENTS, _of_final_gradient),
    **dict.fromkeys(("weight_updates", "bias_updates"), _of_update),
}
