"""A loss that stopped falling early."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["PlateauRule"]


class PlateauRule(Rule):
    """The loss has not fallen below its level of long ago, and is still near its first value.

    The median of the last 100 steps is compared with that of the 100 steps before the last 200, in units of its noise.
    Threshold: less than 0.5% lower, and above 0.9 times the first value, for 50 steps in a row (5 judgements).
    A loss without a trend is usual for adversarial networks and reinforcement learning; the finding is therefore only an info.
    Cannot see: a plateau at a low loss, which is the end of most trainings; the first 300 steps.
    """

    name = "plateau"
    needs = sources("loss")
    thresholds = ("share",)
    share: float = 0.9
    severity = "info"
    patience = 5
    stride = 10
    meaning = "The loss has stayed at {figure:.3g} for 300 steps, near its first value."
    advice = "check the learning rate, and whether labels and inputs belong together"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score every tenth step."""
        curve = history.now("loss")
        if curve is None or curve.count < 320:
            return
        recent, before, first = curve.median(100), curve.median(100, skip=200), middle(curve.first)
        is_flat = recent > 0.995 * before and first > 0
        yield Score(recent / first / self.share if is_flat else 0.0, recent)
