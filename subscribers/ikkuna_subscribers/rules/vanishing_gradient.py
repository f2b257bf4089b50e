"""Gradients that vanish on their way to the first layers."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import gradient_scales
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["VanishingGradientRule"]


class VanishingGradientRule(Rule):
    """The gradient of a weight matrix is far smaller than the largest of the network.

    The figure is the root mean square of a gradient over the largest of all matrices.
    Threshold: 1e-4, for 5 samples in a row; healthy runs stay above 1.6e-3.
    A deep LSTM that has learned only how frequent each token is, and does not use its state yet, falls to 1e-5.
    Cannot see: a gradient that is exactly zero (that is the rule zero_gradient); weights of embeddings and of norms.
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
        scales = gradient_scales(history)
        largest = max((scale for _, scale in scales), default=0.0)
        for name, scale in scales[:-1]:
            figure = scale / largest if largest > 0 else 1.0
            yield Score(self.share / figure if figure > 0 else 0.0, figure, name)
