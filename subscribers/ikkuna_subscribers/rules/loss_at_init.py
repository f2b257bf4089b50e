"""A first loss above that of a guess."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import guessing_loss
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.prediction import PredictionSubscriber

__all__ = ["LossAtInitRule"]


class LossAtInitRule(Rule):
    """Before the first update the cross-entropy is far above log C, the loss of a guess among C classes.

    Threshold: 1.5 times log C; healthy networks start below 1.1 times (largest of 140 runs), and a pre-trained one lower.
    Cannot see: losses that are no classification; a run that was resumed.
    """

    name = "loss_at_init"
    needs = sources("output_cross_entropy", "output_classes")
    thresholds = ("factor",)
    factor: float = 1.5
    patience = 1
    explains = frozenset(
        (
            "logit_growth",
            "ignores_input",
            "lr_too_high",
            "exploding_gradient",
            "no_learning",
            "diverges",
            "dead_units",
            "loss_spike",
            "saturated",
        )
    )
    meaning = "Before the first update the cross-entropy is {figure:.1f} times that of a guess."
    advice = "scale down the initial weights of the last layer, and check the normalisation of the inputs"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for outputs and labels."""
        return (PredictionSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score at the first step of the training."""
        curve, guess = history.now("output_cross_entropy"), guessing_loss(history)
        if curve is not None and curve.count == 1 and curve.step == 0 and math.isfinite(guess):
            ratio = curve.last / guess
            yield Score(ratio / self.factor, ratio)
