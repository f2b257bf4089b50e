"""Trainable weights that backward never reaches."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NoGradientRule"]


class NoGradientRule(Rule):
    """Backward never reaches a trainable weight of a module that is called, but reaches others.

    Threshold: a fact, without a number.
    Cannot see: a gradient that is detached in some steps only; a module that is never called, because unused modules are common;
    an optimizer that fills missing gradients with zeros (that is the rule zero_gradient).
    """

    name = "no_gradient"
    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    uses = sources("weight_requires_grad", "activations_variance")
    severity = "error"
    origin = "last"
    explains = frozenset(
        ("signal_lost", "no_learning", "lr_too_low", "ignores_input", "never_moves", "plateau", "vanishing_gradient")
    )
    meaning = "The weight is trainable and in an optimizer, but no gradient ever reaches it, while others receive one."
    advice = "search for detach(), .data, torch.no_grad(), an argmax or a conversion to numpy behind this module"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each owned weight without a gradient."""
        reached = history.curves("weight_gradients_norm2")
        trainable = history.curves("weight_requires_grad")
        called = {history.network.module(name) for name in history.curves("activations_variance")}
        if not any(curve.step == history.step for curve in reached.values()):
            return
        for name, _ in history.fresh("weight_updates_norm2"):
            is_frozen = name in trainable and trainable[name].last == 0
            is_unused = bool(called) and history.network.module(name) not in called
            yield Score(float(name not in reached and not is_frozen and not is_unused), 0.0, name)
