"""The queries and keys of ``torch.nn.MultiheadAttention``, computed from its arguments."""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["AttentionCall", "queries_and_keys", "split_heads"]


class AttentionCall(NamedTuple):
    """The arguments of `ikkuna.numerics.attention.attention_row` for one call of an attention."""

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``(batch, length, heads * dim)`` as ``(batch, heads, length, dim)``.

    Examples
    --------
    >>> split_heads(torch.zeros(2, 5, 12), 3).shape
    torch.Size([2, 3, 5, 4])
    """
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(-3, -2)


def queries_and_keys(module: nn.MultiheadAttention, args: Any, kwargs: Any) -> AttentionCall:
    """Return the queries and keys of each head, with the union of both kinds of masks.

    Examples
    --------
    >>> x = torch.ones(2, 5, 12)
    >>> queries_and_keys(nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x), {}).query.shape
    torch.Size([2, 3, 5, 4])
    """
    given = signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    query, key, padding, mask = (given.arguments[name] for name in ("query", "key", "key_padding_mask", "attn_mask"))
    with torch.no_grad():
        q, k = (_batch_first(module, x) @ w.mT for x, w in zip((query, key), _weights(module), strict=True))
        if module.in_proj_bias is not None:
            q_bias, k_bias, _ = module.in_proj_bias.chunk(3)
            q, k = q + q_bias, k + k_bias
        k = _extended(module, k)
    heads = module.num_heads
    allowed = _allowed(mask, padding, (len(q), heads, q.shape[1], k.shape[1]))
    return AttentionCall(split_heads(q, heads), split_heads(k, heads), allowed)


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    x = x.detach()
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _weights(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    if not module._qkv_same_embed_dim:
        return module.q_proj_weight, module.k_proj_weight
    q, k, _ = module.in_proj_weight.chunk(3)
    return q, k


def _extended(module: nn.MultiheadAttention, k: Tensor) -> Tensor:
    """Append the keys that the module adds with ``add_bias_kv`` and ``add_zero_attn``."""
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), 1, -1)], dim=1)
    return torch.cat([k, k.new_zeros(len(k), 1, k.shape[2])], dim=1) if module.add_zero_attn else k


def _allowed(mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Merge both masks into one bias, or into one boolean mask in which True allows attention.

    In the masks of the module, True or minus infinity forbids attention.
    """
    batch, heads, _, keys = shape
    parts = []
    if mask is not None:
        parts.append(mask.detach().unflatten(0, (batch, heads)) if mask.ndim == 3 else mask.detach())
    if padding is not None:
        padding = padding.detach() if padding.ndim == 2 else padding.detach().unsqueeze(0)
        parts.append(padding[:, None, None, :])
    if not parts:
        return None
    parts = [_padded(part, keys) for part in parts]
    if all(part.dtype is torch.bool for part in parts):
        return ~parts[0] if len(parts) == 1 else ~(parts[0] | parts[1])
    bias = [
        torch.zeros_like(p, dtype=torch.float32).masked_fill(p, -torch.inf) if p.dtype is torch.bool else p
        for p in parts
    ]
    return bias[0] if len(bias) == 1 else bias[0] + bias[1]


def _padded(part: Tensor, keys: int) -> Tensor:
    """Extend a mask so that the keys that the module appends are allowed."""
    return nn.functional.pad(part, (0, keys - part.shape[-1]))
