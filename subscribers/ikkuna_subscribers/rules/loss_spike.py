"""A sudden rise of the loss."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
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
    thresholds = ("rise", "deviations")
    rise: float = 0.2
    deviations: float = 6.0
    patience = 1
    meaning = "The loss jumped to {figure:.3g}, far above its last thirty values."
    advice = "lower the learning rate, clip gradients, look at the batch and at the learning rate of this step"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score when a value is complete."""
        curve, counts = history.now("loss"), history.curve("label_count")
        if curve is None:
            return
        usual = counts.median(20) if counts is not None else math.inf
        group = max(math.ceil(32 / max(usual, 1)), 1) if usual > 0 else 1
        values = history.memory[self.name].setdefault("values", [])
        if curve.count % group:
            return
        values.append(math.fsum(curve.tail(group)) / group if group > 1 else curve.last)
        del values[:-33]
        scale = scale_of_loss(history)
        if len(values) < 33 or not scale > 0 or curve.count < 40 * group:
            return
        past = [value for value in values[-32:-2] if math.isfinite(value)]
        high, low = max(values[-2:]), min(values[-2:])
        if len(past) < 20 or not math.isfinite(high):
            return
        center, top = middle(past), max(past)
        deviation = max(1.4826 * middle([abs(value - center) for value in past]), 1e-9)
        scores = (high - top) / scale / self.rise, (low - top) / scale / (0.1 * self.rise), (high - center) / deviation
        yield Score(min(scores[0], scores[1], scores[2] / self.deviations), high)
