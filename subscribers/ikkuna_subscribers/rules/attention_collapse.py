"""Attention heads that attend to a single key."""

from collections.abc import Iterator
from statistics import median

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["AttentionCollapseRule"]


class AttentionCollapseRule(Rule):
    """The attention of half of the heads of a module has no entropy left, though it had at first.

    The figure is the median over heads of the evenness, the entropy over that of even attention.
    Threshold: 0.02, in 3 samples in a row, if the first sample was above 0.2; heads that attend to one key,
    such as that before, are usual, but not half of all heads from a start that is even.
    Cannot see: attention that `AttentionSubscriber` does not measure; a collapse before the first sample.
    """

    name = "attention_collapse"
    needs = sources("attention_evenness")
    thresholds = ("evenness",)
    evenness: float = 0.02
    explains = frozenset(("vanishing_gradient", "plateau", "no_learning"))
    meaning = "Half of the heads of this module attend to a single key (evenness {figure:.2g})."
    advice = "lower the learning rate, lengthen the warm-up, or normalise queries and keys"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each module with attention."""
        heads: dict[str, list[tuple[float, float]]] = {}
        for name, curve in history.fresh("attention_evenness"):
            if curve.last == curve.last and curve.first[0] == curve.first[0]:
                heads.setdefault(name.partition(":")[0], []).append((curve.first[0], curve.last))
        for module, values in heads.items():
            begin, figure = (median(column) for column in zip(*values, strict=True))
            if begin > 0.2:
                yield Score(self.evenness / max(figure, 1e-9), figure, module)
