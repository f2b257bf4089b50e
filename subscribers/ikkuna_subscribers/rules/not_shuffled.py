"""Batches whose labels are not random."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NotShuffledRule"]


class NotShuffledRule(Rule):
    """The mean label differs far more from batch to batch than it does in random batches: the data is sorted.

    The figure is the variance of the batches' mean labels, times the size of a batch, over the variance within a batch: about 1 if random.
    Threshold: 5, and a twentieth of the variance of all labels between batches, for 5 samples in a row, over up to 40 samples;
    the largest figure of 140 healthy runs of classifiers was 2.6.  Of language models it was 10, because neighbouring tokens
    belong to one text, with a fiftieth of the variance between batches.
    Cannot see: data that is sorted by something else than the label; losses without class labels.
    """

    name = "not_shuffled"
    needs = sources("label_mean", "label_variance", "label_count")
    thresholds = ("factor", "share")
    factor: float = 5.0
    share: float = 0.05
    patience = 5
    explains = frozenset(("no_learning", "loss_spike", "diverges", "ignores_input", "class_collapse", "plateau"))
    meaning = "The mean label varies {figure:.0f} times as much from batch to batch as in random batches."
    advice = "shuffle the training data"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        mean, variance, count = (history.now(kind) for kind in (*self.needs,))
        if mean is None or variance is None or count is None or mean.count < 10:
            return
        means, variances, counts = mean.tail(40), variance.tail(40), count.tail(40)
        within = sum(v * n / max(n - 1, 1) for v, n in zip(variances, counts, strict=False)) / len(variances)
        center = sum(means) / len(means)
        between = sum((value - center) ** 2 for value in means) / (len(means) - 1)
        within = max(within, 0.02)
        figure = between * (sum(counts) / len(counts)) / within
        yield Score(min(figure / self.factor, between / (between + within) / self.share), figure)
