"""A gradient scaler that skips too many steps."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["ScalerSkipsRule"]


class ScalerSkipsRule(Rule):
    """The gradient scaler skips many of the steps because gradients overflow.

    Threshold: a fifth of the last 50 steps, after the first 50, in which the scaler searches for its scale;
    a scaler that has found its scale skips 1 in 2000.
    Cannot see: steps that the training loop skips by itself.
    """

    name = "scaler_skips"
    needs = sources("step_skipped")
    thresholds = ("share",)
    share: float = 0.2
    patience = 2
    stride = 10
    meaning = "{figure:.0%} of the last 50 steps were skipped because gradients overflow."
    advice = "search for the layer whose gradients overflow, or train in bfloat16"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve = history.now("step_skipped")
        if curve is not None and curve.count >= 100:
            share = sum(curve.tail(50)) / 50
            yield Score(share / self.share, share)
