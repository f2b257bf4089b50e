"""Weights of which nearly all elements are near zero."""

from typing import ClassVar

from ikkuna.diagnosis import Rule, Score
from ikkuna_near_zero.near_zero import NearZeroSubscriber

__all__ = ["MostlyZeroRule"]


class MostlyZeroRule(Rule):
    """Nearly all elements of a weight are near zero.

    Threshold: a share of 0.9, for 3 samples in a row.
    Cannot see: weights that were pruned on purpose.
    """

    name = "mostly_zero"
    needs: ClassVar = {"weights_near_zero": 'NearZeroSubscriber("weights")'}  # kind → the subscriber that publishes it
    thresholds = ("share",)
    share: float = 0.9
    meaning = "{figure:.0%} of the elements of this weight are near zero."
    advice = "use a larger initialisation, or a lower weight decay"

    def subscribers(self, network, every):  # registered while a model trains, unless the user has registered one
        return (NearZeroSubscriber("weights", every=every),)

    def scores(self, history):  # 1 or more is bad; the same code judges live and stored runs
        for name, curve in history.fresh("weights_near_zero"):
            yield Score(curve.last / self.share, curve.last, name)
