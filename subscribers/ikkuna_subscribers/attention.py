"""Where attention looks: spread over many keys, or at one."""

import math
from typing import Any

import torch

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.attention import AttentionRow, attention_means, attention_row
from ikkuna_subscribers._helpers.attention_watch import NamedProjections, watch_attention
from ikkuna_subscribers._helpers.multihead import Attention
from ikkuna_subscribers._helpers.probe import ProbeSubscriber

__all__ = ["AttentionSubscriber"]


class AttentionSubscriber(ProbeSubscriber):
    r"""The entropy of attention and its largest logit, for each head, on a fixed probe set.

    With logits :math:`s_{ij} = c\, q_i^\top k_j` and weights :math:`p_i = \operatorname{softmax} s_i`,
    the entropy :math:`H_i = -\sum_j p_{ij} \ln p_{ij}` is averaged over queries and inputs, and so is its *evenness*
    :math:`H_i / \ln n_i`, with :math:`n_i` the keys that query i may look at (a query with one key has none).
    Logits are made again from queries and keys, a block of queries at a time, so that the whole matrix never exists;
    this works beside fused kernels, which do not return weights.

    Attention is found by itself: every `torch.nn.MultiheadAttention`, and every call that a module makes of
    ``torch.nn.functional.scaled_dot_product_attention``, with masks, grouped queries and rotations as the model has them.
    For attention that is written out, name the modules that make `query` and `key`; then nothing is known of masks but `is_causal`,
    nor of what happens to queries and keys later, such as rotary embeddings.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``attention_entropy`` in nats, ``attention_evenness`` between 0 and 1,
    and ``attention_max_logit``, without unit, each as ``{module}:head_{i}``.
    A head with a NaN among its queries or keys has NaN; the entropy of no query is NaN.
    Costs one more product of queries and keys, and 64 MiB.

    Look for: evenness that falls to 0 while the largest logit grows, which is *entropy collapse* and goes with unstable training;
    logits above about 50 are an early alarm.

    Parameters
    ----------
    dataset : map-style data set or tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.  Items may be dicts of arguments of the model.
    query, key : str, optional
        Globs of the names of modules, such as ``"*.self.query"``.
    heads, key_heads : int, optional
        With `query` and `key`: the number of heads, and of those of keys if it is smaller.
    is_causal : bool
        With `query` and `key`.
    **options
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`;
        ``modules=`` is about the modules that attend.

    Raises
    ------
    ConfigError
        For arguments that do not belong together, an empty probe set, or a model without attention that can be seen.

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

    def look(self, message: NetworkMessage | None) -> None:
        """Sum over batches, and emit a value for each head."""
        rows: dict[str, AttentionRow] = {}

        def take(name: str, seen: Attention) -> None:
            if self.subscription.matches(name) and seen.query.layout is torch.strided:
                row = attention_row(*seen)
                rows[name] = _joined(rows[name], row) if name in rows else row

        self.evaluate_probe(around=lambda model: watch_attention(model, take, self.named))
        if not rows:
            raise ConfigError(
                "AttentionSubscriber found no attention: no MultiheadAttention and no call of scaled_dot_product_attention "
                f"in modules that modules={self.subscription.modules!r} matches; name the modules with query= and key="
            )
        for name, row in rows.items() if message is not None else ():
            assert message is not None
            values = zip(*(x.tolist() for x in (*attention_means(row.sums), row.max_logit)), strict=True)
            for head, of_head in enumerate(values):
                for kind, value in zip(self.publishes, of_head, strict=True):
                    known = math.nan if value == -math.inf else value
                    why = "no query had a key, or one was not finite"
                    self.emit_of(message, name, known, kind, f"head_{head}", why)


def _joined(one: AttentionRow, other: AttentionRow) -> AttentionRow:
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
    for name, number in (("heads", heads), ("key_heads", key_heads)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"AttentionSubscriber needs {name} >= 1, got {number!r}")
    if heads % key_heads:
        raise ConfigError(f"AttentionSubscriber needs key_heads that divide heads, got {key_heads} and {heads}")
    return NamedProjections(query, key, heads, key_heads, is_causal)
