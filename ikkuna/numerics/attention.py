r"""Entropy and largest logit of attention heads, without the matrix of attention weights.

With logits :math:`s_{ij} = c\, q_i^\top k_j`, weights :math:`p_i = \operatorname{softmax} s_i` and the logarithm
:math:`\operatorname{lse}_i` of their normaliser, the entropy is
:math:`H_i = -\sum_j p_{ij} \ln p_{ij} = \operatorname{lse}_i - \sum_j p_{ij} s_{ij}`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import widest_float

__all__ = ["AttentionRow", "attention_means", "attention_row", "entropy_of_lse", "logit_bound", "scores_row"]

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


def entropy_of_lse(lse: Tensor, query: Tensor, attended_keys: Tensor, scale: float | None = None) -> Tensor:
    r"""Return :math:`H_i = \operatorname{lse}_i - c\, q_i^\top \sum_j p_{ij} k_j`, from the results of a fused kernel.

    Since :math:`s_{ij}` is linear in :math:`k_j`, one call of attention with the keys in place of the values is enough.
    With an additive bias :math:`b`, subtract :math:`\sum_j p_{ij} b_{ij}` as well.

    Parameters
    ----------
    lse : Tensor
        ``(batch, heads, queries)``, natural logarithms.
    query, attended_keys : Tensor
        ``(batch, heads, queries, dim)``: queries, and the result of attention with ``value = key``.
    scale : float, optional
        :math:`c`; by default :math:`1 / \sqrt{dim}`.

    Returns
    -------
    Tensor
        ``(batch, heads, queries)``, in nats, at least 0.  Its error is that of the logits: 1e-3 nats for logits of 1e4
        in float32.

    Examples
    --------
    >>> zero = torch.zeros(1, 1, 2, 4)
    >>> entropy_of_lse(torch.full((1, 1, 2), 3.0).log(), zero, zero).exp()      # uniform over 3 keys
    tensor([[[3., 3.]]])
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mean = (query.detach().to(lse) * attended_keys.detach().to(lse)).sum(-1) * scale
    return (lse.detach() - mean).clamp(min=0.0)


def logit_bound(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    r"""Return :math:`c \max_i |q_i| \max_j |k_j|`, an upper bound of all logits, for the cost of two norms.

    Parameters
    ----------
    query, key : Tensor
        As for :func:`attention_row`.
    scale : float, optional
        As for :func:`attention_row`.

    Returns
    -------
    Tensor
        ``(heads,)``, float64; 0 without a query or key, NaN for a NaN.

    Examples
    --------
    >>> logit_bound(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 2.0]]]), scale=1.0).item()
    10.0
    """
    q, k = _four_axes(query), _four_axes(key)
    lengths = []
    for x in (q, k):
        rows = x.movedim(1, 0).flatten(1, 2).square().sum(-1, dtype=widest_float(x)).sqrt()
        lengths.append(rows.amax(1) if rows.shape[1] else rows.new_zeros(len(rows)))
    grouped = lengths[1].repeat_interleave(q.shape[1] // max(1, k.shape[1]))
    return lengths[0] * grouped * (q.shape[-1] ** -0.5 if scale is None else scale)
