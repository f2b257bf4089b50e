"""Trainable parameters that no optimizer owns."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NotInOptimizerRule"]


class NotInOptimizerRule(Rule):
    """A trainable parameter belongs to no optimizer, so it never changes.

    Every optimizer of the process counts.
    Threshold: a fact, without a number.
    Cannot see: parameters of modules that are not observed; a run in which a step is made by hand.
    """

    name = "not_in_optimizer"
    needs = sources("unowned_parameters")
    severity = "error"
    patience = 1
    explains = frozenset(("no_learning", "lr_too_low", "plateau"))
    meaning = "No optimizer owns this parameter, so it is not trained, and optimizer.zero_grad() does not clear its gradients."
    advice = "pass it to the optimizer, or call requires_grad_(False) if it is meant to stay as it is"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each parameter without an optimizer."""
        for name, curve in history.fresh("unowned_parameters"):
            yield Score(curve.last if name else 0.0, 1.0, name or None)
