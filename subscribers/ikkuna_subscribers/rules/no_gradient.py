"""Trainable weights that backward never reaches."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NoGradientRule"]

_SAMPLES = 3


class NoGradientRule(Rule):
    """Backward never reaches a trainable weight of a module that is called, but reaches others.

    Threshold: a fact, in 3 samples in a row; in the first sample if exactly the weights from the input up to one layer have no gradient,
    because separate branches, whose losses may take turns, do not look like this.
    Cannot see: a gradient that is detached in some steps only; a module that is never called, because unused modules are common;
    an optimizer that fills missing gradients with zeros (that is the rule zero_gradient).
    """

    name = "no_gradient"
    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    uses = sources("weight_requires_grad", "activations_variance")
    severity = "error"
    patience = 1
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
        used = [
            name
            for name, _ in history.fresh("weight_updates_norm2")
            if not (name in trainable and trainable[name].last == 0)
            and not (called and history.network.module(name) not in called)
        ]
        flags = [name not in reached for name in used]
        is_certain = bool(called) and flags == sorted(flags, reverse=True)  # the unreached ones come first
        memory = history.memory[self.name]
        for name, is_unreached in zip(used, flags, strict=True):
            memory[name] = seen = [*memory.get(name, ()), history.step][:_SAMPLES] if is_unreached else []
            is_found = is_unreached and (is_certain or len(seen) == _SAMPLES)
            yield Score(float(is_found), 0.0, name, step=seen[0] if seen else None)
