"""A test loss that rises while the training loss falls."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["OverfitRule"]


class OverfitRule(Rule):
    """The loss of another pass over data has risen from its best value and is twice that of training.

    Overfitting on purpose is usual; the finding is therefore only an info.
    Threshold: 1.05 times the best value, which is at least 3 passes old, for 2 passes in a row.
    Cannot see: runs without a pass named ``testing`` or ``validation``.
    """

    name = "overfit"
    needs = sources("loss")
    thresholds = ("factor", "passes")
    factor: float = 1.05
    passes: float = 3
    stride = 10
    severity = "info"
    patience = 2
    meaning = "The loss on held-out data is {figure:.2f} times its best value, while the training loss is less than half of it."
    advice = "stop earlier, use more data, augmentation, dropout or weight decay"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each pass over held-out data."""
        training = history.curve("loss")
        for name in ("testing", "validation"):
            curve = history.curve("loss", name)
            seen = history.memory[self.name]
            if curve is None or training is None or curve.count < 3 or seen.get(name) == curve.count:
                continue
            seen[name] = curve.count
            known = [value for value in curve.values if value == value]
            figure = curve.last / min(known) if known and min(known) > 0 else 0.0
            is_late = len(known) - known.index(min(known)) > self.passes if known else False
            yield Score(figure / self.factor if is_late and curve.last > 2 * training.median(20) else 0.0, figure)
