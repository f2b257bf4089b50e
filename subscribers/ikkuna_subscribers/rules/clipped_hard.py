"""Gradients that clipping makes very small."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import gradient_growth
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["ClippedHardRule"]


class ClippedHardRule(Rule):
    """Clipping reduces the gradients to a small part of what backward gave, at every sample.

    Threshold: 1/100, for 5 samples in a row; with a usual clipping at norm 1 it is above 1/30 on four model families.
    Cannot see: clipping before an optimizer that ignores the scale of gradients, such as Adam, does little harm; the rule does not know it.
    """

    name = "clipped_hard"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2")
    uses = sources("unowned_parameters")
    judged_on = frozenset(needs)
    thresholds = ("share",)
    share: float = 0.01
    patience = 5
    explains = frozenset(("lr_too_low", "no_learning", "plateau", "update_ratio"))
    meaning = "Clipping leaves only {figure:.2g} of the gradient, in every sample."
    advice = "raise the clipping threshold to about the usual norm of the gradient"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        growth = gradient_growth(history)
        if growth > 0:
            yield Score(self.share / growth, growth)
