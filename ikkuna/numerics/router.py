"""The decisions of the router of a mixture of experts: entropy, load of each expert, dropped tokens."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError

__all__ = ["RouterFigures", "dispatch_row", "router_figures", "router_row"]

_SUMS = 5  # entropy, squared log-sum-exp, tokens with logits, dropped assignments, all assignments


@dataclass(frozen=True)
class RouterFigures:
    """The figures of a router; NaN if they are undefined.

    Parameters
    ----------
    entropy : float
        The mean entropy of the probabilities of a token, in nats, between 0 and ln(experts).
    z_loss : float
        The mean square of the log-sum-exp of the logits of a token.
    load : array
        ``(experts,)``: the share of assignments that an expert received, times the number of experts; 1 if all receive the same.
    dropped : float
        The share of assignments that no expert computed, between 0 and 1.
    """

    entropy: float
    z_loss: float
    load: NDArray[np.float64]
    dropped: float


def router_row(logits: Tensor, top_k: int, capacity_factor: float | None = None) -> Tensor:
    r"""Count which experts the largest `top_k` logits of each token choose, without waiting for the device.

    With :math:`p = \operatorname{softmax} z` of the logits :math:`z` of a token, the entropy is :math:`-\sum_e p_e \ln p_e`.
    An expert can compute :math:`C = \lceil c\, k\, N / E \rceil` of the :math:`N` tokens of a call, with the capacity factor *c*;
    assignments beyond :math:`C` are dropped.

    Parameters
    ----------
    logits : Tensor
        ``(…, experts)``; minus infinity excludes an expert.
    top_k : int
        :math:`k`, the number of experts that a token chooses.
    capacity_factor : float, optional
        :math:`c`; by default no token is dropped.

    Returns
    -------
    Tensor
        ``(experts + 5,)``, float64; the rows of several calls can be summed, see :func:`router_figures`.
        A token with a NaN or plus infinity chooses no expert, and makes the sums of entropies and of squares NaN.

    Raises
    ------
    ConfigError
        If `logits` has no axis, or no expert.

    References
    ----------
    W. Fedus, B. Zoph and N. Shazeer, Switch transformers, 2021.
    B. Zoph et al., ST-MoE: designing stable and transferable sparse expert models, 2022.

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [3.0, 0.0, 1.0]])
    >>> router_row(logits, top_k=1)[:3].tolist()
    [2.0, 0.0, 0.0]
    """
    if not logits.ndim or not logits.shape[-1]:
        raise ConfigError(f"router_row needs logits (…, experts), got the shape {tuple(logits.shape)}")
    x = logits.detach()
    x = (x if x.dtype is torch.float64 else x.float()).reshape(-1, x.shape[-1])
    tokens, experts = x.shape
    top_k = min(top_k, experts)
    normalizer = x.logsumexp(1)
    is_finite = normalizer.isfinite()
    eligible = (x > -torch.inf) & is_finite[:, None]
    counts = _counts(x.topk(top_k, 1).indices, experts, eligible)
    entropy = torch.special.entr(x.softmax(1)).sum(1)
    sums = [v.sum(dtype=torch.float64) for v in (entropy, torch.where(is_finite, normalizer.square(), torch.nan))]
    number = torch.full_like(sums[0], tokens)
    if capacity_factor is None:
        dropped = torch.full_like(number, math.nan)
    else:
        capacity = math.ceil(capacity_factor * top_k * tokens / experts)
        dropped = (counts - capacity).clamp(min=0).sum()
    return torch.cat([counts, torch.stack([*sums, number, dropped, counts.sum()])])


def dispatch_row(indices: Tensor, experts: int) -> Tensor:
    """Count the experts that a router has chosen, as :func:`router_row` does, from their numbers.

    Parameters
    ----------
    indices : Tensor
        ``(…, k)``, integers: the experts of each token.  A number outside of 0 … experts - 1 is a dropped assignment.
    experts : int
        The number of experts.

    Returns
    -------
    Tensor
        ``(experts + 5,)``, float64, without entropies.

    Raises
    ------
    ConfigError
        If `indices` are no integers, or have no axis.

    Examples
    --------
    >>> figures = router_figures(dispatch_row(torch.tensor([[0, 2], [0, -1]]), experts=3).numpy())
    >>> figures.load.tolist(), figures.dropped
    ([2.0, 0.0, 1.0], 0.25)
    """
    if not indices.ndim or indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
        raise ConfigError(f"dispatch_row needs integers (…, k), got {indices.dtype} {tuple(indices.shape)}")
    x = indices.detach().long().reshape(-1, indices.shape[-1])
    counts = _counts(torch.where((x >= 0) & (x < experts), x, experts), experts + 1)
    sums = torch.zeros(_SUMS, dtype=torch.float64, device=x.device)
    sums[-2], sums[-1] = counts[-1], counts.sum()
    return torch.cat([counts[:-1], sums])


def _counts(chosen: Tensor, experts: int, eligible: Tensor | None = None) -> Tensor:
    """Return how many tokens chose each expert; a mask has no atomic additions, so its sum is the same in every run."""
    mask = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
    return (mask if eligible is None else mask & eligible).sum(0, dtype=torch.float64)


def router_figures(row: NDArray[np.float64]) -> RouterFigures:
    """Return the figures of a row of :func:`router_row` or :func:`dispatch_row`, or of a sum of such rows.

    Examples
    --------
    >>> row = router_row(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), top_k=2)
    >>> figures = router_figures(row.numpy())
    >>> round(figures.entropy, 4), figures.load.tolist()
    (0.6931, [1.0, 1.0])
    """
    counts, (entropy, squares, tokens, dropped, assigned) = row[:-_SUMS], row[-_SUMS:]
    computed = counts.sum()
    load = counts * (len(counts) / computed) if computed else np.full(len(counts), math.nan)
    entropy, z_loss = (float(v / tokens) if tokens else math.nan for v in (entropy, squares))
    return RouterFigures(entropy, z_loss, load, float(dropped / assigned) if assigned else math.nan)
