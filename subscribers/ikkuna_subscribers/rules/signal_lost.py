"""Outputs that do not differ between samples at the first step."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["SignalLostRule"]


class SignalLostRule(Rule):
    """Before the first update the outputs do not differ between samples: the signal is lost in the layers.

    Threshold: 1e-6 of the energy of the outputs; healthy networks have 0.005 or more, seven layers of sigmoids 1e-10.
    Cannot see: a last layer that begins at zero, which is a usual choice and is left out; a resumed run.
    """

    name = "signal_lost"
    needs = sources("output_dependence")
    uses = sources("weights_norm2")
    thresholds = ("share",)
    share: float = 1e-6
    patience = 1
    explains = frozenset(
        (
            *("ignores_input", "vanishing_gradient", "no_learning", "lr_too_low", "lr_too_high", "saturated"),
            *("class_collapse", "rank_collapse", "plateau", "gradient_spike", "update_ratio"),
        )
    )
    meaning = "Before the first update the outputs are the same for every sample; the share of their energy that differs is {figure:.2g}."
    advice = "look for a layer whose outputs are constant, as with a very negative bias; use a larger initialisation or a normalisation"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score at the first step."""
        curve = history.now("output_dependence")
        if curve is None or curve.step != 0:
            return
        norms = [series.last for _, series in history.matrices("weights_norm2")]
        begins_at_zero = bool(norms) and norms[-1] == 0
        yield Score(0.0 if begins_at_zero else self.share / max(curve.last, 1e-12), max(curve.last, 0.0))
