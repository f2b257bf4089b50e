"""A loss that grows."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_figures import scale_of_loss
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["DivergesRule"]


class DivergesRule(Rule):
    """The loss, median of ten steps, stays above its level at the start: training made it worse.

    Threshold: 1.3 times the first level and a fifth of the loss of a guess more, at two judgements in a row, which are 10 steps apart;
    healthy runs stay below a quarter of this.
    Cannot see: losses that are negative at the start, such as rewards, and those of adversarial networks, which are games;
    a slow rise after a long fall.
    """

    name = "diverges"
    needs = sources("loss")
    uses = sources("output_classes")
    thresholds = ("factor",)
    factor: float = 1.3
    severity = "error"
    patience = 2
    stride = 10
    explains = frozenset(
        (
            "no_learning",
            "ignores_input",
            "class_collapse",
            "rank_collapse",
            "plateau",
            "logit_growth",
            "loss_spike",
            "overfit",
        )
    )
    meaning = "The loss has risen to {figure:.3g}, above its level at the start."
    advice = "lower the learning rate, check the sign of the loss, clip gradients"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score from the 20th step on."""
        curve = history.now("loss")
        if curve is None or curve.count <= 20 or not min(curve.first[:10]) > 0:
            return
        memory = history.memory[self.name]
        if "level" not in memory:
            medians = [middle(curve.first[max(i - 9, 0) : i + 1]) for i in range(20)]
            memory["level"] = max(middle(curve.first[:5]), min(medians))
        level: float = memory["level"]
        recent = middle([value if math.isfinite(value) else math.inf for value in curve.tail(10)])
        figure = recent if math.isfinite(recent) else 1e300
        yield Score(min(figure / (self.factor * level), (figure - level) / (0.2 * scale_of_loss(history))), figure)
