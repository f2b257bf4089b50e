"""Weights whose gradient is exactly zero."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["ZeroGradientRule"]


class ZeroGradientRule(Rule):
    """The gradient of a weight matrix is exactly zero at every sample, while others are not.

    Either its inputs are zero, as those behind dead units are, or nothing reaches it from the loss, as behind a product with zero.
    Threshold: a fact, without a number, for 5 samples in a row.
    Cannot see: gradients that are tiny and not zero (that is the rule vanishing_gradient).
    """

    name = "zero_gradient"
    needs = sources("weight_gradients_norm2")
    severity = "error"
    patience = 5
    origin = "last"
    explains = frozenset(
        (
            "signal_lost",
            "no_learning",
            "lr_too_low",
            "ignores_input",
            "never_moves",
            "rank_collapse",
            "plateau",
            "vanishing_gradient",
        )
    )
    meaning = "Every gradient of the weight has been exactly zero, while other weights receive one."
    advice = (
        "look at its inputs, which are zero if the units of the layer before it are dead, "
        "and at what uses its output: a product with zero, or a branch that the loss does not use"
    )

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each matrix whose gradient is zero."""
        matrices = history.matrices("weight_gradients_norm2")
        some = any(curve.last > 0 for _, curve in matrices)
        for name, curve in matrices:
            is_zero_from_the_start = not any(curve.first)
            yield Score(
                float(some and curve.last == 0 and (is_zero_from_the_start or not any(curve.tail(20)))), 0.0, name
            )
