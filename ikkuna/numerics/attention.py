r"""Figures of attention heads and of routers of experts.

With logits :math:`s_{ij} = c\, q_i^\top k_j`, weights :math:`p_i = \operatorname{softmax} s_i` and the logarithm
:math:`\operatorname{lse}_i` of their normaliser, the entropy is
:math:`H_i = -\sum_j p_{ij} \ln p_{ij} = \operatorname{lse}_i - \sum_j p_{ij} s_{ij}`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import widest_float

_BLOCK = 1 << 22  # logits held at a time: 16 MiB of float32


class AttentionRow(NamedTuple):
    """Sums over queries, ``(heads, 4)``, and largest logits, ``(heads,)``.

    Several calls merge by adding `sums` and taking the maximum of `max_logit`.
    """

    sums: Tensor
    max_logit: Tensor


def attention_row(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionRow:
    r"""Measure the attention of `query` to `key`, for a block of queries at a time.

    Parameters
    ----------
    query : Tensor
        ``(batch, heads, queries, dim)``, or the same without the batch.
    key : Tensor
        ``(batch, key_heads, keys, dim)``; `key_heads` divides `heads` (grouped queries).
    mask : Tensor, optional
        Broadcasts to ``(batch, heads, queries, keys)``: either boolean, with True for allowed keys, or a bias that is
        added to the logits, :math:`-\infty` for other keys.
    is_causal : bool
        Whether query i attends only to keys 0 to i, as in ``scaled_dot_product_attention``.
    scale : float, optional
        :math:`c`; by default :math:`1 / \sqrt{dim}`.

    Returns
    -------
    sums : Tensor
        ``(heads, 4)``, float64: :math:`\sum_i H_i` in nats, the number of queries with at least one key,
        :math:`\sum_i H_i / \ln n_i` over the queries with :math:`n_i \ge 2` keys, and their number.  See
        :func:`attention_means`.
    max_logit : Tensor
        ``(heads,)``, float64: :math:`\max_{ij} c\, q_i^\top k_j` over the allowed keys, without a bias; :math:`-\infty`
        without an allowed key.

    Raises
    ------
    ConfigError
        If the shapes of `query` and `key` do not fit each other.

    Notes
    -----
    One product of queries and keys, and 64 MiB for any length, without waiting for the device.
    A NaN makes the values of its head NaN.  Half precision is converted to float32.

    Examples
    --------
    >>> row = attention_row(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4))      # uniform over 8 keys
    >>> [round(v, 4) for v in attention_means(row.sums)[0].tolist()], row.max_logit.tolist()
    ([2.0794, 2.0794], [0.0, 0.0])
    """
    q, k = _four_axes(query), _four_axes(key)
    batch, heads, queries, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim or not k.shape[1] or heads % k.shape[1]:
        raise ConfigError(
            "attention needs queries (batch, heads, queries, dim) and keys (batch, key_heads, keys, dim) "
            f"with key_heads dividing heads, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    scale = dim**-0.5 if scale is None else scale
    keys = k.shape[2]
    sums = torch.zeros(heads, 4, dtype=widest_float(q), device=q.device)
    largest = torch.full((heads,), -torch.inf, dtype=widest_float(q), device=q.device)
    size = max(1, _BLOCK // max(1, batch * heads * keys))
    for start in range(0, queries, size) if keys and batch else ():
        block = q[:, :, start : start + size] * scale
        # Heads that share keys use them by broadcasting, without a copy of the keys.
        grouped = block.reshape(batch, k.shape[1], heads // k.shape[1], -1, dim)
        logits = (grouped @ k.mT.unsqueeze(2)).flatten(1, 2)
        allowed, biased = _masked(logits, mask, is_causal, start)
        sums += _entropy_sums(biased, allowed)
        visible = torch.where(allowed, logits, -torch.inf)
        largest = torch.maximum(largest, visible.amax((0, 2, 3)).to(largest))
    return AttentionRow(sums, largest)


def scores_row(scores: Tensor) -> Tensor:
    r"""Measure given attention scores :math:`s_{ij}`, before the softmax.

    Parameters
    ----------
    scores : Tensor
        ``(…, heads, queries, keys)``, floating.  A score at or below half of the least number of its dtype, such as minus infinity,
        is masked; queries without another key are left out.

    Returns
    -------
    Tensor
        ``(heads, 2)``, float64: :math:`\max_{ij} s_{ij}`, and :math:`-\overline{H_i}` in nats, the negative mean entropy over queries,
        so that the maximum over several calls is the largest score and, negated, the smallest entropy.
        NaN for both if a head has a NaN; :math:`-\infty` and NaN if a head has no unmasked score.

    Notes
    -----
    The temporary tensors have the size of the scores of one element of the batch, in float32.

    Examples
    --------
    >>> largest, entropy = scores_row(torch.tensor([[[0.0, 0.0], [2.0, -torch.inf]]])).unbind(1)
    >>> largest.item(), round(-entropy.item(), 4)      # the first query is uniform over 2 keys, the second has 1
    (2.0, 0.3466)
    """
    x = scores.detach().reshape(-1, *scores.shape[-3:])
    least = torch.finfo(x.dtype).min / 2
    sums = torch.zeros(x.shape[1], 4, dtype=torch.float64, device=x.device)
    largest = torch.full((x.shape[1],), -torch.inf, dtype=torch.float64, device=x.device)
    for part in x.split(1) if x.numel() else ():
        allowed = ~(part <= least)
        wide = torch.where(allowed, part if part.dtype is torch.float64 else part.float(), -torch.inf)
        sums += _entropy_sums(wide, allowed)
        largest = torch.maximum(largest, wide.amax((0, 2, 3)).double())
    return torch.stack([largest, -attention_means(sums)[0]], dim=1)


def _four_axes(x: Tensor) -> Tensor:
    x = x.detach()
    x = x if x.dtype is torch.float64 else x.float()
    if x.ndim not in (3, 4):
        raise ConfigError(f"attention needs (batch, heads, length, dim), with or without batch, got {tuple(x.shape)}")
    return x.unsqueeze(0) if x.ndim == 3 else x


def _masked(logits: Tensor, mask: Tensor | None, is_causal: bool, start: int) -> tuple[Tensor, Tensor]:
    """Return the mask of allowed keys, and the logits with the bias, minus infinity for other keys."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    queries, keys = logits.shape[-2:]
    if mask is not None:
        part = mask.detach()
        part = part[..., start : start + queries, :] if part.ndim > 1 and part.shape[-2] > 1 else part
        allowed = allowed & (part if part.dtype is torch.bool else part != -torch.inf)
        logits = logits if part.dtype is torch.bool else logits + part
    if is_causal:
        index = torch.arange(start, start + queries, device=logits.device)
        allowed = allowed & (torch.arange(keys, device=logits.device) <= index[:, None])
    return allowed, torch.where(allowed, logits, -torch.inf)


def _entropy_sums(logits: Tensor, allowed: Tensor) -> Tensor:
    count = allowed.sum(-1)
    # The largest logit of each row is subtracted first, so that large logits do not cancel.
    top = logits.amax(-1, keepdim=True)
    shifted = logits - torch.where(count[..., None] > 0, top, 0.0)
    weights = shifted.exp()
    total = weights.sum(-1)
    mean = (weights * torch.where(allowed, shifted, 0.0)).sum(-1) / total
    entropy = (total.log() - mean).clamp(min=0.0)
    some, several = count > 0, count > 1
    normalized = entropy / count.clamp(min=2).to(entropy).log()
    parts = (torch.where(some, entropy, 0.0), some, torch.where(several, normalized, 0.0), several)
    return torch.stack([part.sum((0, 2), dtype=widest_float(part)) for part in parts], dim=1)


def attention_means(sums: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the mean entropy of each head, in nats and as a share of its greatest possible value.

    If the entropy of a head falls towards 0 it attends to one key: *entropy collapse*, which accompanies growing
    logits.

    Parameters
    ----------
    sums : Tensor
        ``(heads, 4)``, from :func:`attention_row` or a sum of such results.

    Returns
    -------
    entropy, normalized : Tensor
        ``(heads,)`` each, float64, in [0, ln keys] and [0, 1].  NaN if no query has a key, or two keys, respectively.

    References
    ----------
    S. Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.

    Examples
    --------
    >>> entropy, normalized = attention_means(torch.tensor([[6.0, 3.0, 1.0, 2.0]]))
    >>> entropy.item(), normalized.item()
    (2.0, 0.5)
    """
    entropy, rows, normalized, several = sums.unbind(1)
    return entropy / torch.where(rows > 0, rows, torch.nan), normalized / torch.where(several > 0, several, torch.nan)


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
