"""Rules about the loss."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score, TimeSeries
from ikkuna.diagnosis.history import middle
from ikkuna.diagnosis.mistakes import LOSS_AT_INIT, LOSS_SCALE, UNBOUNDED_LOSS, names
from ikkuna.numerics.prediction import initial_cross_entropy, initial_logit_deviation
from ikkuna.numerics.spike_score import LIMIT
from ikkuna_subscribers.gradients import LossChangeBoundSubscriber
from ikkuna_subscribers.predictions import PredictionSubscriber
from ikkuna_subscribers.rules.figures import (
    guessing_loss,
    have_moved,
    is_of_classes,
    new_scores,
    noise_of_loss,
    raised_by_others,
    scale_of_loss,
    sources,
    spaced,
)


class DivergesRule(Rule):
    """The loss, median of ten steps, stays above its level at the start, and the steps have made it rise.

    Threshold: 1.3 times the first level, a fifth of the loss of a guess more, and twice the usual distance of two successive losses more,
    at two judgements in a row, which are 10 steps apart; healthy runs stay below a quarter of this.
    The rule is silent if the movement of the weights can have made less than half of the rise: between two samples at most its bound, see
    `LossChangeBoundSubscriber`, and at most what the loss has changed by.
    Then the loss is no fixed function of the weights: it depends on labels that a network makes, on the policy that is trained, on a model
    that another optimizer trains against it, on data that become harder, or its gradient is reversed on purpose.
    A loss that has come back from such a level before swings: it must stay there for twice as long as it did then.
    Cannot see: losses that are negative at the start, such as rewards; a slow rise after a long fall.
    """

    name = "diverges"
    version = 4
    severity_while_falling = "warning"
    needs = sources("loss")
    uses = sources("output_classes", "loss_change_bound")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 1.3
    severity = "error"
    patience = 2
    stride = 10
    explains = names("no_learning ignores_input class_collapse rank_collapse plateau logit_growth loss_spike overfit")
    meaning = "The loss has risen to {figure:.3g}, above its level at the start."
    advice = "lower the learning rate, check the sign of the loss, clip gradients"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for what the movement of the weights explains."""
        return (LossChangeBoundSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score from the 20th step on."""
        curve = history.now("loss")
        if curve is None or curve.count <= 20 or not min(curve.first[:10]) > 0:
            return
        level = middle(curve.first[:5])
        recent = middle([value if math.isfinite(value) else math.inf for value in curve.tail(10)])
        figure = recent if math.isfinite(recent) else 1e300
        rise, noise = figure - level, noise_of_loss(curve, level)
        by_chance = rise / (2 * noise) if noise > 0 else math.inf
        score = min(figure / (self.factor * level), rise / (0.2 * scale_of_loss(history)), by_chance)
        explained = self._explained(history)
        score = min(score, 2 * explained / rise) if rise > 0 else score
        yield Score(score if self._lasts(history, score) else min(score, 0.0), figure)

    def _lasts(self, history: History, score: float) -> bool:
        """Return whether the loss has been high for twice as long as any time from which it has come back."""
        memory, step = history.memory[self.name], history.step
        if score < 1:
            memory["swing"] = max(memory.get("swing", 0), step - memory.pop("since", step))
            return True
        return bool(step - memory.setdefault("since", step) >= 2 * memory.get("swing", 0))

    def _explained(self, history: History) -> float:
        """Return how much of the rise so far the movement of the weights can have made; infinite if that is unknown.

        Between two samples that is at most the bound, and at most what the loss has changed by: steps that swing around a minimum have
        positive bounds without end.  A positive loss cannot have fallen by more than its value, whatever the slope was.
        """
        bounds, curve, memory = history.curve("loss_change_bound"), history.curve("loss"), history.memory[self.name]
        if bounds is None or curve is None:
            return math.inf
        last = memory.get("step", curve.first_steps[0])
        if bounds.step > last:
            losses = dict(zip(curve.steps, curve.values, strict=True))
            for step, bound in zip(bounds.steps, bounds.values, strict=True):
                if step > last:
                    before, loss = losses.get(last, 0.0), losses.get(step, math.inf)
                    change = min(bound, loss - before) if math.isfinite(loss) else bound
                    memory["explained"] = memory.get("explained", 0.0) + max(
                        change, -before if before > 0 else -math.inf
                    )
                    memory["step"] = last = step
        explained = float(memory.get("explained", math.inf))
        return math.inf if math.isnan(explained) else explained


class LossSpikeRule(Rule):
    """The loss of a step is suddenly far above the losses before it.

    Threshold: a spike score of 10, that is 10 robust deviations above the median of the last 32 losses and their trend, and at least four
    times as far as any of the last losses, see `ikkuna.numerics.spike_score`; a rise of less than half a percent of a recent loss is none.
    A jump that is smaller than the rounding error of the weights times the gradients is none.
    The finding is an info if the movement of the weights can have made less than half of the jump, see `LossChangeBoundSubscriber`.
    If that is unknown, because the step was not measured, it is one while the loss falls, if the first losses differed by more, and if
    something else than this movement has raised the loss by more before.
    Cannot see: the first 16 values; slow rises (that is the rule diverges); a loss of NaN (that is the rule nonfinite).
    """

    name = "loss_spike"
    version = 4
    severity_while_falling = "warning"
    needs = sources("loss")
    uses = sources("weight_gradients_norm2", "weights_norm2", "loss_change_bound")
    judged_on = frozenset(("loss",))
    stride = 10
    thresholds = ("deviations",)
    deviations: float = LIMIT
    patience = 1
    explains = names("gradient_jump")
    meaning = "The loss jumped to {figure:.3g}, far above its last values."
    advice = "lower the learning rate, clip gradients, look at the batch and at the learning rate of this step"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for what the movement of the weights explains."""
        return (LossChangeBoundSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield the scores of the spikes since the last judgement, and of as many losses before each as end a mistake."""
        curve, usual = history.curve("loss"), deque[Score](maxlen=self.patience)
        for step, loss, score in new_scores(history, "loss", history.memory[self.name]):
            value = min(score, 1e300) / self.deviations
            if value < 1 or curve is None or not (jump := loss - curve.median(16)) > 0:
                usual.append(Score(value, loss, step=step))
            elif jump > _rounding_of_loss(history):
                yield from usual
                yield Score(value, loss, step=step, **self._bounded(history, step, jump))
                usual.clear()
        yield from usual

    @staticmethod
    def _bounded(history: History, step: int, jump: float) -> dict[str, str]:
        """Return how grave a jump is by the share that the movement of the weights can have made, and what that says."""
        curve, bounds = history.curve("loss"), history.curve("loss_change_bound")
        if bounds is not None and bounds.step == step:
            return _JUMP_OF_BATCH if bounds.last < 0.5 * jump else {}
        if curve is None or history.loss_has_fallen or jump < max(curve.first) - min(curve.first):
            return {"at_most": "info"}
        return {"at_most": "info"} if raised_by_others(history) > jump else {}


class UnboundedLossRule(Rule, mistake=UNBOUNDED_LOSS):
    """The loss falls without end, and faster and faster.

    A loss with a lower bound falls more slowly the nearer it comes to it.
    Threshold: over the second half of the training, 30 to 400 values, the loss falls in each third by more than in the third before, and
    has reached 100 times the size and the spread of its first values below 0, at 5 judgements in a row, unless it is maximised.
    Cannot see: a loss that falls without end at a constant pace or ever more slowly, as a logarithm does.
    """

    needs = sources("loss")
    uses = sources("optimizer_maximize")
    judged_on = frozenset(needs)
    stride = 10
    patience = 5
    thresholds = ("factor",)
    factor: float = 100.0

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve = history.now("loss")
        if curve is None or curve.count < 60 or not all(map(math.isfinite, curve.first)) or history.is_maximised:
            return
        values = curve.tail(curve.count // 2)
        size = len(values) // 3
        levels = [middle(values[i : i + 5]) for i in (0, size, 2 * size, len(values) - 5)]
        falls = [before - after for before, after in pairwise(levels)]
        scale = max(abs(middle(curve.first[:5])), max(curve.first[:10]) - min(curve.first[:10]))
        is_faster = 0 < falls[0] < falls[1] < falls[2] and scale > 0
        yield Score(-levels[-1] / scale / self.factor if is_faster else 0.0, levels[-1], advice=_BOUND)


_BOUND = (
    "check the sign of each term; bound the slope of a critic by a penalty on its gradient, or by clipping its weights"
)


def _rounding_of_loss(history: History) -> float:
    r"""Return the rounding error of a loss in float32 that that of the weights causes, :math:`2^{-24} \sum_l |g_l| |w_l|`."""
    weights = history.curves("weights_norm2")
    pairs = [
        (c.last, weights[name].last) for name, c in history.curves("weight_gradients_norm2").items() if name in weights
    ]
    return 2.0**-24 * sum(gradient * weight for gradient, weight in pairs if gradient * weight < math.inf)


_JUMP_OF_BATCH = {
    "at_most": "info",
    "detail": "The movement of the weights since the last sample explains less than half of it: the batch or its labels made it.",
    "advice": "look at the batch of this step; a jump that returns at once does no harm",
}


class LossAtInitRule(Rule, mistake=LOSS_AT_INIT):
    """Before the first update the cross-entropy is far above log C, the loss of a guess among C classes.

    Threshold: twice log C; healthy networks start below 1.1 times (largest of 140 runs), and a pre-trained one lower;
    deep residual networks whose blocks end with a scale of 1, such as a ResNet-110, start at 1.2 to 1.7 times.
    The rule is silent if the usual initialisation of the last layer explains the loss, such as that by the number of outputs
    in EfficientNet and MobileNet, which gives 2 to 9 times log C for five classes.
    It is silent as well if weights are frozen, because the model, or a part of it, is pre-trained.
    Cannot see: losses that are no classification; a run that was resumed; features that are up to as large as their initialisation intends.
    """

    needs = sources("output_cross_entropy", "output_classes")
    uses = sources("weights_norm2", "weight_requires_grad")
    judged_on = frozenset(needs)
    thresholds = ("factor",)
    factor: float = 2.0
    patience = 1

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for outputs and labels."""
        return (PredictionSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score at the first step of the training."""
        curve, guess = history.now("output_cross_entropy"), guessing_loss(history)
        is_pretrained = any(flag.last == 0 for flag in history.curves("weight_requires_grad").values())
        if curve is not None and curve.count == 1 and curve.step == 0 and math.isfinite(guess) and not is_pretrained:
            ratio = curve.last / guess
            yield Score(min(ratio / self.factor, curve.last / _explained_loss(history, guess)), ratio)


def _explained_loss(history: History, guess: float) -> float:
    """Return the cross-entropy that the last weights explain if they have a usual scale; at least that of a guess."""
    classes = round(math.exp(guess))
    for name, curve in reversed(history.matrices("weights_norm2")):
        if is_of_classes(history, name) and (shape := history.network.shape_of(name)):
            return initial_cross_entropy(
                classes, initial_logit_deviation(shape, curve.last / math.sqrt(math.prod(shape)))
            )
    return guess


_OF_BATCH = "The loss is a sum over the batch, so that gradients grow with the number of samples."
_OF_MICRO_BATCHES = "This is the number of micro-batches in a step, whose losses are not divided by it."
_DIVIDED = "divide the loss of each micro-batch by their number"
_OF_RANKS = (
    "This is the number of ranks: the loss is multiplied by it, although the gradients of the ranks are averaged."
)
_NOT_MULTIPLIED = "do not multiply a mean loss by the number of ranks"
_SAMPLES = 4


class LossScaleRule(Rule, mistake=LOSS_SCALE):
    """The gradients are a multiple of those of the mean cross-entropy of the samples of a step.

    A sum over a batch grows with its size, that over micro-batches with their number, and a factor that should undo the averaging of
    gradients over ranks is wrong for a loss that each rank averages.
    Threshold: for 3 samples in a row, the loss is within 2% of the mean cross-entropy times the number of labels; or ``backward()``
    is called on the loss of each micro-batch as the loss module returns it, and these are on average a cross-entropy, within 25%;
    or the loss is on average over 4 samples the cross-entropy times the number of ranks over which gradients are averaged, within 3%.
    Cannot see: other losses; batches of more than 512 items, of which the cross-entropy is a sample; micro-batches without a loss module.
    """

    version = 2
    needs = sources("loss", "output_cross_entropy", "label_count")
    uses = sources("micro_batches", "undivided_losses", "averaged_ranks")
    judged_on = frozenset(("output_cross_entropy",))
    thresholds = ("tolerance",)
    tolerance: float = 0.02

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the loss is the sum."""
        loss, mean, count = (history.now(kind) for kind in ("loss", "output_cross_entropy", "label_count"))
        if loss is None or mean is None or count is None or not mean.last > 0 or count.last < 4:
            return
        ratio = loss.last / mean.last
        ratios = history.memory[self.name].setdefault("ratios", deque[float](maxlen=_SAMPLES))
        ratios.append(ratio)
        usual = sum(ratios) / len(ratios)
        parts, undivided, ranks = map(_last, map(history.curve, self.uses))
        is_of_ranks = len(ratios) == _SAMPLES and ranks > 1 >= parts and abs(usual / ranks - 1) < 0.03
        if abs(ratio / count.last - 1) < self.tolerance:
            yield Score(1.0, ratio, detail=_OF_BATCH)
        elif undivided == parts > 1 and abs(usual - 1) < 0.25:
            yield Score(1.0, parts, detail=_OF_MICRO_BATCHES, advice=_DIVIDED)
        elif is_of_ranks and all(abs(each / ranks - 1) < 0.15 for each in ratios):
            yield Score(1.0, ranks, detail=_OF_RANKS, advice=_NOT_MULTIPLIED)
        else:
            yield Score(0.0, ratio)


def _last(curve: TimeSeries | None) -> float:
    return 1.0 if curve is None else curve.last


class NoLearningRule(Rule):
    """The weights have moved, but the cross-entropy is that of a guess, and no better than a hundred steps ago.

    The guess has the frequencies of the labels (their entropy, corrected for the size of the batch after Miller and Madow), at most log C.
    Threshold: 0.95 of the guess, less than 2% better than 10 samples before, after updates that add up to 0.05 of the weights' size,
    for 3 samples in a row.  A value is the median over samples with at least 200 labels together, which are ten steps apart or more;
    its level, and whether it has become better, are read from all losses between these samples as well.
    The rule is silent if in these samples the movement of the weights has lowered the loss by 2% of the guess or more, although this is
    hidden by the differences between batches, see `LossChangeBoundSubscriber`.
    It is an info if something else than this movement has raised the loss by more than that of a guess: another term competes.
    Cannot see: tasks that need longer than a hundred steps before anything happens look the same for a while; other losses; labels that
    are all one, as those of positives that stand before their negatives.
    """

    name = "no_learning"
    version = 4
    severity_while_falling = "warning"
    needs = sources(
        "output_cross_entropy", "output_classes", "label_entropy", "label_count", "weight_updates_weights_ratio"
    )
    uses = sources("loss_change_bound")
    judged_on = frozenset(needs)
    thresholds = ("share", "labels")
    share: float = 0.95
    labels: float = 200
    patience = 3
    explains = names("ignores_input class_collapse plateau")
    meaning = (
        "The cross-entropy is {figure:.0%} of that of a guess with the frequencies of the labels, and does not fall."
    )
    advice = "check whether labels and inputs belong together, the weights of the classes, the rate, and the gradients of the first layers"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        mean = history.now("output_cross_entropy")
        entropy, count, classes = (history.curve(kind) for kind in ("label_entropy", "label_count", "output_classes"))
        if mean is None or entropy is None or count is None or classes is None or not classes.last > 1:
            return
        moved = have_moved(history, history.memory[self.name])
        bias = (classes.last - 1) / (2 * max(count.median(10), 1))
        most, known = math.log(classes.last), entropy.median(10)
        guess = min(known + bias, most) if known else 0.0  # a guess of the only label has no loss
        window = max(math.ceil(self.labels / max(count.median(10), 1)), 4)
        chosen = spaced(mean, window + 10)[::-1]
        if len(chosen) < window + 10 or not moved or guess < 0.2:
            return
        steps, values = [mean.steps[i] for i in chosen], [mean.values[i] for i in chosen]
        entropies = dict(zip(entropy.steps, entropy.values, strict=True))
        pairs = zip(steps, values, strict=True)
        shares = [loss / min(max(entropies.get(step, 0.2), 0.2) + bias, most) for step, loss in pairs]
        now, before = middle(shares[-window:]), middle(shares[:window])
        bounds = history.curve("loss_change_bound")
        number = 0 if bounds is None else sum(step >= steps[-10] for step in bounds.steps)
        is_lowered = bounds is not None and -sum(bounds.tail(max(number, 10))) > 0.02 * guess
        levels = _levels(history, steps, window)
        falls = now <= 0.98 * before or levels[1] <= 0.98 * levels[0]
        now = min(now, levels[1] / guess)
        yield Score(
            0.0 if falls or is_lowered else now / self.share,
            now,
            at_most="info" if raised_by_others(history) > guess else "error",
        )


def _levels(history: History, steps: Sequence[int], window: int) -> tuple[float, float]:
    """Return the losses of all steps in the first and the last window if they are the cross-entropy; otherwise infinity.

    There are several of them for each sample, so that the differences between batches hide a slow fall less.
    """
    loss, mean = history.now("loss"), history.now("output_cross_entropy")
    if loss is None or mean is None or not math.isclose(loss.last, mean.last, rel_tol=0.01):
        return -math.inf, math.inf
    values = list(zip(loss.steps, loss.values, strict=True))
    first = middle([value for step, value in values if steps[0] <= step <= steps[window - 1]])
    return first, middle([value for step, value in values if step >= steps[-window]])


class OverfitRule(Rule):
    """The loss of another pass over data has risen from its best value and is twice that of training.

    Overfitting on purpose is usual; the finding is therefore only an info.
    Threshold: 1.05 times the best value, which is at least 3 passes old, for 2 passes in a row.
    Cannot see: runs without a pass named ``testing`` or ``validation``.
    """

    name = "overfit"
    severity_while_falling = "warning"
    needs = sources("loss")
    thresholds = ("factor", "passes")
    factor: float = 1.05
    passes: float = 3
    stride = 10
    severity = "info"
    patience = 2
    meaning = "The loss on held-out data is {figure:.2f} times its best value, while the training loss is less than half of it."
    advice = "stop earlier, use more data, augmentation, dropout or weight decay"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each pass over held-out data."""
        training = history.curve("loss")
        for name in ("testing", "validation"):
            curve = history.curve("loss", name)
            seen = history.memory[self.name]
            if curve is None or training is None or curve.count < 3 or seen.get(name) == curve.count:
                continue
            seen[name] = curve.count
            known = [value for value in curve.values if value == value]
            figure = curve.last / min(known) if known and min(known) > 0 else 0.0
            is_late = bool(known) and len(known) - known.index(min(known)) > self.passes
            yield Score(figure / self.factor if is_late and curve.last > 2 * training.median(20) else 0.0, figure)


class PlateauRule(Rule):
    """The loss has not fallen below its level of long ago, and is still near its first value.

    The median of the last 100 steps is compared with that of the 100 steps before the last 200, in units of its noise.
    Threshold: less than 0.5% lower, and above 0.9 times the first value, for 50 steps in a row (5 judgements).
    A loss without a trend is usual for adversarial networks and reinforcement learning; the finding is therefore only an info.
    Cannot see: a plateau at a low loss, which is the end of most trainings; the first 300 steps.
    """

    name = "plateau"
    severity_while_falling = "warning"
    needs = sources("loss")
    thresholds = ("share",)
    share: float = 0.9
    severity = "info"
    patience = 5
    stride = 10
    meaning = "The loss has stayed at {figure:.3g} for 300 steps, near its first value."
    advice = "check the learning rate, and whether labels and inputs belong together"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score every tenth step."""
        curve = history.now("loss")
        if curve is None or curve.count < 320:
            return
        recent, before, first = curve.median(100), curve.median(100, skip=200), middle(curve.first)
        is_flat = recent > 0.995 * before and first > 0
        yield Score(recent / first / self.share if is_flat else 0.0, recent)


class LogitGrowthRule(Rule):
    """The logarithm of the softmax's normaliser is far from zero: the logits drift together.

    Threshold: the mean of log Z is above 30 + log C, for 5 samples in a row; the z-loss of PaLM (Chowdhery et al., 2022) keeps it near 0.
    Cannot see: logits that grow apart, as they do when a network becomes certain.
    """

    name = "logit_growth"
    severity_while_falling = "info"
    needs = sources("output_log_normalizer", "output_classes")
    thresholds = ("limit",)
    limit: float = 30.0
    patience = 5
    meaning = "The logits have drifted: the mean logarithm of the softmax's normaliser is {figure:.3g}."
    advice = "add a z-loss, lower the learning rate, or normalise the inputs of the last layer"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve, classes = history.now("output_log_normalizer"), history.now("output_classes")
        if curve is not None and classes is not None and classes.last > 1:
            yield Score(abs(curve.last) / (self.limit + math.log(classes.last)), curve.last)
