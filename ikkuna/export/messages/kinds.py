"""The kinds of message there are before any subscriber adds its own."""

__all__ = [
    "BUILT_IN",
    "EVENT_KINDS",
    "FORWARD_KINDS",
    "MEASURED_TOGETHER",
    "MICRO_KINDS",
    "MODULE_KINDS",
    "NETWORK_KINDS",
    "PARAMETER_KINDS",
    "STATE_PREFIXES",
    "is_built_in",
    "is_of_module",
]

FORWARD_KINDS = ("layer_inputs", "activations", "layer_gradients")
"""Seen at a module's call: what it received, what it returned, and the gradient of the loss with respect to that."""

PARAMETER_KINDS = ("weights", "weight_gradients", "weight_updates", "biases", "bias_gradients", "bias_updates")
"""Seen at the optimizer's step."""

MICRO_KINDS = ("weight_micro_gradients", "bias_micro_gradients")
"""Seen in each backward pass: what it adds to the gradient of a parameter, as autograd computed it."""

MODULE_KINDS = (*FORWARD_KINDS, *PARAMETER_KINDS, *MICRO_KINDS)
"""What every module has."""

EVENT_KINDS = ("batch_started", "batch_finished", "epoch_started", "epoch_finished")
"""What has happened; these carry no data."""

MEASURED_TOGETHER = ("network_output", "input_labels", "loss")
"""What the loss module receives and returns, in one call: a subscriber may measure these side by side."""

NETWORK_KINDS = ("input_data", *MEASURED_TOGETHER, *EVENT_KINDS)
"""What the one network has."""

BUILT_IN = (*MODULE_KINDS, *NETWORK_KINDS)

STATE_PREFIXES = ("weight_state_", "bias_state_")
"""What an optimizer keeps of each parameter, after its step: ``weight_state_exp_avg`` is Adam's first moment of the weights."""


def is_of_module(kind: str) -> bool:
    """Whether a built-in kind is something every module has.

    Examples
    --------
    >>> is_of_module("weights"), is_of_module("weight_state_exp_avg"), is_of_module("loss")
    (True, True, False)
    """
    return kind in MODULE_KINDS or kind.startswith(STATE_PREFIXES)


def is_built_in(kind: str) -> bool:
    """Whether a kind is published without any subscriber."""
    return kind in BUILT_IN or kind.startswith(STATE_PREFIXES)
