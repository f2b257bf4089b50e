"""A classifier that is not better than a guess."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NoLearningRule"]


class NoLearningRule(Rule):
    """The weights have moved, but the cross-entropy is that of a guess, and no better than a hundred steps ago.

    The guess has the frequencies of the labels (their entropy, corrected for the size of the batch after Miller and Madow), at most log C.
    Threshold: 0.95 of the guess, less than 2% better than 10 samples before, after updates that add up to 0.05 of the weights' size,
    for 3 samples in a row.  A value is the median over samples with at least 200 labels together.
    Cannot see: tasks that need longer than a hundred steps before anything happens look the same for a while; other losses.
    """

    name = "no_learning"
    needs = sources(
        "output_cross_entropy", "output_classes", "label_entropy", "label_count", "weight_updates_weights_ratio"
    )
    thresholds = ("share", "labels")
    share: float = 0.95
    labels: float = 200
    patience = 3
    explains = frozenset(("ignores_input", "class_collapse", "plateau"))
    meaning = "The cross-entropy is {figure:.0%} of that of a guess, and does not fall."
    advice = "check whether labels and inputs belong together, the learning rate, and the gradients of the first layers"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        mean = history.now("output_cross_entropy")
        entropy, count, classes = (history.curve(kind) for kind in ("label_entropy", "label_count", "output_classes"))
        if mean is None or entropy is None or count is None or classes is None or not classes.last > 1:
            return
        memory = history.memory[self.name]
        ratios = [curve.last for _, curve in history.matrices("weight_updates_weights_ratio") if curve.last > 0]
        if ratios:
            memory["moved"] = memory.get("moved", 0.0) + sorted(ratios)[len(ratios) // 2]
        bias = (classes.last - 1) / (2 * max(count.median(10), 1))
        most = math.log(classes.last)
        guess = min(entropy.median(10) + bias, most)
        window = max(math.ceil(self.labels / max(count.median(10), 1)), 4)
        if mean.count < window + 10 or memory.get("moved", 0.0) < 0.005 or guess < 0.2:
            return
        pairs = zip(mean.tail(window + 10), entropy.tail(window + 10), strict=False)
        shares = [loss / min(max(labels, 0.2) + bias, most) for loss, labels in pairs]
        now, before = middle(shares[-window:]), middle(shares[:window])
        yield Score(now / self.share if now > 0.98 * before else 0.0, now)
