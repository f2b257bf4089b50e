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
    1/1000 is usual (Karpathy).  Weights that begin near zero, below 0.01 of the usual root mean square of the weights, are left out:
    they start high and settle, with a warm-up after more than 40 steps.
    Weights in front of a normalisation are left out in the first 30 steps: they grow with each large step, which makes the next one
    smaller.  The first step of a ResNet-50 of the usual initialisation is 1.2 to 9 times its first weight, and the network learns.
    Cannot see: weights that begin near zero, as those of adapters; a network that moves too fast as a whole (that is the rule lr_too_high).
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
        usual, near_zero = middle([figure for _, figure in figures]), _near_zero(history)
        for name, figure in figures:
            is_left_out = name in near_zero or (is_early and history.network.is_normalised(name))
            if figure > 0 and usual > 0 and len(figures) > 2 and not is_left_out:
                yield Score(min(figure / limit, figure / usual / self.factor), figure, name)


def _near_zero(history: History) -> set[str]:
    """Return the matrices whose first weights are far smaller than those of the others."""
    size_of = history.network.size_of
    scales = {name: curve.first[0] / math.sqrt(size_of(name)) for name, curve in history.matrices("weights_norm2")}
    usual = middle([*scales.values()])
    return {name for name, scale in scales.items() if scale < 0.01 * usual}
