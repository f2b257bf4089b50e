"""An optimizer that is created again and again."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.optimizer_state import OptimizerStateSubscriber

__all__ = ["OptimizerResetRule"]


class OptimizerResetRule(Rule):
    """The optimizer's own count of steps does not grow: it is created again, and its state is lost.

    Threshold: the count is below half of the number of steps since the sample before, for 3 samples in a row.
    Cannot see: optimizers without a count of steps, such as SGD; an optimizer that is created once more on purpose.
    """

    name = "optimizer_reset"
    needs = sources("weight_state_step_mean")
    severity = "error"
    explains = frozenset(("no_learning", "plateau"))
    meaning = "The optimizer has counted only {figure:.0f} steps since it was created, again and again."
    advice = "create the optimizer once, before the loop"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the count of one weight."""
        names = [entry.name for entry in network.modules if any(role == "weight" for role, _ in entry.parameters)]
        if not names:
            return ()
        return (OptimizerStateSubscriber("step", "mean", modules=names[len(names) // 2], subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for the first weight."""
        curve = history.now("weight_state_step_mean")
        if curve is not None and len(curve.values) > 1:
            between = curve.steps[-1] - curve.steps[-2]
            yield Score(float(curve.last - curve.values[-2] <= 0 and curve.last < between), curve.last)
