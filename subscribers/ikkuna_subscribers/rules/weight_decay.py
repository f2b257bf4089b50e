"""Weights that shrink to nothing."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["WeightDecayRule"]


class WeightDecayRule(Rule):
    """The weight matrices have shrunk to a small part of what they were.

    Threshold: 0.3 of their first norm for the median over matrices, for 3 samples in a row; healthy runs stay above 0.8.
    Cannot see: weights that shrink and are meant to, as by pruning.
    """

    name = "weight_decay"
    needs = sources("weights_norm2")
    thresholds = ("share",)
    share: float = 0.3
    explains = frozenset(
        (
            "vanishing_gradient",
            "ignores_input",
            "no_learning",
            "dead_units",
            "class_collapse",
            "rank_collapse",
            "plateau",
            "zero_gradient",
        )
    )
    meaning = "The weights have shrunk to {figure:.0%} of their first norm."
    advice = "lower the weight decay, or its product with the learning rate"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        shares = [c.last / c.first[0] for _, c in history.matrices("weights_norm2") if c.first[0] > 0]
        share = middle(shares)
        if share >= 0:
            yield Score(self.share / max(share, 1e-9), share)
