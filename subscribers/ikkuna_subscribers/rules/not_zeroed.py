"""Gradients that are carried over from earlier steps."""

from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score
from ikkuna_subscribers._helpers.rule_figures import gradient_growth
from ikkuna_subscribers._helpers.rule_sources import sources

__all__ = ["NotZeroedRule"]


class NotZeroedRule(Rule):
    """The gradients that the optimizer uses outgrow those of a single backward pass: they are not cleared.

    The figure is the norm of the gradient at the optimizer's step over that of one backward pass, the median over weights,
    compared with its value in the first sample, which accumulation explains.
    Threshold: 3 times the first value, and 3; without ``zero_grad()`` it reaches 10 within 30 steps.
    Cannot see: gradients that are cleared in some steps.
    """

    name = "not_zeroed"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2")
    uses = sources("unowned_parameters")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 3.0
    severity = "error"
    patience = 1
    explains = frozenset(
        (
            *(
                "diverges",
                "nonfinite",
                "lr_too_high",
                "no_learning",
                "dead_units",
                "class_collapse",
            ),
            *("ignores_input", "loss_spike", "vanishing_gradient", "saturated", "gradient_spike", "update_ratio"),
            *("plateau", "zero_gradient", "logit_growth", "overfit"),
        )
    )
    meaning = "The gradient at the optimizer's step is {figure:.0f} times that of one backward pass, and grows."
    advice = "call optimizer.zero_grad() in every step"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        growth = gradient_growth(history)
        if growth != growth:
            return
        first = history.memory[self.name].setdefault("first", growth if history.is_complete else max(growth, 1.0))
        yield Score(growth / max(1.0, first) / self.factor, growth)
