"""Gradients that vanish on their way to the first layers."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import gradient_scales
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["VanishingGradientRule"]


class VanishingGradientRule(Rule):
    """The gradients of the first weight matrices are far smaller than the largest of the network.

    The figure is the root mean square of a gradient over the largest of all matrices.
    Threshold: 1e-4 for all of the first matrices up to one, and for none behind it, for 5 samples in a row; healthy runs of classifiers
    stay above 1.6e-3.  Small gradients behind larger ones are not made by depth: those of queries and keys, on which a nearly even
    attention hardly depends, and those behind a layer scale of 1e-6.
    A deep LSTM that has learned only how frequent each token is, and does not use its state yet, falls to 1e-5.
    Cannot see: a gradient that is exactly zero (that is the rule zero_gradient); weights of embeddings and of norms;
    gradients that vanish only in a part of the network.
    """

    name = "vanishing_gradient"
    needs = sources("weight_gradients_norm2")
    thresholds = ("share",)
    share: float = 1e-4
    patience = 5
    origin = "last"
    explains = frozenset(("ignores_input", "no_learning", "plateau", "class_collapse"))
    meaning = "The gradient of this weight is only {figure:.1g} of the largest of the network."
    advice = "use rectifiers, residual connections, a normalisation or a larger initialisation"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix but the last one."""
        scales = [(name, scale) for name, scale in gradient_scales(history) if scale > 0]
        largest = max((scale for _, scale in scales), default=0.0)
        small = [scale <= self.share * largest for _, scale in scales]
        is_by_depth = small == sorted(small, reverse=True)
        for name, scale in scales[:-1]:
            yield Score(self.share * largest / scale if is_by_depth else 0.0, scale / largest, name)
