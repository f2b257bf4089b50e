"""Updates that are lost when weights are rounded."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LostUpdatesRule"]


class LostUpdatesRule(Rule):
    """Most elements of the weights with a gradient do not change in a step, because the weights' dtype rounds the update away.

    The figure is the share of changed elements over the share of elements with a gradient, the median over the weight matrices.
    Threshold: 0.25; in float32 it is near 1, in bfloat16 with a usual learning rate 0.1 (measured on four model families).
    Cannot see: optimizers that add noise or keep the rounding error, which lose nothing.
    """

    name = "lost_updates"
    needs = sources("weight_updates_sparsity", "weight_gradients_sparsity")
    thresholds = ("share",)
    share: float = 0.25
    severity = "error"
    explains = frozenset(("no_learning", "lr_too_low", "never_moves", "plateau"))
    meaning = "Only {figure:.0%} of the elements that receive a gradient change in a step; the rest is rounded away."
    advice = "keep the weights in float32 (autocast), use stochastic rounding, or a larger learning rate"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        gradients = dict(history.matrices("weight_gradients_sparsity"))
        shares = [
            (1 - curve.last) / (1 - gradients[name].last)
            for name, curve in history.matrices("weight_updates_sparsity")
            if name in gradients and gradients[name].last < 0.9
        ]
        share = middle(shares)
        if share == share and share > 0:
            yield Score(self.share / share, share)
