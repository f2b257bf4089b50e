"""A frozen weight between trainable ones."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["FrozenInsideRule"]


class FrozenInsideRule(Rule):
    """A weight matrix is frozen although one before it and one behind it are trained.

    Networks are usually frozen from the input on, or everywhere but in adapters.
    The rule is silent if most of the matrices are frozen.
    Threshold: at most a quarter of the matrices.
    Cannot see: a layer that is frozen on purpose; the finding is therefore only an info.
    """

    name = "frozen_inside"
    needs = sources("weight_requires_grad")
    thresholds = ("share",)
    share: float = 0.25
    severity = "info"
    patience = 1
    meaning = "The weight is frozen, while weights before and behind it are trained."
    advice = "call requires_grad_(True) if this is not intended"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each frozen matrix behind a trained one."""
        curves = history.curves("weight_requires_grad")
        flags = [(name, curve.last > 0) for name, curve in curves.items() if name and history.network.is_matrix(name)]
        trained = [i for i, (_, is_trained) in enumerate(flags) if is_trained]
        if not trained:
            return
        inside = [name for name, is_trained in flags[trained[0] : trained[-1]] if not is_trained]
        if 0 < len(inside) <= max(self.share * len(flags), 1):
            yield from (Score(1.0, 0.0, name) for name in inside)
