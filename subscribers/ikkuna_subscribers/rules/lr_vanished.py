"""A learning rate that a schedule has reduced to nothing."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LrVanishedRule"]


class LrVanishedRule(Rule):
    """The learning rate is far below its largest value, for many steps.

    A scheduler of epochs that is called in every batch does this.
    Threshold: 1/10000 of the largest value, for 30 steps; a cosine schedule is below that for the last 0.6% of its steps only.
    Cannot see: a rate that falls to a hundredth too early.
    """

    name = "lr_vanished"
    needs = sources("learning_rate")
    thresholds = ("share", "steps")
    share: float = 1e-4
    steps: float = 30
    patience = 1
    stride = 10
    explains = frozenset(("lr_too_low", "no_learning", "plateau", "update_ratio", "lost_updates", "never_moves"))
    meaning = "The learning rate has fallen to {figure:.1g}, less than 1/10000 of its largest value."
    advice = "check whether the scheduler is called once per epoch or once per batch"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each parameter group."""
        memory = history.memory[self.name]
        for name, curve in history.fresh("learning_rate"):
            largest, since = memory.get(name, (0.0, history.step))
            largest = max(largest, *curve.tail(self.stride))
            if curve.last > self.share * largest or largest == 0:
                since = history.step
            memory[name] = largest, since
            yield Score((history.step - since) / self.steps, curve.last, name or None)
