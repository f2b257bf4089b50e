"""A learning rate that is far too high."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.ratio import RatioSubscriber

__all__ = ["LrTooHighRule"]


class LrTooHighRule(Rule):
    """One of the first steps moves the weights of half of the layers by a third of their size or more.

    Threshold: 0.3 within the first 30 steps; a healthy step moves about 1/1000, the largest healthy value was 0.09.
    Cannot see: weights that are zero at first; a rate that is too high only by a factor of a few; optimizers that evaluate the model
    themselves, such as LBFGS, one step of which may move a linear model to its minimum.
    """

    name = "lr_too_high"
    needs = sources("weight_updates_weights_ratio")
    uses = sources("optimizer_closure")
    judged_on = frozenset(needs)
    thresholds = ("ratio",)
    ratio: float = 0.3
    severity = "error"
    patience = 1
    explains = frozenset(
        (
            *("dead_units", "diverges", "no_learning", "ignores_input", "vanishing_gradient"),
            *(
                "loss_spike",
                "nonfinite",
                "saturated",
                "class_collapse",
                "zero_gradient",
                "update_ratio",
                "rank_collapse",
                "plateau",
            ),
            *("logit_growth", "gradient_spike"),
        )
    )
    meaning = "A step moves half of the layers by {figure:.0%} of their weights or more."
    advice = "lower the learning rate by a factor of 10 to 100, or begin with a warm-up"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the ratio."""
        return (RatioSubscriber(["weight_updates", "weights"], subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score in the first 30 steps."""
        if history.step > 30 or not history.is_complete or history.curve("optimizer_closure") is not None:
            return
        ratio = middle([curve.last for _, curve in history.matrices("weight_updates_weights_ratio")])
        if ratio == ratio:
            yield Score(ratio / self.ratio, ratio)
