"""A layer that learns far faster than the others."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["UpdateRatioRule"]


class UpdateRatioRule(Rule):
    """The updates of one weight matrix are a large part of it, and far larger than those of the others.

    The figure is the norm of an update over that of the weight; after step 30 the median of the last 5 samples.
    Threshold: 1 in the first 30 steps, 0.1 later, and 30 times the median of the network;
    1/1000 is usual (Karpathy), and weights that begin near zero start high and settle: those below 0.01 of the usual root mean square
    of the weights are left out in the first 30 steps.
    Weights in front of a normalisation are left out in the first 30 steps: they grow with each large step, which makes the next one
    smaller.  The first step of a ResNet-50 of the usual initialisation is 1.2 to 9 times its first weight, and the network learns.
    Cannot see: a network that moves too fast as a whole (that is the rule lr_too_high).
    """

    name = "update_ratio"
    needs = sources("weight_updates_weights_ratio")
    uses = sources("weights_norm2")
    thresholds = ("ratio", "factor")
    ratio: float = 0.1
    factor: float = 30.0
    patience = 1
    origin = "worst"
    explains = frozenset(
        (
            "rank_collapse",
            "loss_spike",
        )
    )
    meaning = "Each step changes this weight by {figure:.0%}, far more than the others."
    advice = "lower the learning rate of this layer, or check its initialisation"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix."""
        is_early = history.step <= 30
        number, limit = (1, 10 * self.ratio) if is_early else (5, self.ratio)
        figures = [(name, c.median(number)) for name, c in history.matrices("weight_updates_weights_ratio")]
        usual = middle([figure for _, figure in figures])
        for name, figure in figures:
            if is_early and (history.network.is_normalised(name) or _begins_near_zero(history, name)):
                continue
            if figure > 0 and usual > 0 and len(figures) > 2:
                yield Score(min(figure / limit, figure / usual / self.factor), figure, name)


def _begins_near_zero(history: History, name: str) -> bool:
    """Return whether the first weights of a matrix are far smaller than those of the others."""
    network = history.network
    sizes = {
        each: curve.first[0] / math.sqrt(network.size_of(each)) for each, curve in history.matrices("weights_norm2")
    }
    return name in sizes and sizes[name] < 0.01 * middle([*sizes.values()])
