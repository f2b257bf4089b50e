"""A learning rate that is far too low."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_figures import guessing_loss, median_ratio
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LrTooLowRule"]


class LrTooLowRule(Rule):
    """The network is untrained, its loss is where it began, and a step moves the weights by less than 1e-4 of their size.

    Threshold: 1e-4 for the median over weight matrices in every sample so far, from step 50 on,
    while the loss is above 0.95 times its first value
    and above 0.85 log C at the start; healthy runs have 1e-3, the smallest healthy value was 8e-4 under these conditions.
    Cannot see: losses that are no classification; fine-tuning with a rate that is too low, which looks like careful fine-tuning.
    """

    name = "lr_too_low"
    needs = sources("weight_updates_weights_ratio", "loss", "output_cross_entropy", "output_classes")
    judged_on = frozenset(("weight_updates_weights_ratio",))
    thresholds = ("ratio",)
    ratio: float = 1e-4
    patience = 5
    explains = frozenset(("no_learning", "plateau", "update_ratio", "class_collapse"))
    meaning = "A step moves the weights by only {figure:.1g} of their size, and the loss does not fall."
    advice = "raise the learning rate by a factor of 10 to 100"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score from step 50 on."""
        loss, first = history.curve("loss"), history.curve("output_cross_entropy")
        ratio, guess = median_ratio(history), guessing_loss(history)
        if loss is None or first is None or not ratio > 0 or not history.is_complete:
            return
        memory = history.memory[self.name]
        largest = memory["ratio"] = max(ratio, memory.get("ratio", 0.0))
        if history.step < 50:
            return
        is_flat = loss.median(10) > 0.95 * middle(loss.first[:5])
        is_untrained = first.first[0] > 0.85 * guess if math.isfinite(guess) else False
        yield Score(self.ratio / largest if is_flat and is_untrained else 0.0, largest)
