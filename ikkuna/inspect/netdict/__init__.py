"""Snapshots of weights, gradients and optimizer state by name, with arithmetic."""

from ikkuna.inspect.netdict.description import STATISTICS, Description
from ikkuna.inspect.netdict.net_dict import NetDict
from ikkuna.inspect.netdict.snapshots import (
    compute_noise_scale,
    compute_stats,
    compute_trust_ratio,
    get_adam_update,
    get_grad,
    get_optimizer_state,
    get_update,
    get_weight,
    noise_scale_table,
    trust_ratio,
    two_batch_noise_scale,
)
from ikkuna.numerics.noise import NoiseScale, fit_noise_scale, noise_scale_from_moments

__all__ = [
    "STATISTICS",
    "Description",
    "NetDict",
    "NoiseScale",
    "compute_noise_scale",
    "compute_stats",
    "compute_trust_ratio",
    "fit_noise_scale",
    "get_adam_update",
    "get_grad",
    "get_optimizer_state",
    "get_update",
    "get_weight",
    "noise_scale_from_moments",
    "noise_scale_table",
    "trust_ratio",
    "two_batch_noise_scale",
]
