"""Gradients that grow on their way to the first layers."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import gradient_scales
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["ExplodingGradientRule"]


class ExplodingGradientRule(Rule):
    """At the first step the gradient of a weight matrix is far larger than that of the last one.

    Threshold: 100 times; healthy runs stay below 3.  Weights in front of a normalisation are left out: in a ResNet-50 of the usual
    initialisation their gradients are up to 1,000 times that of the last layer, and it learns.
    Cannot see: a gradient that explodes later (that is the rule gradient_spike).
    """

    name = "exploding_gradient"
    needs = sources("weight_gradients_norm2")
    thresholds = ("factor",)
    factor: float = 100.0
    patience = 1
    origin = "worst"
    explains = frozenset(("nonfinite", "diverges", "loss_spike", "no_learning", "plateau"))
    meaning = "At the first step the gradient of this weight is {figure:.0f} times that of the last layer."
    advice = "use a smaller initialisation, a normalisation, or clip gradients"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix at the first step."""
        if history.step != 0:
            return
        *scales, (_, last) = gradient_scales(history) or [("", 0.0)]
        for name, scale in scales:
            if last > 0 and not history.network.is_normalised(name):
                yield Score(scale / last / self.factor, scale / last, name)
