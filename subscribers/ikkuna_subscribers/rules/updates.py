"""Rules about learning rates and updates."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score, TimeSeries
from ikkuna.diagnosis.history import middle
from ikkuna.diagnosis.mistakes import names
from ikkuna.numerics.prediction import initial_logit_deviation
from ikkuna_subscribers.rules.figures import WEIGHTED, guessing_loss, median_ratio, noise_of_loss, sources
from ikkuna_subscribers.updates import RatioSubscriber


class LostUpdatesRule(Rule):
    """Most elements of the weights with a gradient do not change in a step, because the weights' dtype rounds the update away.

    The figure is the share of changed elements over the share of elements with a gradient, the median over the weight matrices.
    Threshold: 0.25; in float32 it is near 1, in bfloat16 with a usual learning rate 0.1 (measured on four model families).
    Cannot see: optimizers that add noise or keep the rounding error, which lose nothing.
    """

    name = "lost_updates"
    severity_while_falling = "info"
    needs = sources("weight_updates_sparsity", "weight_gradients_sparsity")
    thresholds = ("share",)
    share: float = 0.25
    severity = "error"
    explains = names("no_learning lr_too_low never_moves plateau")
    meaning = "Only {figure:.0%} of the elements that receive a gradient change in a step; the rest is rounded away."
    advice = "keep the weights in float32 (autocast), use stochastic rounding, or a larger learning rate"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        gradients = dict(history.matrices("weight_gradients_sparsity"))
        shares = [
            (1 - curve.last) / (1 - gradients[name].last)
            for name, curve in history.matrices("weight_updates_sparsity")
            if name in gradients and gradients[name].last < 0.9
        ]
        share = middle(shares)
        if share == share and share > 0:
            yield Score(self.share / share, share)


class LrTooHighRule(Rule):
    """One of the first steps moves the weights of half of the layers by a third of their size or more.

    The rule is silent if the network has a single weight matrix, whose first values may be small by chance, and leaves out weights that
    begin near zero, below 0.01 of the usual root mean square of the weights, as those of adapters, and steps of weights that have shrunk
    to half of their first norm, as by weight decay.  From step 10 on it looks at
    what such a step has led to: the next ones are as large, or hardly move the weights any more, or the loss has risen.
    It also finds steps that make half of the layers of torch larger than any usual initialisation, if they began within one, and the loss
    is known and has not fallen by half: otherwise the steps fit a task whose weights are large.
    Threshold: 0.3 within the first 30 steps; a healthy step moves about 1/1000, the largest healthy value was 0.09.
    1.25 times the initialisation of He et al. (2015) by the smaller number of units, after a step of 0.1; healthy runs stay below 0.73.
    Cannot see: weights that begin near zero; a rate that is too high only by a factor of a few; optimizers that evaluate the model
    themselves, such as LBFGS, one step of which may move a linear model to its minimum.
    """

    name = "lr_too_high"
    version = 3
    severity_while_falling = "info"
    needs = sources("weight_updates_weights_ratio")
    uses = sources("optimizer_closure", "loss", "weights_norm2")
    judged_on = frozenset(needs)
    thresholds = ("ratio",)
    ratio: float = 0.3
    severity = "error"
    patience = 1
    explains = names(
        "dead_units diverges no_learning ignores_input vanishing_gradient loss_spike nonfinite saturated class_collapse zero_gradient "
        "update_ratio rank_collapse plateau logit_growth gradient_spike gradient_jump"
    )
    meaning = "A step moves half of the layers by {figure:.3g} times their weights or more."
    advice = "lower the learning rate by a factor of 10 to 100, or begin with a warm-up"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the ratio."""
        return (RatioSubscriber(["weight_updates", "weights"], subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score in the first 30 steps."""
        if history.step > 30 or not history.is_complete or history.curve("optimizer_closure") is not None:
            return
        memory = history.memory[self.name]
        near_zero = _near_zero(history, memory)
        ratios = [c.last for name, c in history.matrices("weight_updates_weights_ratio") if name not in near_zero]
        ratio = middle(ratios)
        if ratio != ratio or len(ratios) < 2:
            return
        if ratio > memory.get("ratio", 0.0) and not _share_of_first_norm(history) < 0.5:
            memory["ratio"], memory["at"] = ratio, history.step
        largest, at = memory.get("ratio", 0.0), memory.get("at")
        loss, first = history.curve("loss"), memory.setdefault("first", history.step)
        has_risen = loss is not None and _has_risen(loss)
        if has_risen or (history.step >= first + 10 and not 0.01 * largest < ratio < self.ratio):
            yield Score(largest / self.ratio, largest, step=at)
        elif loss is not None and largest >= self.ratio / 3 and not _is_halved(loss) and _has_left_its_start(history):
            yield Score(1.0, largest, step=at, detail=_LARGE)


def _share_of_first_norm(history: History) -> float:
    """Return the norm of a weight matrix over its first norm, the median over the matrices; NaN without any."""
    return middle([c.last / c.first[0] for _, c in history.matrices("weights_norm2") if c.first[0] > 0])


_LARGE = "After a few steps, half of the layers have larger weights than any usual initialisation makes."


def _has_left_its_start(history: History) -> bool:
    """Return whether half of the layers of torch are larger than any usual initialisation makes them, and began within one."""
    network, left = history.network, []
    for name, curve in history.matrices("weights_norm2"):
        shape = network.shape_of(name)
        if shape and curve.first[0] > 0 and network.class_of(name) in WEIGHTED:
            first, now = (norm / math.sqrt(network.size_of(name)) for norm in (curve.first[0], curve.last))
            left.append(
                initial_logit_deviation(shape, first) > 0 and now > first and not initial_logit_deviation(shape, now)
            )
    return bool(left) and 2 * sum(left) >= len(left)


def _is_halved(loss: TimeSeries) -> bool:
    return not loss.median(5) > 0.5 * loss.first[0]


def _has_risen(loss: TimeSeries) -> bool:
    """Whether the last three losses are above the first one, by a tenth of it and by more than chance."""
    first, recent = loss.first[0], loss.median(3)
    return not (recent < 1.1 * first or recent - first < 3 * noise_of_loss(loss, abs(first)))


class LrTooLowRule(Rule):
    """The network is untrained, its loss is where it began, and a step moves the weights by less than 1e-4 of their size.

    Threshold: 1e-4 for the median over weight matrices in every sample so far, from step 50 on,
    while the loss is above 0.95 times its first value
    and above 0.85 log C at the start; healthy runs have 1e-3, the smallest healthy value was 8e-4 under these conditions.
    Cannot see: losses that are no classification; fine-tuning with a rate that is too low, which looks like careful fine-tuning.
    """

    name = "lr_too_low"
    severity_while_falling = "info"
    needs = sources("weight_updates_weights_ratio", "loss", "output_cross_entropy", "output_classes")
    judged_on = frozenset(("weight_updates_weights_ratio",))
    thresholds = ("ratio",)
    ratio: float = 1e-4
    patience = 5
    explains = names("no_learning plateau update_ratio class_collapse")
    meaning = "A step moves the weights by only {figure:.1g} of their size, and the loss does not fall."
    advice = "raise the learning rate by a factor of 10 to 100"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score from step 50 on."""
        loss, first = history.curve("loss"), history.curve("output_cross_entropy")
        ratio, guess = median_ratio(history), guessing_loss(history)
        if loss is None or first is None or not ratio > 0 or not history.is_complete:
            return
        memory = history.memory[self.name]
        largest = memory["ratio"] = max(ratio, memory.get("ratio", 0.0))
        if history.step < 50:
            return
        is_flat = loss.median(10) > 0.95 * middle(loss.first[:5])
        is_untrained = first.first[0] > 0.85 * guess if math.isfinite(guess) else False
        yield Score(self.ratio / largest if is_flat and is_untrained else 0.0, largest)


class LrVanishedRule(Rule):
    """The learning rate is far below its largest value, for many steps.

    A scheduler of epochs that is called in every batch does this.
    Threshold: 1/10000 of the largest value, for 30 steps; a cosine schedule is below that for the last 0.6% of its steps only.
    Or 1/100 of it, for 200 steps and twice as many as it took from the largest value to fall there; a cosine is below that for the last 6%.
    Cannot see: a rate that falls to a tenth too early.
    """

    name = "lr_vanished"
    version = 2
    severity_while_falling = "info"
    needs = sources("learning_rate")
    thresholds = ("share", "steps", "low_share", "low_steps")
    share: float = 1e-4
    steps: float = 30
    low_share: float = 1e-2
    low_steps: float = 200
    patience = 1
    stride = 10
    explains = names("lr_too_low no_learning plateau update_ratio lost_updates never_moves")
    meaning = (
        "The learning rate has fallen to {figure:.1g} early, and stays there, less than 1/100 of its largest value."
    )
    advice = "check whether the scheduler is called per epoch or per batch, and the mode and patience of one that waits for a plateau"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each parameter group."""
        memory, step = history.memory[self.name], history.step
        for name, curve in history.fresh("learning_rate"):
            largest, top, since, low = memory.get(name, (0.0, step, step, step))
            recent = max(curve.tail(self.stride))
            if recent >= largest:
                largest, top = recent, step
            if curve.last > self.share * largest or largest == 0:
                since = step
            if curve.last > 1.001 * self.low_share * largest or largest == 0:
                low = step
            memory[name] = largest, top, since, low
            is_low = (step - low) / max(self.low_steps, 2.0 * (low - top))
            yield Score(max((step - since) / self.steps, is_low), curve.last, name or None)


_SAMPLES = 5
_NO_RATE = "The learning rate is 0 in every parameter group."
_SCHEDULE = "check the schedule of the learning rate: a warm-up that divides whole numbers with // stays at 0"


class NeverMovesRule(Rule):
    """A weight receives gradients and is in an optimizer, but no element of it changes.

    Threshold: a fact, in 5 samples in a row; in the first sample if the learning rate of one group is 0 and that of another is not,
    because the learning rates of all groups are 0 at the start of a warm-up.  A sample counts only if half of the other weights change by
    more than 1e-5 of their size: while a rate that the optimizer finds by itself is near 1e-6, rounding explains weights that stay.
    If no weight changes, 20 samples in a row are needed, or 3 samples over 20 steps in which every learning rate is 0: a warm-up is over
    its 0 by then.
    Cannot see: a part of a weight that does not change (that is the rule lost_updates).
    """

    name = "never_moves"
    severity_while_falling = "warning"
    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    uses = sources("learning_rate", "weights_norm2")
    judged_on = frozenset(needs)
    patience = 1
    explains = names("no_learning lr_too_low plateau")
    meaning = "The weight receives gradients, but its updates are exactly zero."
    advice = "check the learning rate of its parameter group, and whether updates are lost in bfloat16 or float16"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each weight with a gradient and without an update."""
        gradients = history.curves("weight_gradients_norm2")
        rates = [curve.last for curve in history.curves("learning_rate").values()]
        moved = [curve.last for _, curve in history.fresh("weight_updates_norm2") if curve.last > 0]
        has_no_rate = bool(rates) and not any(rates)
        needed = 1 if any(rates) and not all(rates) else _SAMPLES if moved else 4 * _SAMPLES
        if moved and _usual_change(history) < 1e-5:
            return
        memory = history.memory[self.name]
        for name, curve in history.fresh("weight_updates_norm2"):
            gradient = gradients.get(name)
            has_gradient = gradient is not None and gradient.step == history.step and gradient.last > 0
            is_still = curve.last == 0 and has_gradient
            memory[name] = seen = [*memory.get(name, ()), history.step][: 4 * _SAMPLES] if is_still else []
            is_found = len(seen) >= needed or (
                has_no_rate and len(seen) >= 3 and history.step - seen[0] >= 4 * _SAMPLES
            )
            detail, advice = (_NO_RATE, _SCHEDULE) if has_no_rate else ("", "")
            yield Score(float(is_found), 0.0, name, step=seen[0] if seen else None, detail=detail, advice=advice)


def _usual_change(history: History) -> float:
    """Return the norm of an update over that of its weight, the median over the weights that moved; NaN if it is unknown."""
    sizes = history.curves("weights_norm2")
    moved = [(name, curve.last) for name, curve in history.fresh("weight_updates_norm2") if curve.last > 0]
    return middle([update / sizes[name].last for name, update in moved if name in sizes and sizes[name].last > 0])


class UpdateRatioRule(Rule):
    """The updates of one weight matrix are a large part of it, and far larger than those of the others.

    The figure is the norm of an update over that of the weight; after step 30 the median of the last 5 samples.
    Threshold: 1 in the first 30 steps, 0.1 later, and 30 times the median of the network;
    1/1000 is usual (Karpathy).  Weights that begin near zero, below 0.01 of the usual root mean square of the weights, are left out:
    they start high and settle, with a warm-up after more than 40 steps.  Against the first threshold, a weight that is smaller than usual
    counts as large as usual: the step of a layer that begins small on purpose, as the last one of a policy with a gain of 0.01, is far only
    in relation to this weight.
    Weights in front of a normalisation are left out in the first 30 steps, unless the rates of two groups differ by as much: they grow
    with each large step, which makes the next one smaller.  The first step of a ResNet-50 of the usual initialisation is 1.2 to 9 times
    its first weight, and the network learns.
    Cannot see: weights that begin near zero, as those of adapters; a network that moves too fast as a whole (that is the rule lr_too_high).
    """

    name = "update_ratio"
    version = 3
    severity_while_falling = "info"
    needs = sources("weight_updates_weights_ratio")
    uses = sources("weights_norm2", "learning_rate")
    judged_on = frozenset(("weight_updates_weights_ratio", "weights_norm2"))
    thresholds = ("ratio", "factor")
    ratio: float = 0.1
    factor: float = 30.0
    patience = 1
    origin = "worst"
    explains = names("rank_collapse loss_spike")
    meaning = "Each step changes this weight by {figure:.3g} times its norm, far more than the others."
    advice = "lower the learning rate of this layer, or check its initialisation"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix."""
        is_early = history.step <= 30
        number, limit = (1, 10 * self.ratio) if is_early else (5, self.ratio)
        figures = [(name, c.median(number)) for name, c in history.matrices("weight_updates_weights_ratio")]
        usual, near_zero = middle([figure for _, figure in figures]), _near_zero(history, history.memory[self.name])
        sizes = _sizes(history)
        usual_size = middle([size for size in sizes.values() if size > 0])
        rates = [curve.last for curve in history.curves("learning_rate").values() if curve.last > 0]
        have_one_rate = not rates or max(rates) < self.factor * min(rates)
        for name, figure in figures:
            is_left_out = name in near_zero or (is_early and have_one_rate and history.network.is_normalised(name))
            if figure > 0 and usual > 0 and len(figures) > 2 and not is_left_out:
                share = min(sizes.get(name, math.inf) / usual_size, 1.0) if usual_size > 0 else 1.0
                yield Score(min(share * figure / limit, figure / usual / self.factor), figure, name)


def _sizes(history: History) -> dict[str, float]:
    """Return the root mean square of each weight matrix."""
    size_of = history.network.size_of
    return {name: curve.last / math.sqrt(size_of(name)) for name, curve in history.matrices("weights_norm2")}


def _near_zero(history: History, memory: dict[str, Any]) -> set[str]:
    """Return the matrices whose first weights are far smaller than those of the others; a rule remembers them."""
    size_of, matrices = history.network.size_of, history.matrices("weights_norm2")
    known, names = memory.get("near_zero", ((), set())), tuple([name for name, _ in matrices])
    if names != known[0]:
        scales = {name: curve.first[0] / math.sqrt(size_of(name)) for name, curve in matrices}
        usual = middle([scale for scale in scales.values() if scale > 0])
        known = memory["near_zero"] = names, {name for name, scale in scales.items() if scale < 0.01 * usual}
    found: set[str] = known[1]
    return found


class WeightDecayRule(Rule):
    """The weight matrices have shrunk to a small part of what they were.

    Threshold: 0.3 of their first norm for the median over matrices, for 3 samples in a row; healthy runs stay above 0.8.
    If no optimizer has a weight decay, something else shrinks them, and the finding says so.
    Cannot see: weights that shrink and are meant to, as by pruning.
    """

    name = "weight_decay"
    version = 2
    severity_while_falling = "info"
    needs = sources("weights_norm2")
    uses = sources("optimizer_weight_decay")
    judged_on = frozenset(needs)
    thresholds = ("share",)
    share: float = 0.3
    explains = names(
        "vanishing_gradient ignores_input no_learning dead_units class_collapse rank_collapse plateau zero_gradient"
    )
    meaning = "The weights have shrunk to {figure:.0%} of their first norm."
    advice = "lower the weight decay, or its product with the learning rate"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        share = _share_of_first_norm(history)
        decays = [curve.last for curve in history.curves("optimizer_weight_decay").values()]
        text, advice = ("", "") if any(decays) or not decays else (_NO_DECAY, _OTHERS)
        if share >= 0:
            yield Score(self.share / max(share, 1e-9), share, detail=text, advice=advice)


_NO_DECAY = "No optimizer has a weight decay."
_OTHERS = "search for what else changes the weights: a clamp, a mask, a copy, or a penalty in the loss"
