"""Experts that receive far more tokens than the others."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["OverloadedExpertsRule"]


class OverloadedExpertsRule(Rule):
    """An expert of a router receives many times the mean number of tokens.

    The figure is the load of the fullest expert over the window of `RouterSubscriber`.
    Threshold: 4 times the mean, for 3 samples in a row; at the capacity factors of Fedus et al. (2021), 1 to 2,
    half of its tokens are dropped then, and without a capacity the others wait for it.
    With two tokens for an expert in a sample, chance gives about 2 in a window of 10.
    Cannot see: routers without `RouterSubscriber`, because the number of experts of a token is not known;
    routers whose tokens choose a quarter of the experts or more, of which none can have this load.
    """

    name = "overloaded_experts"
    needs = sources("window_load_max")
    thresholds = ("load",)
    load: float = 4.0
    meaning = "One expert of this router receives {figure:.1f} times the mean number of tokens."
    advice = "add or increase the loss that balances the load, or lower the learning rate of the router"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each router."""
        for name, curve in history.fresh("window_load_max"):
            yield Score(curve.last / self.load, curve.last, name)
