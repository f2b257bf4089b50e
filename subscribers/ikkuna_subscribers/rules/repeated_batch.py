"""The same batch in every step."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["RepeatedBatchRule"]


class RepeatedBatchRule(Rule):
    """The inputs of every sampled step are the same.

    Training on one batch, or on all data in every step, does this on purpose; the finding is therefore only an info.
    Threshold: mean and variance of the inputs are equal to the last bit, for 5 samples in a row.
    Cannot see: a batch that is repeated with noise.
    """

    name = "repeated_batch"
    needs = sources("input_data_mean", "input_data_variance")
    severity = "info"
    patience = 5
    meaning = "Every sampled step has the same inputs."
    advice = "check the sampler and the data loader"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the inputs are those of the sample before."""
        mean, variance = history.now("input_data_mean"), history.now("input_data_variance")
        if mean is not None and variance is not None and mean.count > 1 and len(variance.values) > 1:
            same = mean.values[-2] == mean.last and variance.values[-2] == variance.last and variance.last > 0
            yield Score(float(same), mean.last)
