"""Functions that return outputs, gradients, weights and gates of a model and leave the model unchanged."""

from ikkuna.inspect.probe.capture import find_layer, find_layers
from ikkuna.inspect.probe.outputs import get_gradients, get_outputs, sequence_summary
from ikkuna.inspect.probe.rnn import GATES, Gate, RNNWeights, get_rnn_weights, rnn_summary
from ikkuna.inspect.probe.weights import (
    ChannelHealth,
    Penalty,
    Vanishing,
    channel_correlation,
    channel_health,
    detect_nans,
    get_weights,
    vanishing,
    weight_penalties,
    weights_norm,
)

__all__ = [
    "GATES",
    "ChannelHealth",
    "Gate",
    "Penalty",
    "RNNWeights",
    "Vanishing",
    "channel_correlation",
    "channel_health",
    "detect_nans",
    "find_layer",
    "find_layers",
    "get_gradients",
    "get_outputs",
    "get_rnn_weights",
    "get_weights",
    "rnn_summary",
    "sequence_summary",
    "vanishing",
    "weight_penalties",
    "weights_norm",
]
