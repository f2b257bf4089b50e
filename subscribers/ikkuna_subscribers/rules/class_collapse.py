"""Predictions of a single class."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import guessing_loss
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["ClassCollapseRule"]


class ClassCollapseRule(Rule):
    """A classifier predicts nearly always the same class, while the labels are of several.

    The figure is the entropy of the predicted classes over that of the labels.
    Threshold: 0.02, for 8 samples in a row, if no class has more than 90% of the labels (entropy above 0.33 nats);
    an untrained or slow network does this too, so the rule is silent while the loss falls, unless it is above 1.3 log C.
    Cannot see: a collapse onto two classes of many.
    """

    name = "class_collapse"
    needs = sources("prediction_entropy", "label_entropy", "output_cross_entropy")
    uses = sources("output_classes")
    thresholds = ("share",)
    share: float = 0.02
    patience = 8
    explains = frozenset(
        (
            "logit_growth",
            "plateau",
        )
    )
    meaning = "The network predicts always the same class (entropy {figure:.2g} of that of the labels)."
    advice = "check class weights, the learning rate, and the bias of the last layer"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        predicted, labels, loss = (history.now(kind) for kind in (*self.needs,))
        if predicted is None or labels is None or loss is None or labels.median(10) < 0.33:
            return
        figure = predicted.median(5) / labels.median(10)
        is_worse_than_a_guess = loss.median(5) > 1.3 * guessing_loss(history)
        falls = loss.count < 15 or loss.median(5) < 0.97 * loss.median(5, skip=10)
        yield Score(0.0 if falls and not is_worse_than_a_guess else self.share / max(figure, 1e-6), figure)
