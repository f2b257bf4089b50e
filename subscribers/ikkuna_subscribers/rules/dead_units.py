"""Units that are never active."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.dead_units import DeadUnitsSubscriber

__all__ = ["DeadUnitsRule"]

_RECTIFIERS = ("ReLU", "ReLU6")


class DeadUnitsRule(Rule):
    """Nearly all units of a rectified layer are inactive for every sample of a window.

    Threshold: 90% of the units, for 3 samples in a row; healthy runs stay below 31%, half of the units is common in fine-tuned networks.
    Cannot see: rectifiers that are functions and not modules (the rule zero_gradient sees those that are wholly dead);
    other activation functions.
    """

    name = "dead_units"
    needs = sources("activations_dead")
    thresholds = ("share",)
    share: float = 0.9
    severity = "error"
    explains = frozenset(
        (
            *("signal_lost",),
            *("ignores_input", "no_learning", "lr_too_low", "signal_scale", "vanishing_gradient", "zero_gradient"),
            *("class_collapse", "rank_collapse", "plateau", "never_moves", "update_ratio"),
        )
    )
    meaning = "{figure:.0%} of the units of this layer are inactive for every sample."
    advice = "lower the learning rate, check the bias and the initialisation of the layer before it, or use a leaky rectifier"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the rectified layers."""
        names = network.named(*_RECTIFIERS)
        if not names:
            return ()
        return (DeadUnitsSubscriber(modules=list(names), window=3, inactivity=0, tau=None, subsample=2 * every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each rectified layer."""
        for name, curve in history.fresh("activations_dead"):
            if history.network.class_of(name) in (*_RECTIFIERS, ""):
                yield Score(curve.last / self.share, curve.last, name)
