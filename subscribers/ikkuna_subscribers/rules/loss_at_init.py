"""A first loss above that of a guess."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.first_loss import initial_cross_entropy, initial_logit_deviation
from ikkuna_subscribers._helpers.rule_figures import guessing_loss
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.prediction import PredictionSubscriber

__all__ = ["LossAtInitRule"]


class LossAtInitRule(Rule):
    """Before the first update the cross-entropy is far above log C, the loss of a guess among C classes.

    Threshold: twice log C; healthy networks start below 1.1 times (largest of 140 runs), and a pre-trained one lower;
    deep residual networks whose blocks end with a scale of 1, such as a ResNet-110, start at 1.2 to 1.7 times.
    The rule is silent if the usual initialisation of the last layer explains the loss, such as that by the number of outputs
    in EfficientNet and MobileNet, which gives 2 to 9 times log C for five classes.
    Cannot see: losses that are no classification; a run that was resumed; features that are up to as large as their initialisation intends.
    """

    name = "loss_at_init"
    needs = sources("output_cross_entropy", "output_classes")
    uses = sources("weights_norm2")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 2.0
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
            yield Score(min(ratio / self.factor, curve.last / _explained_loss(history, guess)), ratio)


def _explained_loss(history: History, guess: float) -> float:
    """Return the cross-entropy that the last weights explain if they have a usual scale; at least that of a guess."""
    classes = round(math.exp(guess))
    for name, curve in reversed(history.matrices("weights_norm2")):
        shape = history.network.shape_of(name)
        if shape is not None and shape[0] == classes:
            return initial_cross_entropy(
                classes, initial_logit_deviation(shape, curve.last / math.sqrt(math.prod(shape)))
            )
    return guess
