"""Outputs that do not depend on the input."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["IgnoresInputRule"]


class IgnoresInputRule(Rule):
    """The outputs are the same for every sample of a batch.

    The figure is the share of the outputs' energy that differs between samples.
    Threshold: 2e-4, for 5 samples in a row after the second one; healthy networks have 0.007 or more at the start and soon 0.5.
    Cannot see: outputs that depend on a part of the input only; a batch of one sample.
    """

    name = "ignores_input"
    needs = sources("output_dependence")
    uses = sources("label_entropy")
    thresholds = ("share",)
    share: float = 2e-4
    patience = 5
    severity = "error"
    explains = frozenset(("class_collapse", "no_learning", "rank_collapse", "plateau", "lr_too_low"))
    meaning = "The outputs are the same for every sample; only {figure:.2g} of their energy differs."
    advice = "search for a branch that is multiplied by zero, dead layers, or inputs that are constant"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve, labels = history.now("output_dependence"), history.curve("label_entropy")
        if curve is None or curve.count <= 2 or (labels is not None and labels.last == 0):
            return
        yield Score(self.share / max(curve.last, 1e-12), curve.last)
