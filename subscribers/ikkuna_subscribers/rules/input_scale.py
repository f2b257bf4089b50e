"""Inputs that are not normalised."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["InputScaleRule"]


class InputScaleRule(Rule):
    """The inputs have a mean or a standard deviation far from that of normalised data.

    Threshold: 10, for 3 samples in a row; pixels from 0 to 255 have a deviation near 70, normalised data 1.
    Cannot see: inputs of networks with an embedding or with a normalisation as the first layer, which are left out;
    inputs that are too small.
    """

    name = "input_scale"
    needs = sources("input_data_mean", "input_data_variance")
    thresholds = ("limit",)
    limit: float = 10.0
    explains = frozenset(
        (
            *("signal_lost",),
            *("signal_scale", "loss_at_init", "lr_too_high", "dead_units", "no_learning", "ignores_input", "diverges"),
            *("exploding_gradient", "nonfinite", "vanishing_gradient", "class_collapse", "saturated", "loss_spike"),
            *("zero_gradient", "update_ratio", "plateau", "logit_growth"),
        )
    )
    meaning = "Mean or standard deviation of the inputs is {figure:.3g}."
    advice = "normalise the inputs to mean 0 and standard deviation 1"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for the first input."""
        mean, variance = history.now("input_data_mean"), history.now("input_data_variance")
        classes = [entry.class_name for entry in history.network.modules]
        first = next((name for name in classes if name not in ("Flatten", "Identity", "Unflatten")), "")
        if mean is None or variance is None or "Norm" in first or any("Embedding" in name for name in classes):
            return
        scale = max(abs(mean.last), max(variance.last, 0.0) ** 0.5)
        yield Score(scale / self.limit, scale, kind="input_data_variance")
