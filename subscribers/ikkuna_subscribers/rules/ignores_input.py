"""Outputs that do not depend on the input."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import stays_below
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["IgnoresInputRule"]

_LASTING = 30


class IgnoresInputRule(Rule):
    """The outputs are the same for every sample of a batch.

    The figure is the share of the outputs' energy that differs between samples.
    Threshold: 1e-6, for 5 samples in a row after the second one; healthy networks have 0.007 or more at the start and soon 0.5.
    A language model first learns how frequent each token is, with figures down to 2e-5 for up to 200 steps; therefore figures below 2e-4
    count only after 30 samples that do not rise.
    Cannot see: outputs that depend on a part of the input only; a batch of one sample.
    """

    name = "ignores_input"
    needs = sources("output_dependence")
    uses = sources("label_entropy")
    thresholds = ("share", "lasting_share")
    share: float = 1e-6
    lasting_share: float = 2e-4
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
        figure = max(curve.last, 1e-12)
        limit = self.lasting_share if stays_below(curve, self.lasting_share, _LASTING) else self.share
        yield Score(limit / figure, curve.last)
