"""NaN or infinite values, and where they come from."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NonFiniteRule"]


class NonFiniteRule(Rule):
    """The loss, an activation, a gradient or a weight is NaN or infinite.

    The module is the first one whose activation is not finite although its weights are; if only gradients are not finite, the last one.
    If `NonFiniteSubscriber` publishes the producer, that is used.
    Threshold: a fact, without a number.
    Cannot see: the exact producer if the first NaN appears in a step that is not sampled; steps that a gradient scaler skips.
    """

    name = "nonfinite"
    needs = sources("weights_norm2")
    uses = sources("loss", "activations_variance", "weight_gradients_norm2", "nonfinite_producer")
    judged_on = frozenset(("weights_norm2", "activations_variance", "weight_gradients_norm2", "nonfinite_producer"))
    severity = "error"
    patience = 1
    explains = frozenset(
        (
            *(
                "diverges",
                "no_learning",
                "loss_spike",
                "dead_units",
                "ignores_input",
                "class_collapse",
                "zero_gradient",
            ),
            *("never_moves", "plateau", "saturated", "vanishing_gradient", "gradient_spike", "lost_updates"),
        )
    )
    meaning = "The values are NaN or infinite."
    advice = "lower the learning rate, clip gradients, check the data; NonFiniteSubscriber() names the operation"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for the module that comes first, or for the network if only the loss is not finite."""
        if history.memory[self.name].get("found"):
            return
        found = self._producer(history) or self._module(history)
        if found is None:
            loss = history.now("loss")
            if loss is not None and not math.isfinite(loss.last):
                found = Score(1.0, loss.last, None, "loss")
        history.memory[self.name]["found"] = found is not None
        yield found or Score(0.0, 0.0)

    @staticmethod
    def _producer(history: History) -> Score | None:
        return next(
            (Score(1.0, 1.0, name, "nonfinite_producer") for name, _ in history.fresh("nonfinite_producer")), None
        )

    @staticmethod
    def _module(history: History) -> Score | None:
        """Return the first module that makes NaN of finite weights, or the first broken weight."""
        weights = {name: curve.last for name, curve in history.fresh("weights_norm2")}
        broken = [name for name, value in weights.items() if not math.isfinite(value)]
        for name, curve in history.fresh("activations_variance"):
            module = name.partition(":")[0]
            own_weights_are_finite = not any(other == module or other.startswith(f"{module}.") for other in broken)
            if curve.last != curve.last and (own_weights_are_finite or not broken) and not broken:
                return Score(1.0, curve.last, name, "activations_variance")
        if broken:
            return Score(1.0, weights[broken[0]], broken[0], "weights_norm2")
        gradients = [(name, curve.last) for name, curve in history.fresh("weight_gradients_norm2")]
        bad = [(name, value) for name, value in gradients if not math.isfinite(value)]
        return Score(1.0, bad[-1][1], bad[-1][0], "weight_gradients_norm2") if bad else None
