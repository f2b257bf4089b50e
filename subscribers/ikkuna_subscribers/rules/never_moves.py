"""Weights that an optimizer owns and that never change."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NeverMovesRule"]

_SAMPLES = 5


class NeverMovesRule(Rule):
    """A weight receives gradients and is in an optimizer, but no element of it changes.

    Threshold: a fact, in 5 samples in a row; in the first sample if the learning rate of one group is 0 and that of another is not,
    because the learning rates of all groups are 0 at the start of a warm-up.
    Cannot see: a part of a weight that does not change (that is the rule lost_updates).
    """

    name = "never_moves"
    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    uses = sources("learning_rate")
    judged_on = frozenset(needs)
    patience = 1
    explains = frozenset(("no_learning", "lr_too_low", "plateau"))
    meaning = "The weight receives gradients, but its updates are exactly zero."
    advice = "check the learning rate of its parameter group, and whether updates are lost in bfloat16 or float16"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each weight with a gradient and without an update."""
        gradients = history.curves("weight_gradients_norm2")
        rates = [curve.last for curve in history.curves("learning_rate").values()]
        needed = 1 if any(rates) and not all(rates) else _SAMPLES
        memory = history.memory[self.name]
        for name, curve in history.fresh("weight_updates_norm2"):
            gradient = gradients.get(name)
            has_gradient = gradient is not None and gradient.step == history.step and gradient.last > 0
            is_still = curve.last == 0 and has_gradient
            memory[name] = seen = [*memory.get(name, ()), history.step][:_SAMPLES] if is_still else []
            yield Score(float(len(seen) >= needed), 0.0, name, step=seen[0] if seen else None)
