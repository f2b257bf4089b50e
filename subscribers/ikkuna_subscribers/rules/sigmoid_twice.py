"""Probabilities that are given to a binary loss that expects logits."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["SigmoidTwiceRule"]


class SigmoidTwiceRule(Rule):
    r"""The outputs went through a sigmoid, but the loss applies the sigmoid again.

    The loss is then that of logits between 0 and 1, and a label of 0 costs at least :math:`\log 2`.
    Threshold: every output so far is between 0 and 1, and the loss is the binary cross-entropy of their sigmoid within 5%.
    In addition, the last module of the network is a sigmoid, or the outputs come within 0.05 of 1 in 20 samples without exceeding it.
    Cannot see: a loss with weights of classes or samples; a sigmoid in a function whose outputs stay below 0.95.
    """

    name = "sigmoid_twice"
    needs = sources("output_in_unit_interval", "output_binary_cross_entropy", "output_magnitude", "loss")
    judged_on = frozenset(("output_binary_cross_entropy",))
    severity = "error"
    explains = frozenset(("no_learning", "ignores_input", "vanishing_gradient", "lr_too_low", "saturated", "plateau"))
    meaning = "The outputs are between 0 and 1, and the loss applies the sigmoid to them a second time."
    advice = "remove the sigmoid from the model, or use BCELoss"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the outputs are those of a sigmoid and the loss treats them as logits."""
        flag, entropy, largest, loss = (history.now(kind) for kind in (*self.needs,))
        if flag is None or entropy is None or largest is None or loss is None:
            return
        is_bounded = min(*flag.first, *flag.values) == 1
        is_applied = abs(loss.last - entropy.last) < 0.05 * abs(entropy.last)
        modules = history.network.modules
        is_sigmoid = bool(modules) and modules[-1].class_name == "Sigmoid"
        is_at_limit = sum(value > 0.95 for value in largest.values) >= 20
        yield Score(float(is_bounded and is_applied and (is_sigmoid or is_at_limit)), largest.last)
