"""The entropy and the largest logit of attention heads."""

import math
from typing import Any

import torch

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.attention import AttentionRow, attention_means, attention_row
from ikkuna_subscribers._helpers.arguments import require_integers
from ikkuna_subscribers._helpers.attention_calls import NamedProjections, capture_attention
from ikkuna_subscribers._helpers.multihead_attention import AttentionCall
from ikkuna_subscribers._helpers.probe_subscriber import ProbeSubscriber

__all__ = ["AttentionSubscriber"]


class AttentionSubscriber(ProbeSubscriber):
    r"""The entropy of attention and its largest logit, for each head, on a fixed probe set.

    With logits :math:`s_{ij} = c\, q_i^\top k_j` and weights :math:`p_i = \operatorname{softmax} s_i`,
    the entropy :math:`H_i = -\sum_j p_{ij} \ln p_{ij}` is averaged over queries and inputs.
    The *evenness* :math:`H_i / \ln n_i`, with :math:`n_i` the number of keys that query i may attend to, is averaged over
    the queries with at least two keys.
    Logits are computed from queries and keys for a block of queries at a time, so that the whole matrix never exists.
    This also works with fused kernels, which do not return weights.

    Every `torch.nn.MultiheadAttention` is measured, and every call of ``torch.nn.functional.scaled_dot_product_attention`` in a module,
    with the masks, grouped queries and rotations of the model.
    For attention that uses neither, name the modules that compute queries and keys with `query` and `key`.
    Then the only mask is `is_causal`, and later changes of queries and keys, such as rotary embeddings, are not seen.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``attention_entropy`` in nats, ``attention_evenness`` between 0 and 1,
    and ``attention_max_logit``, without unit, each as ``{module}:head_{i}``.
    A head with a NaN among its queries or keys has NaN; so has the entropy without queries.
    An evaluation costs one more product of queries and keys, and 64 MiB.

    Look for: evenness that falls to 0 while the largest logit grows.  This *entropy collapse* accompanies unstable training;
    logits above about 50 are an early sign of it.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.  Items may be dicts of arguments of the model.
    query, key : str, optional
        Globs of module names, such as ``"*.self.query"``.
    heads, key_heads : int, optional
        With `query` and `key`: the number of heads, and of heads of keys if it is smaller.
    is_causal : bool
        With `query` and `key`: whether a query attends only to keys at its own position and before.
    **options : Any
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`;
        ``modules=`` selects the modules that contain attention.

    Raises
    ------
    ConfigError
        If arguments contradict each other, the probe set is empty, or no attention is found in the model.

    References
    ----------
    S. Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.

    Examples
    --------
    >>> AttentionSubscriber(torch.randn(8, 5, 16)).publishes
    ('attention_entropy', 'attention_evenness', 'attention_max_logit')
    """

    def __init__(
        self,
        dataset: Any,
        *,
        query: str | None = None,
        key: str | None = None,
        heads: int | None = None,
        key_heads: int | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> None:
        self.named = _named(query, key, heads, key_heads, is_causal)
        name_results(options, "attention_entropy", "attention_evenness", "attention_max_logit")
        super().__init__(dataset, **options)

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Sum over the batches and emit the values of each head."""
        rows: dict[str, AttentionRow] = {}

        def add(name: str, call: AttentionCall) -> None:
            if self.subscription.matches(name) and call.query.layout is torch.strided:
                row = attention_row(*call)
                rows[name] = _merged(rows[name], row) if name in rows else row

        self.run_model(around=lambda model: capture_attention(model, add, self.named))
        if not rows:
            raise ConfigError(
                "AttentionSubscriber found no attention: no MultiheadAttention and no call of scaled_dot_product_attention "
                f"in modules that modules={self.subscription.modules!r} matches; name the modules with query= and key="
            )
        if message is not None:
            self.conclude(message, lambda: {name: _values(row) for name, row in rows.items()}, self._emit_all)

    def _emit_all(self, message: NetworkMessage, found: dict[str, list[tuple[float, ...]]]) -> None:
        for name, values in found.items():
            for head, of_head in enumerate(values):
                for kind, value in zip(self.publishes, of_head, strict=True):
                    known = math.nan if value == -math.inf else value
                    reason = "no query had a key, or one was not finite"
                    self.emit_module(message, name, known, kind, f"head_{head}", reason)


def _values(row: AttentionRow) -> list[tuple[float, ...]]:
    return list(zip(*(x.tolist() for x in (*attention_means(row.sums), row.max_logit)), strict=True))


def _merged(one: AttentionRow, other: AttentionRow) -> AttentionRow:
    return AttentionRow(one.sums + other.sums, torch.maximum(one.max_logit, other.max_logit))


def _named(
    query: str | None, key: str | None, heads: int | None, key_heads: int | None, is_causal: bool
) -> NamedProjections | None:
    if query is None and key is None and heads is None and key_heads is None and not is_causal:
        return None
    if query is None or key is None or heads is None:
        raise ConfigError(
            "AttentionSubscriber takes query=, key= and heads= together, and only with them key_heads= and is_causal=; "
            f"got query={query!r}, key={key!r}, heads={heads!r}"
        )
    key_heads = heads if key_heads is None else key_heads
    require_integers("AttentionSubscriber", heads=heads, key_heads=key_heads)
    if heads % key_heads:
        raise ConfigError(f"AttentionSubscriber needs key_heads that divide heads, got {key_heads} and {heads}")
    return NamedProjections(query, key, heads, key_heads, is_causal)
