"""The entropy and the largest score of each attention head, of the data of the training."""

import math
from typing import Any

from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.attention import scores_row
from ikkuna.numerics.elements import has_numbers

__all__ = ["AttentionScoresSubscriber"]


class AttentionScoresSubscriber(PlotSubscriber):
    r"""The largest attention score of each head, :math:`\max_{ij} s_{ij}`, and the mean entropy of its attention weights.

    The entropy of a query is :math:`H_i = -\sum_j p_{ij} \ln p_{ij}` with :math:`p_i = \operatorname{softmax} s_i`, in nats.
    The model passes its scores to ``ikkuna.observe(name, scores)`` before the softmax; kernels such as those of
    ``scaled_dot_product_attention`` compute none, and `AttentionSubscriber` measures them on a probe set.

    Takes ``observed``, tensors (…, heads, queries, keys) whose names contain ``scores``, or match ``modules=``;
    scores at or below half of the least number of their dtype, such as minus infinity, are masked.
    Publishes ``scores_max`` in the unit of the scores and ``scores_entropy`` in nats, between 0 and ln(keys), for each head
    as ``{name}:head_{number}``.
    Over several calls, micro-batches and ranks the largest score and the smallest mean entropy count.
    A head with a NaN has NaN; a head without an unmasked score publishes NaN.  Tensors with fewer axes publish nothing.
    It costs about ten passes over the scores, and memory for the scores of one sample.

    Look for: a ``scores_max`` beyond 50 that grows, while ``scores_entropy`` falls towards 0: attention collapses on single keys,
    and training becomes unstable.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    References
    ----------
    S. Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.
    M. Dehghani et al., Scaling vision transformers to 22 billion parameters, 2023 (growth of attention logits).

    Examples
    --------
    >>> AttentionScoresSubscriber(every=10).publishes
    ('scores_max', 'scores_entropy')
    """

    merge = "max"

    def __init__(self, **options: Any) -> None:
        name_results(options, "scores_max", "scores_entropy")
        options.setdefault("modules", "*scores*")
        super().__init__("observed", **options)

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the largest score and the negative mean entropy of each head."""
        x: Tensor = message.data
        if x.ndim < 3 or not x.numel() or not x.is_floating_point() or x.element_size() == 1 or not has_numbers(x):
            return None
        return scores_row(x)

    def compute(self, message: ModuleMessage) -> None:
        """Emit both values of each head."""
        for head, (largest, negative_entropy) in enumerate(message.data.tolist()):
            path = f"head_{head}"
            name = f"{message.series_name}:{path}"
            source = ModuleMessage(message.stamp, message.kind, module=message.module, path=path, name=name)
            self.emit(source, largest if largest > -math.inf else math.nan, self.publishes[0])
            self.emit(source, -negative_entropy, self.publishes[1])
