"""Hidden layers whose outputs differ in a single direction."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import stays_below
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.dimension import DimensionSubscriber

__all__ = ["RankCollapseRule"]

_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "GRU", "LSTM", "RNN")
_FEW_UNITS = 16
_LASTING = 15


class RankCollapseRule(Rule):
    """The outputs of a hidden layer differ in a single direction, although there are several classes.

    Rows are the outputs for samples and positions.
    The figure is the participation ratio of the covariance of the layer's units, the median of the last 5 samples.
    Threshold: 1.001, for 5 samples in a row: half a thousandth of the variance is left for all other directions; healthy runs
    of classifiers stay above 1.1, and a language model that learns only how frequent each token is, for up to 200 steps, falls to 1.004.
    Therefore figures below 1.02 count only after 15 samples that do not rise.
    It was chosen after about 30 of the runs below had been seen; with other seeds and architectures it named 19 of 20 planted layers,
    each in its module, and none in 36 healthy runs.
    Cannot see: the outputs of the network (that is the rule ignores_input); layers with fewer than 16 units;
    losses that are no classification; fewer than four classes, because a network that tells two classes apart needs one direction;
    attention, whose rank falls between positions and not between samples.
    """

    name = "rank_collapse"
    needs = sources("activations_dimension", "output_classes")
    judged_on = frozenset(("activations_dimension",))
    thresholds = ("limit", "lasting_limit")
    limit: float = 1.001
    lasting_limit: float = 1.02
    patience = 5
    explains = frozenset(("no_learning", "plateau", "class_collapse", "vanishing_gradient", "overfit"))
    meaning = "The outputs of this layer differ in {figure:.3g} directions only."
    advice = "look for a bottleneck, a product or a mean that keeps one number of each sample; check normalisation and initialisation"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the layers with weights, without those with few units."""
        names = [
            name for name in network.named(*_WEIGHTED) if (network.shape_of(name) or (_FEW_UNITS,))[0] >= _FEW_UNITS
        ]
        return (DimensionSubscriber(modules=names, subsample=2 * every),) if names else ()

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each hidden layer."""
        classes = history.curve("output_classes")
        if classes is None or not 4 <= classes.last < math.inf:
            return
        outputs = round(classes.last)
        for name, curve in history.fresh("activations_dimension"):
            if (history.network.shape_of(name) or (0,))[0] == outputs:
                continue
            figure = curve.median(5)
            if figure == figure:
                is_lasting = stays_below(curve, self.lasting_limit, _LASTING)
                yield Score((self.lasting_limit if is_lasting else self.limit) / figure, figure, name)
