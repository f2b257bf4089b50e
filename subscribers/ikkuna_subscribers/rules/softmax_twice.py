"""Probabilities that are given to a loss that expects logits."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["SoftmaxTwiceRule"]


class SoftmaxTwiceRule(Rule):
    r"""The outputs are probabilities, but the loss applies the softmax again.

    The loss is then that of logits between 0 and 1, and cannot fall below :math:`\log(1 + (C - 1)/e)`.
    Threshold: every row is non-negative and sums to 1 within 0.001, and the loss is the cross-entropy of their softmax.
    Cannot see: a sigmoid applied twice (that is the rule sigmoid_twice); a loss with weights of classes.
    """

    name = "softmax_twice"
    needs = sources("output_is_probability", "output_cross_entropy", "loss")
    judged_on = frozenset(("output_cross_entropy",))
    severity = "error"
    explains = frozenset(
        ("no_learning", "ignores_input", "vanishing_gradient", "lr_too_low", "class_collapse", "plateau")
    )
    meaning = "The outputs are probabilities, and the loss applies the softmax to them a second time."
    advice = "remove the softmax from the model, or use NLLLoss with log-probabilities"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the outputs are probabilities and the loss treats them as logits."""
        flag, mean, loss = (history.now(kind) for kind in (*self.needs,))
        if flag is None or mean is None or loss is None:
            return
        is_softmax = abs(loss.last - mean.last) < 0.05 * abs(mean.last)
        yield Score(float(flag.last == 1 and is_softmax), flag.last)
