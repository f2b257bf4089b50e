"""Labels that are all the same."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["OneLabelRule"]


class OneLabelRule(Rule):
    """Every label of every sampled batch is of the same class.

    Threshold: a fact, without a number, for 8 samples in a row with at least 4 labels.
    Cannot see: labels that are wrong in another way (the rule no_learning sees random ones).
    """

    name = "one_label"
    needs = sources("label_mean", "label_variance", "label_count")
    patience = 8
    explains = frozenset(
        (
            "lost_updates",
            "logit_growth",
            "repeated_batch",
            "ignores_input",
            "no_learning",
            "class_collapse",
            "not_shuffled",
        )
    )
    meaning = "Every label is {figure:g}: there is nothing to distinguish."
    advice = "check how the labels are loaded"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the labels are those of the first batch, and all the same."""
        mean, variance, count = (history.now(kind) for kind in (*self.needs,))
        if mean is not None and variance is not None and count is not None and count.last >= 4:
            yield Score(float(variance.last == 0 and mean.last == mean.first[0]), mean.last)
