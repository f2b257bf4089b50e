"""Rules about gradients."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.history import GRADIENTS, middle
from ikkuna.diagnosis.mistakes import EXPLODING_GRADIENT, NO_GRADIENT, VANISHING_GRADIENT, ZERO_GRADIENT, names
from ikkuna.numerics.spike_score import LIMIT
from ikkuna_subscribers.moments import GlobalNormSubscriber
from ikkuna_subscribers.rules.figures import gradient_growth, gradient_scales, is_of_classes, new_scores, sources


class ExplodingGradientRule(Rule, mistake=EXPLODING_GRADIENT):
    """At the first step the gradient of a weight matrix is far larger than that of the last one.

    The last matrix is that with a row for each class; without classes, the last in the order of registration.
    Threshold: 100 times; healthy runs stay below 3.  Weights in front of a normalisation are left out: in a ResNet-50 of the usual
    initialisation their gradients are up to 1,000 times that of the last layer, and it learns.
    Cannot see: a gradient that explodes later (that is the rule gradient_spike).
    """

    version = 2
    needs = sources("weight_gradients_norm2")
    uses = sources("output_classes")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 100.0
    patience = 1
    origin = "worst"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix at the first step."""
        if history.step != 0:
            return
        scales = gradient_scales(history)
        last_name, last = ([each for each in scales if is_of_classes(history, each[0])] or scales or [("", 0.0)])[-1]
        for name, scale in scales:
            if name != last_name and last > 0 and not history.network.is_normalised(name):
                yield Score(scale / last / self.factor, scale / last, name)


class VanishingGradientRule(Rule, mistake=VANISHING_GRADIENT):
    """The gradients of the first weight matrices are far smaller than the largest of the network.

    The figure is the root mean square of a gradient over the largest of all matrices.
    Threshold: 1e-4 for all of the first matrices up to one, and for none behind it, for 5 samples in a row; healthy runs of classifiers
    stay above 1.6e-3.  Small gradients behind larger ones are not made by depth: those of queries and keys, on which a nearly even
    attention hardly depends, and those behind a layer scale of 1e-6.
    A deep LSTM that has learned only how frequent each token is, and does not use its state yet, falls to 1e-5.
    Cannot see: a gradient that is exactly zero (that is the rule zero_gradient); weights of embeddings and of norms;
    gradients that vanish only in a part of the network.
    """

    needs = sources("weight_gradients_norm2")
    thresholds = ("share",)
    share: float = 1e-4
    patience = 5
    origin = "last"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each matrix but the last one."""
        scales = [(name, scale) for name, scale in gradient_scales(history) if scale > 0]
        largest = max((scale for _, scale in scales), default=0.0)
        small = [scale <= self.share * largest for _, scale in scales]
        is_by_depth = small == sorted(small, reverse=True)
        for name, scale in scales[:-1]:
            yield Score(self.share * largest / scale if is_by_depth else 0.0, scale / largest, name)


class GradientSpikeRule(Rule):
    """The gradients of half of the weight matrices are far above their usual size, for several samples in a row.

    Logarithms are compared: the median over matrices of the distance of the gradient's norm from the median of its last 20 samples.
    Threshold: a factor of 30, for 2 samples in a row.
    Cannot see: the first 10 samples; a single spike (that is the rule gradient_jump).
    """

    name = "gradient_spike"
    severity_while_falling = "info"
    needs = sources("weight_gradients_norm2")
    thresholds = ("factor",)
    factor: float = 30.0
    patience = 2
    explains = names("loss_spike nonfinite plateau gradient_jump")
    meaning = "The gradients are {figure:.0f} times as large as usual."
    advice = "lower the learning rate, or clip gradients at their usual norm"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        distances = []
        for _, curve in history.matrices("weight_gradients_norm2"):
            usual = curve.median(20, skip=2)
            if curve.count > 12 and usual > 0 and curve.last > 0:
                distances.append(math.log(curve.last / usual))
        distance = middle(distances)
        if distance == distance:
            yield Score(distance / math.log(self.factor), math.exp(min(distance, 700.0)))


class GradientJumpRule(Rule):
    """The norm of all gradients is in one step suddenly far above those of the steps before.

    Threshold: a spike score of 10, as for losses, see `ikkuna.numerics.spike_score`.
    The norm is that of the gradients as the optimizer receives them: where they are sampled, and on the host in steps between as often as
    reading them takes a thousandth of the time.  A step that was read so, and jumps, is measured itself from its optimizer on.
    An info, because one large gradient may do no harm; if it does, the loss shows that.
    Cannot see: the first 16 values; steps in which the norm is not read; gradients that are clipped.
    """

    name = "gradient_jump"
    severity = "info"
    needs = sources(GRADIENTS)
    uses = sources("loss", "weight_gradients_norm2")
    judged_on = frozenset(("loss",))
    stride = 10
    thresholds = ("deviations",)
    deviations: float = LIMIT
    patience = 1
    meaning = "The norm of the gradients jumped to {figure:.3g}, far above its last values."
    advice = "look at the batch of this step, and clip gradients at their usual norm"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the norm."""
        return (GlobalNormSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield the scores of the norms since the last judgement."""
        for step, norm, score in new_scores(history, GRADIENTS, history.memory[self.name]):
            value = min(score, 1e300) / self.deviations
            yield Score(
                value, norm, step=step, detail=_largest_growth(history) if value >= 1 and step == history.step else ""
            )


def _largest_growth(history: History) -> str:
    """Return a sentence about the weight whose gradient has grown most, if gradients are measured at the present step."""
    grown = [
        (curve.last**2 - curve.median(20, skip=1) ** 2, name)
        for name, curve in history.matrices("weight_gradients_norm2")
    ]
    return f"Most of it is in the gradient of {max(grown)[1]}." if grown else ""


class ClippedHardRule(Rule):
    """Clipping reduces the gradients to a small part of what backward gave, at every sample.

    Threshold: 1/100, for 5 samples in a row; with a usual clipping at norm 1 it is above 1/30 on four model families.
    Cannot see: clipping before an optimizer that ignores the scale of gradients, such as Adam, does little harm; the rule does not know it.
    """

    name = "clipped_hard"
    severity_while_falling = "info"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2")
    uses = sources("unowned_parameters")
    judged_on = frozenset(needs)
    thresholds = ("share",)
    share: float = 0.01
    patience = 5
    explains = names("lr_too_low lost_updates no_learning plateau update_ratio")
    meaning = "Clipping leaves only {figure:.2g} of the gradient, in every sample."
    advice = "raise the clipping threshold to about the usual norm of the gradient"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        growth = gradient_growth(history)
        if growth > 0:
            yield Score(self.share / growth, growth)


_SAMPLES = 3


class NoGradientRule(Rule, mistake=NO_GRADIENT):
    """Backward never reaches a trainable weight of a module that is called, but reaches others.

    Threshold: a fact, in 3 samples in a row; in the first sample if exactly the weights from the input up to one layer have no gradient,
    because separate branches, whose losses may take turns, do not look like this.
    Cannot see: a gradient that is detached in some steps only; a module that is never called, because unused modules are common;
    an optimizer that fills missing gradients with zeros (that is the rule zero_gradient).
    """

    needs = sources("weight_gradients_norm2", "weight_updates_norm2")
    uses = sources("weight_requires_grad", "activations_variance")
    patience = 1
    origin = "last"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each owned weight without a gradient."""
        reached = history.curves("weight_gradients_norm2")
        trainable = history.curves("weight_requires_grad")
        called = {history.network.module(name) for name in history.curves("activations_variance")}
        if not history.fresh("weight_gradients_norm2"):
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


class ZeroGradientRule(Rule, mistake=ZERO_GRADIENT):
    """The gradient of a weight matrix is exactly zero at every sample, while others are not.

    Either its inputs are zero, as those behind dead units are, or nothing reaches it from the loss, as behind a product with zero.
    Threshold: a fact, without a number, for 5 samples in a row.
    Cannot see: gradients that are tiny and not zero (that is the rule vanishing_gradient).
    """

    needs = sources("weight_gradients_norm2")
    patience = 5
    origin = "last"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each matrix whose gradient is zero."""
        matrices = history.matrices("weight_gradients_norm2")
        some = any(curve.last > 0 for _, curve in matrices)
        for name, curve in matrices:
            is_zero_from_the_start = not any(curve.first)
            yield Score(
                float(some and curve.last == 0 and (is_zero_from_the_start or not any(curve.tail(20)))), 0.0, name
            )


class NotZeroedRule(Rule):
    """The gradients that the optimizer uses outgrow those of a single backward pass: they are not cleared.

    The figure is the norm of the gradient at the optimizer's step over that of one backward pass, the median over weights,
    compared with its value in the first sample, which accumulation explains.
    The rule is silent if the first backward of the step has found no gradients: then something else has changed them, such as a division
    by their norm.
    Threshold: 3 times the first value, and 3; without ``zero_grad()`` it reaches 10 within 30 steps.
    Cannot see: gradients that are cleared in some steps.
    """

    name = "not_zeroed"
    severity_while_falling = "warning"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2")
    version = 2
    uses = sources("unowned_parameters", "gradients_kept")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 3.0
    severity = "error"
    patience = 1
    explains = names(
        "diverges nonfinite lr_too_high no_learning dead_units class_collapse ignores_input loss_spike vanishing_gradient saturated "
        "gradient_spike gradient_jump update_ratio plateau zero_gradient logit_growth overfit"
    )
    meaning = "The gradient at the optimizer's step is {figure:.0f} times that of one backward pass, and grows."
    advice = "call optimizer.zero_grad() in every step"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        growth = gradient_growth(history)
        if growth != growth:
            return
        first, kept = history.memory[self.name].setdefault("first", growth), history.curve("gradients_kept")
        yield Score(0.0 if kept is not None and not kept.last else growth / max(1.0, first) / self.factor, growth)


class ScalerSkipsRule(Rule):
    """The gradient scaler skips many of the steps because gradients overflow.

    Threshold: a fifth of the last 50 steps, after the first 50, in which the scaler searches for its scale;
    a scaler that has found its scale skips 1 in 2000.
    Cannot see: steps that the training loop skips by itself; a scaler that has skipped every step so far.
    """

    name = "scaler_skips"
    severity_while_falling = "info"
    needs = sources("step_skipped")
    thresholds = ("share",)
    share: float = 0.2
    patience = 2
    stride = 10
    meaning = "{figure:.0%} of the last 50 steps were skipped because gradients overflow."
    advice = "search for the layer whose gradients overflow, or train in bfloat16"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve = history.now("step_skipped")
        if curve is not None and curve.count >= 100:
            share = sum(curve.tail(50)) / 50
            yield Score(share / self.share, share)
