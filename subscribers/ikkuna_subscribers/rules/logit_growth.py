"""Logits that grow without bound."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LogitGrowthRule"]


class LogitGrowthRule(Rule):
    """The logarithm of the softmax's normaliser is far from zero: the logits drift together.

    Threshold: the mean of log Z is above 30 + log C, for 5 samples in a row; the z-loss of PaLM (Chowdhery et al., 2022) keeps it near 0.
    Cannot see: logits that grow apart, as they do when a network becomes certain.
    """

    name = "logit_growth"
    needs = sources("output_log_normalizer", "output_classes")
    thresholds = ("limit",)
    limit: float = 30.0
    patience = 5
    meaning = "The logits have drifted: the mean logarithm of the softmax's normaliser is {figure:.3g}."
    advice = "add a z-loss, lower the learning rate, or normalise the inputs of the last layer"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve, classes = history.now("output_log_normalizer"), history.now("output_classes")
        if curve is not None and classes is not None and classes.last > 1:
            yield Score(abs(curve.last) / (self.limit + math.log(classes.last)), curve.last)
