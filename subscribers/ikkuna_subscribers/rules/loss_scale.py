"""A loss that is summed over the batch."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["LossScaleRule"]


class LossScaleRule(Rule):
    """The loss is the sum of the cross-entropies of a batch, not their mean.

    The gradient then grows with the size of the batch.
    Threshold: the loss is within 2% of the mean cross-entropy times the number of labels, for 3 samples in a row.
    Cannot see: other losses, and batches of more than 512 items, of which the cross-entropy is a sample.
    """

    name = "loss_scale"
    needs = sources("loss", "output_cross_entropy", "label_count")
    judged_on = frozenset(("output_cross_entropy",))
    thresholds = ("tolerance",)
    tolerance: float = 0.02
    explains = frozenset(
        (
            *("lr_too_high", "diverges", "nonfinite", "no_learning", "dead_units", "ignores_input", "lr_too_low"),
            *("loss_spike", "loss_at_init", "class_collapse", "update_ratio", "plateau", "zero_gradient"),
        )
    )
    meaning = "The loss is {figure:.0f} times the mean cross-entropy, which is the number of labels: it is a sum."
    advice = 'use reduction="mean", or divide the loss by the number of labels'

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the loss is the sum."""
        loss, mean, count = (history.now(kind) for kind in ("loss", "output_cross_entropy", "label_count"))
        if loss is None or mean is None or count is None or not mean.last > 0 or count.last < 4:
            return
        ratio = loss.last / mean.last
        yield Score(float(abs(ratio / count.last - 1) < self.tolerance), ratio)
