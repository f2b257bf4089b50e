"""Experts that receive no tokens, or nearly all of them."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["IdleExpertsRule"]


class IdleExpertsRule(Rule):
    """Half of the experts of a router receive no token, so the network has fewer parameters than it seems to have.

    Threshold: half of the experts, over the window of `RouterSubscriber`, for 3 samples in a row;
    a router without a loss that balances the load usually keeps a few dead experts, which is no mistake of the loop.
    Cannot see: routers without `RouterSubscriber`, because the number of experts of a token is not known;
    experts that are uneven without being dead (that is the rule overloaded_experts).
    """

    name = "idle_experts"
    needs = sources("dead_experts")
    thresholds = ("share",)
    share: float = 0.5
    explains = frozenset(("overloaded_experts",))
    meaning = "{figure:.0%} of the experts of this router have received no token for a whole window."
    advice = "add or increase the loss that balances the load, or the noise of the router"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each router."""
        for name, curve in history.fresh("dead_experts"):
            yield Score(curve.last / self.share, curve.last, name)
