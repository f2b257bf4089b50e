"""Gradients that suddenly grow."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["GradientSpikeRule"]


class GradientSpikeRule(Rule):
    """The gradients of half of the weight matrices are far above their usual size, for several samples in a row.

    Logarithms are compared: the median over matrices of the distance of the gradient's norm from the median of its last 20 samples.
    Threshold: a factor of 30, for 2 samples in a row.
    Cannot see: the first 10 samples; a single spike.
    """

    name = "gradient_spike"
    needs = sources("weight_gradients_norm2")
    thresholds = ("factor",)
    factor: float = 30.0
    patience = 2
    explains = frozenset(("loss_spike", "nonfinite", "plateau"))
    meaning = "The gradients are {figure:.0f} times as large as usual."
    advice = "lower the learning rate, or clip gradients at their usual norm"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        distances = []
        for _, curve in history.matrices("weight_gradients_norm2"):
            usual = curve.median(20, skip=2)
            if curve.count > 12 and usual > 0 and curve.last > 0:
                distances.append(math.log(curve.last / usual))
        distance = middle(distances)
        if distance == distance:
            yield Score(distance / math.log(self.factor), math.exp(min(distance, 700.0)))
