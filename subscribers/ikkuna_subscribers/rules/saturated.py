"""Activations at the limits of tanh or sigmoid."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["SaturatedRule"]


class SaturatedRule(Rule):
    """The outputs of a tanh or a sigmoid are nearly all at its limits.

    The figure is the mean square of the tanh's outputs, or of 2h - 1 for a sigmoid: 1 if every output is at a limit.
    Threshold: 0.75, for 3 samples in a row; healthy layers stay below 0.6.
    Cannot see: activation functions inside recurrent layers, or that are no modules; a sigmoid at the output, which is left out.
    """

    name = "saturated"
    needs = sources("activations_variance", "activations_mean")
    thresholds = ("share",)
    share: float = 0.75
    explains = frozenset(
        ("vanishing_gradient", "ignores_input", "no_learning", "class_collapse", "rank_collapse", "plateau")
    )
    meaning = "The outputs of this layer are at the limits of its activation function (mean square {figure:.2f} of 1)."
    advice = "use a smaller initialisation or learning rate, or a normalisation in front of it"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each bounded layer but the last one."""
        means, network = history.curves("activations_mean"), history.network
        last = max((network.position(name) for name in means), default=0)
        for name, curve in history.fresh("activations_variance"):
            class_name = network.class_of(name)
            if class_name not in ("Tanh", "Sigmoid") or name not in means or network.position(name) >= last:
                continue
            mean, variance = means[name].last, curve.last
            figure = variance + mean**2 if class_name == "Tanh" else 4 * variance + (2 * mean - 1) ** 2
            yield Score(figure / self.share, figure, name)
