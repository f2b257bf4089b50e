"""Activations that are too large at the first step."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["SignalScaleRule"]

_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "GRU", "LSTM", "RNN")


class SignalScaleRule(Rule):
    """Before the first update the outputs of a layer with weights have a standard deviation far above 1.

    Threshold: 30; healthy networks stay below 10 (largest of 140 runs), and a residual stream grows with the root of its depth.
    The rule is silent if a module behind the layer is a normalisation, which removes the scale.
    Cannot see: a signal that becomes too small, which a normalisation or a zero initialisation does on purpose; a resumed run.
    """

    name = "signal_scale"
    needs = sources("activations_variance")
    thresholds = ("limit",)
    limit: float = 30.0
    patience = 1
    explains = frozenset(
        (
            *(
                "signal_lost",
                "logit_growth",
            ),
            *(
                "loss_at_init",
                "lr_too_high",
                "exploding_gradient",
                "no_learning",
                "diverges",
                "dead_units",
                "loss_spike",
            ),
            *(
                "ignores_input",
                "nonfinite",
                "saturated",
                "class_collapse",
                "update_ratio",
                "rank_collapse",
                "plateau",
                "zero_gradient",
            ),
        )
    )
    meaning = "Before the first update the outputs of this layer have a standard deviation of {figure:.3g}."
    advice = "use a smaller initialisation, a normalisation, or normalised inputs"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each layer at the first step."""
        if history.step != 0:
            return
        network = history.network
        last_norm = max((i for i, entry in enumerate(network.modules) if "Norm" in entry.class_name), default=-1)
        for name, curve in history.fresh("activations_variance"):
            if network.class_of(name) in _WEIGHTED and curve.last >= 0:
                scale = math.sqrt(curve.last)
                is_normalised = network.position(name) < last_norm
                yield Score(0.0 if is_normalised else scale / self.limit, scale, name)
