"""Rules about the order of the calls in the training loop: backward, clip, unscale, step."""

import math
from collections.abc import Iterator

from ikkuna.diagnosis import History, Rule, Score, TimeSeries
from ikkuna.diagnosis.mistakes import WEIGHTS_RESTORED, names
from ikkuna_subscribers.rules.figures import gradient_growth, sources

_NOTHING_LEARNED = names(
    "no_learning ignores_input class_collapse zero_gradient never_moves no_gradient lr_too_low plateau vanishing_gradient clipped_hard "
    "lost_updates running_statistics"
)


def _stepped(history: History) -> list[str]:
    """Return the weights that an optimizer has stepped with now if it has left all of them as they are; otherwise none."""
    updates = list(history.fresh("weight_updates_norm2"))
    return [name for name, _ in updates] if not any(curve.last for _, curve in updates) else []


def _norms(history: History, kind: str, names: list[str]) -> list[float]:
    """Return the present norms of those weights that have one."""
    curves = history.curves(kind)
    return [curve.last for name in names if (curve := curves.get(name)) is not None and curve.step == history.step]


class GradientsClearedRule(Rule):
    """A backward gives gradients to weights of an optimizer, and none of them is there any more when it steps.

    ``zero_grad()`` stands between ``backward()`` and ``step()``; it has removed the gradients, or filled them with zeros.
    Threshold: a fact, without a number, for 3 samples in a row, in which no weight moves.
    Cannot see: gradients that are cleared in some steps only; an optimizer that moves weights without gradients, by its momentum.
    """

    name = "gradients_cleared"
    needs = sources("weight_micro_gradients_norm2", "weight_updates_norm2", "gradients_at_step")
    uses = sources("weight_gradients_norm2")
    judged_on = frozenset(("weight_updates_norm2",))
    severity = "error"
    explains = frozenset((*_NOTHING_LEARNED, "all_gradients_zero", "step_without_gradients"))
    meaning = "The gradients of the backward pass are cleared before the optimizer steps, so that no weight moves."
    advice = "call optimizer.zero_grad() before backward() or after step(), not between them"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if there was a gradient after the backward and none at the step."""
        names, present = _stepped(history), history.now("gradients_at_step")
        given = _norms(history, "weight_micro_gradients_norm2", names)
        used = _norms(history, "weight_gradients_norm2", names)
        if present is not None:
            is_gone = present.last == 0 or (bool(used) and not any(used))
            yield Score(float(any(given) and is_gone), present.last)


class StepWithoutGradientsRule(Rule):
    """An optimizer steps, but no backward has given a gradient to any of its weights.

    Threshold: a fact, without a number, for 3 samples in a row, in which no weight moves.
    Cannot see: steps without gradients among others with some; whether ``backward()`` is missing, or reaches other tensors.
    """

    name = "step_without_gradients"
    needs = sources("weight_updates_norm2", "gradients_at_step")
    uses = sources("weight_micro_gradients_norm2")
    judged_on = frozenset(("weight_updates_norm2",))
    severity = "error"
    explains = _NOTHING_LEARNED
    meaning = "The optimizer steps, but none of its {figure:.0f} weights has a gradient, and none moves."
    advice = (
        "call loss.backward() before optimizer.step(); if it is called, search for what detaches the loss from the "
        "weights: detach(), .item(), torch.no_grad(), a comparison, a tensor made of the loss, or an optimizer with the parameters of "
        "another model"
    )

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if no weight has had a gradient in this step."""
        names, present = _stepped(history), history.now("gradients_at_step")
        given = _norms(history, "weight_micro_gradients_norm2", names)
        if present is not None:
            yield Score(float(bool(names) and not given and present.last == 0), float(len(names)))


_EMPTY_LOSS = "It has been exactly 0 since the first step."
_COMPARED = (
    "check whether the loss compares the output with itself, as with a teacher that is the student and no copy of it, "
    "and search for a factor, mask or weight of 0"
)


class AllGradientsZeroRule(Rule):
    """Every gradient of every weight and bias is exactly zero, although the loss is not, or has been 0 since the first step.

    Threshold: a fact, without a number, for 5 samples in a row.  The rule is silent if the loss has become 0, as one with a margin may.
    Cannot see: gradients that are zero in a part of the network only (that is the rule zero_gradient).
    """

    name = "all_gradients_zero"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2", "loss")
    uses = sources("bias_gradients_norm2")
    judged_on = frozenset(("weight_gradients_norm2",))
    severity = "error"
    patience = 5
    explains = _NOTHING_LEARNED
    meaning = "Every gradient of the network is exactly zero, while the loss is {figure:.3g}."
    advice = (
        "search, from the loss backwards, for a factor of 0, a clamp or ReLU whose limit every value exceeds, rounding, "
        "argmax or a comparison, and a mask or weight that leaves every label out"
    )

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if all gradients are zero."""
        kinds = ("weight_gradients_norm2", "bias_gradients_norm2")
        used = [curve.last for kind in kinds for _, curve in history.fresh(kind)]
        given = [curve.last for _, curve in history.fresh("weight_micro_gradients_norm2")]
        loss = history.curve("loss")
        if used and loss is not None:
            is_empty = history.is_complete and not any(loss.first) and not any(loss.values)
            is_found = not any(used) and not any(given) and (is_empty or loss.last != 0)
            detail, advice = (_EMPTY_LOSS, _COMPARED) if is_empty else ("", "")
            yield Score(float(is_found), loss.last, detail=detail, advice=advice)


class RepeatedBackwardRule(Rule):
    r"""The backward passes of a step give the same gradient again and again.

    The norm of the sum of k gradients is at most :math:`\sqrt k` times the root of the sum of their squared norms, and it is so only if
    they are equal.
    Threshold: the norm of the gradient at the step over that of what the backward passes gave is the root of the same whole number above 1
    for every weight, within 1e-4, for 3 samples in a row; with several micro-batches that number is a multiple of theirs.
    A gradient that the loop multiplies is told apart by the number of gradients that each weight was given, as far as it is recorded.
    Cannot see: gradients that are clipped; a second backward of another loss or other rows, which gives another gradient.
    """

    name = "repeated_backward"
    severity_while_falling = "warning"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2", "micro_batches")
    uses = sources("weight_micro_gradients_count")
    judged_on = frozenset(("weight_gradients_norm2",))
    thresholds = ("tolerance",)
    tolerance: float = 1e-4
    explains = names("lr_too_high not_zeroed loss_scale")
    meaning = "Each step adds up {figure:.0f} equal gradients: backward() is called several times for the same rows."
    advice = "call backward() once for each loss, and give each micro-batch other rows"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the gradients of all backward passes are equal."""
        given = {name: curve.last for name, curve in history.fresh("weight_micro_gradients_norm2")}
        used = [(name, curve.last) for name, curve in history.fresh("weight_gradients_norm2")]
        squares = [(norm / given[name]) ** 2 for name, norm in used if given.get(name, 0.0) > 0]
        parts = history.curve("micro_batches")
        if len(squares) < 2 or parts is None or not max(squares) < math.inf:
            return
        number = round(squares[0])
        are_equal = all(abs(square / number - 1) < 2 * self.tolerance for square in squares) if number > 1 else False
        elements = dict(history.fresh("weight_micro_gradients_count"))
        were_given = all(curve.last >= number * history.network.size_of(name) for name, curve in elements.items())
        yield Score(float(are_equal and were_given and number % max(parts.last, 1.0) == 0), float(number))


class SameRandomNumbersRule(Rule):
    """The random generator of torch has the same state at the beginning of every step, and the step draws numbers from it.

    The seed is set inside the loop, so dropout always removes the same units, and noise is always the same.
    Threshold: a fact, for 3 samples in a row.
    Cannot see: a generator of numpy or Python, or one of the user's own; seeds that are set in the forward of the model.
    """

    name = "same_random_numbers"
    severity_while_falling = "warning"
    needs = sources("random_numbers_repeated")
    explains = names("repeated_batch same_order")
    meaning = "Every step draws the same random numbers, as those of dropout: the seed is set inside the loop."
    advice = "call torch.manual_seed() once, before the loop"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the step has repeated the numbers of the sample before, for each dropout, or else for the network."""
        if (curve := history.now("random_numbers_repeated")) is not None:
            dropouts = [entry.name for entry in history.network.modules if "Dropout" in entry.class_name]
            yield from (Score(curve.last, curve.last, name) for name in dropouts or (None,))


def _scaled_by(history: History) -> float:
    """Return what ``backward()`` is called on over the loss that was computed, if it is a power of two; otherwise NaN.

    A gradient scaler multiplies by 2 to the 16th at first.
    The loss that was computed is that of the loss module, or the cross-entropy of the outputs and labels.
    """
    curves = history.curves("loss")
    whole: TimeSeries | None = curves.get("objective")
    own: TimeSeries | None = curves.get(None)
    if whole is None or own is None:
        whole, own = history.curve("loss"), history.curve("output_cross_entropy")
    if whole is None or own is None or whole.step != own.step or not (whole.last > 0 and own.last > 0):
        return math.nan
    ratio, labels = whole.last / own.last, history.curve("label_count")
    if labels is not None and abs(ratio / max(labels.last, 1.0) - 1) < 0.05:  # a sum over the labels
        return math.nan
    parts = 1.0 if (count := history.curve("micro_batches")) is None else max(count.last, 1.0)
    for factor in (ratio / parts, ratio):  # the losses of micro-batches add up, unless they are divided
        exponent = round(math.log2(factor)) if 0 < factor < math.inf else 0
        if abs(factor / 2.0**exponent - 1) < 0.01:
            return 2.0**exponent
    return math.nan


class ScalerBypassedRule(Rule):
    """The loss is multiplied by a gradient scaler, but the optimizer's step is not made by the scaler.

    The gradients keep the factor: clipping and the step of SGD are wrong, and an overflow reaches the weights.
    Threshold: what ``backward()`` is called on is a power of two, at least 256, times the loss, within 1%, for 3 samples in a row;
    no step was made by a scaler; and the gradient at the step is more than half of what the backward gave, so nothing else has divided it.
    Cannot see: a loss that is neither that of a module passed as ``loss=`` nor the cross-entropy of outputs and labels;
    gradients that are clipped with the factor.
    """

    name = "scaler_bypassed"
    needs = sources("loss", "weight_gradients_norm2", "weight_micro_gradients_norm2")
    uses = sources("output_cross_entropy", "label_count", "micro_batches", "step_skipped")
    judged_on = frozenset(("weight_gradients_norm2",))
    severity = "error"
    explains = names("lr_too_high diverges nonfinite loss_spike gradient_spike gradient_jump loss_at_init update_ratio")
    meaning = "The loss is multiplied by {figure:.0f} before backward(), but no gradient scaler removes this factor before the step."
    advice = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if a factor of a scaler is left in the gradients."""
        factor, is_scaled = _scaled_by(history), history.curve("step_skipped") is not None
        if factor == factor and not is_scaled:
            yield Score(float(factor >= 256 and gradient_growth(history) > 0.5), factor)


class ClippedBeforeUnscalingRule(Rule):
    """Gradients are clipped while they contain the factor of a gradient scaler: their norm becomes the limit over the factor.

    Threshold: a scaler makes the steps, clipping leaves less than a tenth of the gradient, and the norm of all gradients that remain is
    below 0.003 and that of the sample before within 0.01%, or a power of two times that, because the factor changes by powers of two;
    for 5 samples in a row.
    Cannot see: a scaler whose factor is below about 300 times the limit; a limit for each of several groups of parameters.
    """

    name = "clipped_before_unscaling"
    needs = sources("weight_gradients_norm2", "weight_micro_gradients_norm2", "step_skipped")
    uses = sources("bias_gradients_norm2", "unowned_parameters")
    judged_on = frozenset(("weight_gradients_norm2",))
    thresholds = ("share", "norm")
    share: float = 0.1
    norm: float = 3e-3
    patience = 5
    severity = "error"
    explains = names("clipped_hard lr_too_low no_learning plateau update_ratio lost_updates")
    meaning = "Gradients are clipped before the scaler's factor is removed: their norm is {figure:.1g} at every step."
    advice = "call scaler.unscale_(optimizer) before the clipping; if it is called, the limit of the clipping itself is far too low"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        growth, memory = gradient_growth(history), history.memory[self.name]
        kinds = ("weight_gradients_norm2", "bias_gradients_norm2")
        norm = math.hypot(*(curve.last for kind in kinds for _, curve in history.fresh(kind)))
        before, memory["norm"] = memory.get("norm", 0.0), norm
        if not (growth > 0 and 0 < norm < math.inf) or history.curve("step_skipped") is None:
            return
        exponent = math.log2(norm / before) if before > 0 else 0.5
        is_limited = abs(exponent - round(exponent)) < 1.5e-4
        yield Score(min(self.share / growth, self.norm / norm) if is_limited else 0.0, norm)


class WeightsRestoredRule(Rule, mistake=WEIGHTS_RESTORED):
    """All weights are exactly what they were at an earlier sample, although they have moved in between.

    A checkpoint or a copy of the weights is loaded inside the loop, and what was learned since is thrown away.
    Threshold: the norms of all weight matrices are equal to the last bit to those of an earlier sample, and one was another by 1e-6 of it
    in the sample before; two times.  A rate that is far too low moves weights by their last bit, and back.
    It is an info if the learning rate is another one than at the earlier sample and the loss has fallen: the best weights may be loaded
    on purpose when the rate is lowered.  It is also one if the weights return to several others in turn, which an
    outer loop moves, as in meta-learning; and if the first weights return with an optimizer that counts its steps anew, as in each round
    of a cross-validation.
    Cannot see: a single return, which may be intended, as after a spike of the loss; weights that are trained before the next sample;
    those that are put back before each step, which `ikkuna.observation.hooks.first_steps.FirstSteps` finds.
    """

    version = 4
    needs = sources("weights_norm2")
    uses = sources("learning_rate", "weight_state_step_mean")
    thresholds = ("distance",)
    distance: float = 1e-6
    judged_on = frozenset(needs)
    patience = 1

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the weights were like this before, and others in between."""
        fresh = history.matrices("weights_norm2")
        if len(fresh) < 2 or not (history.is_finite or all(math.isfinite(curve.last) for _, curve in fresh)):
            return
        memory = history.memory[self.name]
        seen, norms = memory.setdefault("seen", {}), {name: curve.last for name, curve in fresh}
        now = hash(tuple(norms.items()))
        rates = [curve.last for curve in history.curves("learning_rate").values()]
        counts = [(curve.step, curve.last) for curve in history.curves("weight_state_step_mean").values()]
        before, last, previous = seen.get(now), memory.get("last", {}), memory.get("now")
        memory |= {"last": norms, "now": now}
        step, rates_before, counts_before, previous_before = before or (0, rates, [], None)
        have_moved = any(abs(last.get(name, n) - n) > self.distance * n for name, n in norms.items())
        if have_returned := before is not None and have_moved:
            memory["returns"] = memory.get("returns", 0) + 1
            if previous != previous_before:  # otherwise steps from the weights that were restored are made again
                memory.setdefault("goals", set()).add(now)
        is_first = now == next(iter(seen), now)
        if len(seen) < 1000:
            seen.setdefault(now, (history.step, rates, counts, previous))
        counted = [count for step, count in counts if step == history.step]
        is_restart = is_first and bool(counts) and counted in ([], [count for _, count in counts_before])
        is_intended = rates != rates_before and history.loss_falls is not False
        is_info = is_intended or is_restart or len(memory.get("goals", ())) > 1
        is_bad = have_returned and memory["returns"] >= 2
        yield Score(float(is_bad), float(step), at_most="info" if is_info else "error")


_IN_TRAINING_MODE = {
    "Dropout": "Dropout was active.",
    "BatchNorm": "Batch norm used and changed its statistics with the data of the evaluation.",
}


class EvaluationInTrainingModeRule(Rule):
    """The evaluation passes of the loop run in training mode, and the network has dropout or batch norm.

    An evaluation pass is recognised by its forwards without gradients, see `ikkuna.observation.steps.loop_events.LoopEvents`.
    Threshold: a fact, for 2 passes, if no forward without gradients has been in evaluation mode so far.
    Forwards with another momentum of a batch norm are none: they estimate its statistics anew.
    Cannot see: an evaluation with gradients, which is none of these forwards; that of a compiled model; dropout as a function.
    """

    name = "evaluation_in_training_mode"
    severity_while_falling = "warning"
    needs = sources("evaluations_in_training_mode")
    thresholds = ("passes",)
    passes: float = 2
    patience = 1
    explains = names("running_statistics")
    meaning = "{figure:.0f} evaluation passes ran in training mode."
    advice = "call model.eval() before the evaluation and model.train() after it"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve = history.now("evaluations_in_training_mode")
        classes = [entry.class_name for entry in history.network.modules]
        details = [text for part, text in _IN_TRAINING_MODE.items() if any(part in name for name in classes)]
        if curve is not None and details:
            yield Score(curve.last / self.passes, curve.last, detail=" ".join(details))
