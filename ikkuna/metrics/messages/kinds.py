"""The built-in kinds of messages."""

from ikkuna.store.quantity import LOGGED

FORWARD_KINDS = ("layer_inputs", "activations", "layer_gradients")
"""Recorded when a module is called: its inputs, its outputs, and the gradient of the loss with respect to its outputs."""

UNCLIPPED_KINDS = ("weight_gradients_unclipped", "bias_gradients_unclipped")
"""Recorded at the end of a backward: the gradients before the training loop clips them."""

PARAMETER_KINDS = (
    *("weights", "weight_gradients", "weight_updates", "biases", "bias_gradients", "bias_updates"),
    *UNCLIPPED_KINDS,
)
"""Recorded of each parameter once a step; all but the unclipped gradients at the optimizer's step."""

MICRO_KINDS = ("weight_micro_gradients", "bias_micro_gradients")
"""Recorded in each backward pass: what it adds to the gradient of a parameter."""

MODULE_KINDS = (*FORWARD_KINDS, *PARAMETER_KINDS, *MICRO_KINDS)
"""The kinds of modules."""

EVENT_KINDS = ("batch_started", "batch_finished", "epoch_started", "epoch_finished")
"""Events; they carry no tensor."""

MEASURED_TOGETHER = ("network_output", "input_labels", "loss")
"""Inputs and output of one call of the loss module; a subscriber can measure them together."""

FACT_KINDS = (
    *("averaged_ranks", "evaluations_in_training_mode", "gradients_at_step", "gradients_kept", "micro_batches"),
    *(
        "undivided_losses",
        "optimizer_beta1",
        "optimizer_beta2",
        "optimizer_epsilon",
        "optimizer_initial_rate",
        "optimizer_weight_decay",
    ),
    *("optimizer_closure", "optimizer_maximize", "random_numbers_repeated", "step_skipped", "unowned_parameters"),
)
"""Facts about the loop and the optimizers that ``batch_finished`` carries, under the names by which rules read them."""

OBJECTIVE = "objective"
"""The path of what ``backward()`` is called on, as a ``loss`` beside that of the loss module."""

NETWORK_KINDS = ("input_data", *MEASURED_TOGETHER, *EVENT_KINDS, LOGGED)
"""The kinds of the whole network."""

OBSERVED = "observed"
"""Tensors that the model passes to ``ikkuna.observe``; their names stand in place of the module."""

BUILT_IN = (*MODULE_KINDS, *NETWORK_KINDS, OBSERVED)
"""All built-in kinds except the states of optimizers, whose names begin with `STATE_PREFIXES`."""

STATE_PREFIXES = ("weight_state_", "bias_state_")
"""State of the optimizer for each parameter after its step: ``weight_state_exp_avg`` is Adam's first moment of the weights."""


def is_of_module(kind: str) -> bool:
    """Return whether a built-in kind belongs to modules rather than to the network.

    Examples
    --------
    >>> is_of_module("weights"), is_of_module("weight_state_exp_avg"), is_of_module("loss")
    (True, True, False)
    """
    return kind in MODULE_KINDS or kind == OBSERVED or kind.startswith(STATE_PREFIXES)


def is_built_in(kind: str) -> bool:
    """Return whether the exporter publishes a kind, rather than a subscriber."""
    return kind in BUILT_IN or kind.startswith(STATE_PREFIXES)
