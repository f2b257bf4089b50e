"""Functions that return outputs, gradients, weights and gates of a model and leave the model unchanged."""

from ikkuna.probe.gradients import get_gradients
from ikkuna.probe.health import (
    ChannelHealth,
    Vanishing,
    channel_correlation,
    channel_health,
    detect_nans,
    vanishing,
)
from ikkuna.probe.layers import find_layer, find_layers
from ikkuna.probe.outputs import get_outputs, sequence_summary
from ikkuna.probe.rnn_weights import GATES, Gate, RNNWeights, get_rnn_weights, rnn_summary
from ikkuna.probe.weights import Penalty, get_weights, weight_penalties, weights_norm

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
