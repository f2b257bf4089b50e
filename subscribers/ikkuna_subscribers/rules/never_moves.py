"""Weights that an optimizer owns and that never change."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NeverMovesRule"]


class NeverMovesRule(Rule):
    """A weight receives gradients and is in an optimizer, but no element of it changes.

    Threshold: a fact, without a number, for 5 samples in a row.
    Cannot see: a part of a weight that does not change (that is the rule lost_updates).
    """

    name = "never_moves"
    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    patience = 5
    explains = frozenset(("no_learning", "lr_too_low", "plateau"))
    meaning = "The weight receives gradients, but its updates are exactly zero."
    advice = "check the learning rate of its parameter group, and whether updates are lost in bfloat16 or float16"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each weight with a gradient and without an update."""
        gradients = history.curves("weight_gradients_norm2")
        for name, curve in history.fresh("weight_updates_norm2"):
            gradient = gradients.get(name)
            has_gradient = gradient is not None and gradient.step == history.step and gradient.last > 0
            yield Score(float(curve.last == 0 and has_gradient), 0.0, name)
