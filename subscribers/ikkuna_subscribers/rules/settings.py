"""Rules about the settings of optimizers and schedulers."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.history import middle
from ikkuna.diagnosis.mistakes import names
from ikkuna_subscribers.rules.figures import sources
from ikkuna_subscribers.training import OptimizerStateSubscriber


class BetasRule(Rule):
    r"""The optimizer averages gradients over a longer time than their squares: the two betas are exchanged.

    The figure is :math:`(1 - \beta_2) / (1 - \beta_1)`, the time of the momentum over that of the squares, 0.01 by default.
    Threshold: 5; for exchanged defaults it is 100, and for (0.9, 0.8) it is 2.
    Cannot see: optimizers whose settings have other names.
    """

    name = "betas"
    severity_while_falling = "warning"
    needs = sources("optimizer_beta1", "optimizer_beta2")
    thresholds = ("factor",)
    factor: float = 5.0
    patience = 1
    explains = names("diverges lr_too_high loss_spike plateau no_learning update_ratio")
    meaning = "The optimizer averages gradients {figure:.0f} times as long as their squares: the betas are exchanged."
    advice = "use betas=(0.9, 0.999), the first of which is that of the momentum"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each parameter group."""
        squares = history.curves("optimizer_beta2")
        for name, curve in history.fresh("optimizer_beta1"):
            other = squares.get(name or None)
            if other is not None and curve.last < 1:
                figure = (1 - other.last) / (1 - curve.last)
                yield Score(figure / self.factor, figure, name or None)


class EpsilonRule(Rule):
    r"""The epsilon of Adam is as large as the gradients, so that each step is far smaller than the learning rate.

    The figure is :math:`\epsilon / (\epsilon + \sqrt{\hat v})` with the mean of the squares :math:`\hat v`, corrected for its bias,
    the median over up to three small weights.
    Threshold: 0.5 for all samples of the first 100 steps, of which at least 5 are known; with the usual epsilon of 1e-8 it is near 1e-5.
    Cannot see: an epsilon that begins to dominate when the gradients have become small, as at the end of a training.
    """

    name = "epsilon"
    severity_while_falling = "info"
    needs = sources("weight_state_exp_avg_sq_mean", "optimizer_epsilon", "optimizer_beta2")
    judged_on = frozenset(("weight_state_exp_avg_sq_mean",))
    thresholds = ("share",)
    share: float = 0.5
    patience = 1
    explains = names("lr_too_low no_learning plateau update_ratio never_moves")
    meaning = "The optimizer's epsilon is {figure:.0%} of what it divides by: its steps are far smaller than the learning rate."
    advice = "lower eps to 1e-8, or find out why the gradients are that small: a loss that is divided twice, or a tiny scale of targets"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the squares of up to three of the smallest weights."""
        entries = [entry for entry in network.modules if any(role == "weight" for role, _ in entry.parameters)]
        entries.sort(key=lambda entry: entry.count)
        chosen = [entry.name for entry in entries if entry.count <= 65_536][-3:] or [
            entry.name for entry in entries[:1]
        ]
        return (OptimizerStateSubscriber("exp_avg_sq", "mean", modules=chosen, subsample=every),) if chosen else ()

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network, in the first 100 steps."""
        epsilon, beta = history.curve("optimizer_epsilon"), history.curve("optimizer_beta2")
        squares = [curve.last for _, curve in history.fresh("weight_state_exp_avg_sq_mean")]
        if epsilon is None or beta is None or not squares or not history.is_complete or history.step > 100:
            return
        if not (0 <= beta.last < 1 and epsilon.last >= 0):
            return
        correction = 1 - beta.last ** (history.step + 1)
        shares = [epsilon.last / (epsilon.last + math.sqrt(value / correction)) for value in squares if value > 0]
        if not shares:
            return
        memory = history.memory[self.name]
        smallest = memory["share"] = min(middle(shares), memory.get("share", 1.0))
        number = memory["samples"] = memory.get("samples", 0) + 1
        yield Score(smallest / self.share if number >= 5 else 0.0, smallest)


_ROUNDING = 1e-4  # of a relative update in single precision
_ONLY_DECAY = "Nothing else changes this weight."
_FREEZE = (
    "if the weight is meant to stay as it is, call requires_grad_(False) or give it a group without decay; "
    "otherwise find out why its gradient is zero"
)


class DecayDominatesRule(Rule):
    """The weight decay shrinks the weights quickly, and is most of what the optimizer does.

    The figure is the number of steps in which the decay alone reduces a weight to 1/e of its size, one over the product of learning rate
    and decay.
    Threshold: 500 steps, if in addition the decay is half of the update, in the median over the weight matrices, for 5 samples in a row;
    AdamW with 1e-3 and 0.01 has 100,000 steps, SGD with 0.1 and 5e-4 has 20,000.
    If the decay is all that changes some of the matrices, within 0.01%, these are named.
    Cannot see: the decay of ``torch.optim.Adam``, which is a part of its gradient; groups of which only some have a decay.
    """

    name = "decay_dominates"
    severity_while_falling = "warning"
    needs = sources("optimizer_weight_decay", "learning_rate", "weight_updates_weights_ratio")
    judged_on = frozenset(("weight_updates_weights_ratio",))
    thresholds = ("steps", "share")
    steps: float = 500.0
    share: float = 0.5
    patience = 5
    explains = names(
        "weight_decay rank_collapse vanishing_gradient ignores_input no_learning class_collapse signal_lost dead_units plateau "
        "zero_gradient lr_too_low running_statistics"
    )
    meaning = (
        "The weight decay alone reduces the weights to 1/e within {figure:.0f} steps, and is most of their updates."
    )
    advice = "lower the weight decay; 0.01 to 0.1 is usual for AdamW, and 1e-4 to 5e-4 for SGD"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        decays, rates = history.curves("optimizer_weight_decay"), history.curves("learning_rate")
        shrinking = [decays[name].last * rates[name].last for name in decays if name in rates]
        moved = [(name, c.last) for name, c in history.matrices("weight_updates_weights_ratio") if c.last > 0]
        if not shrinking or not moved or not min(shrinking) > 0:
            return
        slowest = min(shrinking)
        score = min(slowest * self.steps, slowest / middle([ratio for _, ratio in moved]) / self.share)
        only = [name for name, ratio in moved if any(abs(ratio / each - 1) < _ROUNDING for each in shrinking)]
        if 0 < len(only) < len(moved):
            yield from (Score(score, 1 / slowest, name, detail=_ONLY_DECAY, advice=_FREEZE) for name in only)
        else:
            yield Score(score, 1 / slowest)


class SchedulePastEndRule(Rule):
    """The learning rate is a cosine that has come to its end and rises again.

    The scheduler is called more often than it was made for, as ``CosineAnnealingLR(optimizer, epochs)`` that is called once per batch.
    Threshold: the rate has fallen below a tenth of its largest value and risen above nine tenths again two times, and its latest values are
    those of one cosine within 0.1% of its largest value.  Cycles with straight lines and warm restarts, which jump, are silent.
    Cannot see: a period of fewer than four read values, that is eight steps; a rate that stays low (that is the rule lr_vanished).
    """

    name = "schedule_past_end"
    severity_while_falling = "warning"
    needs = sources("learning_rate")
    thresholds = ("rises",)
    rises: float = 2.0
    patience = 1
    stride = 10
    explains = names("loss_spike plateau lr_vanished gradient_spike gradient_jump update_ratio")
    meaning = "The learning rate has risen again {figure:.0f} times after its cosine had come to its end."
    advice = "call scheduler.step() once per epoch, or make the scheduler with the number of all batches"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each parameter group."""
        for name, curve in history.fresh("learning_rate"):
            values, steps = curve.tail(400), list(curve.steps)[-400:]
            rises = _rises(values)
            if rises and _is_cosine(values[-60:], steps[-60:]):
                yield Score(rises / self.rises, float(rises), name or None)
            else:
                yield Score(0.0, float(rises), name or None)


class RateSquaredRule(Rule):
    """The largest learning rate of a schedule is the square of the rate that the optimizer was made with.

    The function of a ``LambdaLR`` returns the rate, where a factor is wanted that is multiplied by it.
    Threshold: the largest rate is the square of the initial one, within 0.1%, for 3 samples in a row after 30 steps without a larger one.
    Cannot see: a function whose largest value is another rate than that of the optimizer.
    """

    name = "rate_squared"
    severity_while_falling = "warning"
    needs = sources("learning_rate", "optimizer_initial_rate")
    judged_on = frozenset(("optimizer_initial_rate",))
    explains = names("lr_too_low lr_vanished no_learning plateau update_ratio lost_updates")
    meaning = "The learning rate is at most {figure:.3g}, the square of the optimizer's rate: the schedule multiplies the rate by itself."
    advice = "let the function of LambdaLR return a factor, 1 for the rate of the optimizer"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each parameter group."""
        initial, memory = history.curves("optimizer_initial_rate"), history.memory[self.name]
        for name, curve in history.curves("learning_rate").items():
            before, since = memory.get(name, (0.0, history.step))
            largest = max([before, *curve.values])
            since = history.step if largest > before else since
            memory[name] = largest, since
            if (base := initial.get(name)) is not None and base.last < 1:
                square = base.last**2
                is_square = square > 0 and abs(largest - square) < 1e-3 * square
                yield Score(float(is_square and history.step - since >= 30), largest, name or None)


def _rises(values: list[float]) -> int:
    """Return how often values have risen from below a tenth to above nine tenths of their largest value.

    Examples
    --------
    >>> _rises([1.0, 0.5, 0.0, 0.5, 1.0, 0.05, 0.95])
    2
    """
    largest, count, is_low = max(values), 0, False
    for value in values:
        if value < 0.1 * largest:
            is_low = True
        elif is_low and value > 0.9 * largest:
            count, is_low = count + 1, False
    return count


def _is_cosine(values: list[float], steps: list[int]) -> bool:
    r"""Return whether values at equal distances are those of one cosine.

    With the middle m of a cosine, :math:`x_{k+1} + x_{k-1} - 2m = 2 \cos(\omega) (x_k - m)`: a line through the points
    :math:`(x_k, x_{k+1} + x_{k-1})`, which has no other slope than that of a cosine of at least four values a period.
    """
    if len(values) < 12 or len({b - a for a, b in pairwise(steps)}) != 1:
        return False
    points = [(now, before + after) for before, now, after in zip(values, values[1:], values[2:], strict=False)]
    x, y = (sum(part) / len(points) for part in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    slope = sum((a - x) * (b - y) for a, b in points) / spread if spread > 0 else math.nan
    largest = max(abs(value) for value in values)
    is_line = all(abs(b - y - slope * (a - x)) < 1e-3 * largest for a, b in points)
    return is_line and -1e-6 < slope < 1.999
