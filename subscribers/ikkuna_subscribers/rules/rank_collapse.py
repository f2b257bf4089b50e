"""Hidden layers whose outputs differ in a single direction."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.dimension import DimensionSubscriber

__all__ = ["RankCollapseRule"]

_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "GRU", "LSTM", "RNN")
_FEW_UNITS = 16


class RankCollapseRule(Rule):
    """The outputs of a hidden layer differ in a single direction, although there are several classes.

    Rows are the outputs for samples and positions.
    The figure is the participation ratio of the covariance of the layer's units, the median of the last 5 samples.
    Threshold: 1.02, for 5 samples in a row: one hundredth of the variance is left for all other directions;
    healthy runs stay above 1.1, and a representation that a network of texts has learned can fall so far.
    It was chosen after about 30 of the runs below had been seen; with other seeds and architectures it named 19 of 20 planted layers,
    each in its module, and none in 36 healthy runs.
    Cannot see: fewer than four classes, because a network that tells two classes apart needs one direction;
    losses that are no classification; layers with fewer than 16 units;
    attention, whose rank falls between positions and not between samples.
    """

    name = "rank_collapse"
    needs = sources("activations_dimension", "output_classes")
    judged_on = frozenset(("activations_dimension",))
    thresholds = ("limit",)
    limit: float = 1.02
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
        if classes is None or classes.last < 4:
            return
        for name, curve in history.fresh("activations_dimension"):
            figure = curve.median(5)
            if figure == figure:
                yield Score(self.limit / figure, figure, name)
