"""A sudden rise of the loss."""

import math
from collections.abc import Iterator
from typing import Any

from ikkuna.diagnosis import History, Rule, Score, TimeSeries
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_figures import scale_of_loss
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LossSpikeRule"]


class LossSpikeRule(Rule):
    """The loss is suddenly above everything of the last thirty values, twice in a row.

    A value is the mean over at least 32 labels, so that tiny batches make no noise.
    Threshold: a fifth of the loss of a guess (or of the first loss) above the largest of them, and 6 robust deviations
    (median absolute deviation) above their median; healthy runs reach a third of this.
    Cannot see: the first 40 values; a spike that lasts one step; slow rises (that is the rule diverges).
    """

    name = "loss_spike"
    needs = sources("loss")
    uses = sources("output_classes", "label_count")
    judged_on = frozenset(("loss",))
    stride = 10
    thresholds = ("rise", "deviations")
    rise: float = 0.2
    deviations: float = 6.0
    patience = 1
    meaning = "The loss jumped to {figure:.3g}, far above its last thirty values."
    advice = "lower the learning rate, clip gradients, look at the batch and at the learning rate of this step"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield the worst score of the values since the last judgement."""
        curve, scale = history.now("loss"), scale_of_loss(history)
        if curve is None:
            return
        memory = history.memory[self.name]
        values, steps = memory.setdefault("values", []), memory.setdefault("steps", [])
        fresh = _add_means(memory, curve, _group(history))
        begin = max(len(values) - fresh, 39)
        if begin < len(values) and scale > 0:
            scores = [
                self._score(values[i - 31 : i - 1], values[i - 1 : i + 1], scale) for i in range(begin, len(values))
            ]
            worst = scores.index(max(scores))
            yield Score(scores[worst], max(values[begin + worst - 1 : begin + worst + 1]), step=steps[begin + worst])
        if len(values) > 80:
            del values[:-60], steps[:-60]

    def _score(self, past: list[float], now: list[float], scale: float) -> float:
        """Return how far two values are above the thirty before them; 0 if one of the two is not finite."""
        high, low, top = max(now), min(now), max(past)
        score = min((high - top) / scale / self.rise, (low - top) / scale / (0.1 * self.rise))
        if not score >= self.release or low == -math.inf:
            return 0.0 if low == -math.inf or not score > 0 else score
        known = [value for value in past if value > -math.inf]
        if len(known) < 20:
            return 0.0
        center = middle(known)
        deviation = max(1.4826 * middle([abs(value - center) for value in known]), 1e-9)
        return min(score, (high - center) / deviation / self.deviations)


def _group(history: History) -> int:
    """Return the number of steps that together have at least 32 labels."""
    counts = history.curve("label_count")
    usual = counts.median(20) if counts is not None else math.inf
    return max(math.ceil(32 / max(usual, 1)), 1) if usual > 0 else 1


def _add_means(memory: dict[Any, Any], curve: TimeSeries, group: int) -> int:
    """Append the means over groups of new values, and return their number.

    A mean that is not finite is stored as minus infinity.
    """
    used = max(memory.get("used", 0), curve.count - len(curve.values))
    number: int = (curve.count - used) // group
    first = len(curve.values) - (curve.count - used)
    for i in range(first, first + number * group, group):
        part = [curve.values[j] for j in range(i, i + group)]
        mean = sum(part) / group
        memory["values"].append(mean if math.isfinite(mean) else -math.inf)
        memory["steps"].append(curve.steps[i])
    memory["used"] = used + number * group
    return number
