"""Running statistics of batch norm that part from those of the batch."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.time_series import middle
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.running_statistics import RunningStatisticsSubscriber

__all__ = ["RunningStatisticsRule"]


class RunningStatisticsRule(Rule):
    """The running mean or variance of a batch norm stays far from that of the batches, so evaluation differs from training.

    The figure is the distance of the mean in running standard deviations, or the distance of the logarithms of the variances.
    Threshold: 1.0, the median of 5 samples from step 100 on, for 3 samples in a row; with the usual momentum of 0.1 the running
    statistics have forgotten their initial values by step 50, and healthy layers stay below 0.3.
    Cannot see: statistics that are replaced between the last step and the evaluation; layers in evaluation mode.
    """

    name = "running_statistics"
    needs = sources("running_mean_distance", "running_variance_distance")
    thresholds = ("distance",)
    distance: float = 1.0
    explains = frozenset(("overfit",))
    meaning = "The running statistics of this batch norm are far from those of the batches ({figure:.2g}), so evaluation uses others."
    advice = "check the momentum, and whether other data pass through the network in training mode"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the batch-norm layers."""
        names = [entry.name for entry in network.modules if "BatchNorm" in entry.class_name]
        return (RunningStatisticsSubscriber(modules=names, subsample=every),) if names else ()

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each batch norm."""
        variances = history.curves("running_variance_distance")
        for name, curve in history.fresh("running_mean_distance"):
            if history.step - (history.begin or 0) < 100 or curve.count < 5:
                continue
            figure = max(curve.median(5), middle(variances[name].tail(5)) if name in variances else 0.0)
            yield Score(figure / self.distance, figure, name)
