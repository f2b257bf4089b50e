"""Rules about inputs, labels and predictions, and the best constant one."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.history import middle
from ikkuna.diagnosis.mistakes import IGNORES_INPUT, INPUT_SCALE, ONE_LABEL, SIGMOID_TWICE, SOFTMAX_TWICE, names
from ikkuna_subscribers.predictions import ConstantPredictionSubscriber
from ikkuna_subscribers.rules.figures import guessing_loss, have_moved, raised_by_others, sources, stays_below


class ClassCollapseRule(Rule):
    """A classifier predicts nearly always the same class, while the labels are of several.

    The figure is the entropy of the predicted classes over that of the labels.
    Threshold: 0.02, for 8 samples in a row, if no class has more than 90% of the labels (entropy above 0.33 nats);
    an untrained or slow network does this too, so the rule is silent while the loss falls, unless it is above 1.3 log C.
    Cannot see: a collapse onto two classes of many.
    """

    name = "class_collapse"
    severity_while_falling = "info"
    needs = sources("prediction_entropy", "label_entropy", "output_cross_entropy")
    uses = sources("output_classes")
    thresholds = ("share",)
    share: float = 0.02
    patience = 8
    explains = names("logit_growth plateau")
    meaning = "The network predicts always the same class (entropy {figure:.2g} of that of the labels)."
    advice = "check class weights, the learning rate, and the bias of the last layer"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        predicted, labels, loss = (history.now(kind) for kind in (*self.needs,))
        if predicted is None or labels is None or loss is None or labels.median(10) < 0.33:
            return
        figure = predicted.median(5) / labels.median(10)
        is_worse_than_a_guess = loss.median(5) > 1.3 * guessing_loss(history)
        falls = loss.count < 15 or loss.median(5) < 0.97 * loss.median(5, skip=10)
        yield Score(0.0 if falls and not is_worse_than_a_guess else self.share / max(figure, 1e-6), figure)


_LASTING = 30
_LEARNED = (
    "It was {:.2g} at the first step, so no part of the network cuts the inputs off: it has learned a constant. "
    "If the loss is that of a guess, the labels do not belong to the inputs; if it is larger, the learning rate is too high."
)
_LEARNED_ADVICE = "compare some labels with their inputs as the model receives them, and lower the learning rate"


class IgnoresInputRule(Rule, mistake=IGNORES_INPUT):
    """The outputs are the same for every sample of a batch.

    The figure is the share of the outputs' energy that differs between samples.
    Threshold: 1e-6, for 5 samples in a row after the second one; healthy networks have 0.007 or more at the start and soon 0.5.
    A language model first learns how frequent each token is, with figures down to 2e-5 for up to 200 steps; therefore figures below 2e-4
    count only after 30 samples that do not rise.
    Cannot see: outputs that depend on a part of the input only; a batch of one sample.
    """

    needs = sources("output_dependence")
    uses = sources("label_entropy")
    thresholds = ("share", "lasting_share")
    share: float = 1e-6
    lasting_share: float = 2e-4
    patience = 5

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve, labels = history.now("output_dependence"), history.curve("label_entropy")
        if curve is None or curve.count <= 2 or (labels is not None and labels.last == 0):
            return
        figure, first = max(curve.last, 1e-12), curve.first[0]
        limit = self.lasting_share if stays_below(curve, self.lasting_share, _LASTING) else self.share
        if not history.is_complete:
            yield Score(limit / figure, curve.last)
        elif first > 100 * self.lasting_share:
            yield Score(limit / figure, curve.last, detail=_LEARNED.format(first), advice=_LEARNED_ADVICE)
        else:
            yield Score(limit / figure, curve.last, detail=f"It was {first:.2g} at the first step already.")


class InputScaleRule(Rule, mistake=INPUT_SCALE):
    """The inputs have a mean or a standard deviation far from that of normalised data.

    Threshold: 10, for 3 samples in a row; pixels from 0 to 255 have a deviation near 70, normalised data 1.
    Cannot see: inputs of networks with an embedding or with a normalisation as the first layer, which are left out;
    inputs that are too small.
    """

    needs = sources("input_data_mean", "input_data_variance")
    thresholds = ("limit",)
    limit: float = 10.0

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for the first input."""
        mean, variance = history.now("input_data_mean"), history.now("input_data_variance")
        classes = [entry.class_name for entry in history.network.modules]
        first = next((name for name in classes if name not in ("Flatten", "Identity", "Unflatten")), "")
        if mean is None or variance is None or "Norm" in first or any("Embedding" in name for name in classes):
            return
        scale = max(abs(mean.last), max(variance.last, 0.0) ** 0.5)
        yield Score(scale / self.limit, scale, kind="input_data_variance")


class NotShuffledRule(Rule):
    """The mean label differs far more from batch to batch than it does in random batches: the data is sorted.

    The figure is the variance of the batches' mean labels, times the size of a batch, over the variance within a batch: about 1 if random.
    Batches with fewer than 4 labels are not judged: the variance within them is not known.
    Samples with another number of classes than the present one are left out: they are of another task, which has its turn.
    Threshold: 5, and a twentieth of the variance of all labels between batches, for 5 samples in a row, over up to 40 samples;
    the largest figure of 140 healthy runs of classifiers was 2.6.  Of language models it was 10, because neighbouring tokens
    belong to one text, with a fiftieth of the variance between batches.
    The finding is an info while the loss falls, unless most of the variance lies between batches: batches of one class each are
    fitted one after another, so that their falling loss says nothing.
    Cannot see: data that is sorted by something else than the label; losses without class labels.
    """

    name = "not_shuffled"
    severity_while_falling = "info"
    version = 2
    needs = sources("label_mean", "label_variance", "label_count")
    uses = sources("output_classes")
    judged_on = frozenset(needs)
    thresholds = ("factor", "share")
    factor: float = 5.0
    share: float = 0.05
    patience = 5
    explains = names("no_learning loss_spike diverges ignores_input class_collapse plateau")
    meaning = "The mean label varies {figure:.0f} times as much from batch to batch as in random batches."
    advice = "shuffle the training data"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        mean, variance, count = (history.now(kind) for kind in (*self.needs,))
        if mean is None or variance is None or count is None or mean.count < 10 or count.median(40) < 4:
            return
        curve = history.curve("output_classes")
        classes = {} if curve is None else dict(zip(curve.steps, curve.values, strict=True))
        rows = zip(mean.steps, mean.values, variance.values, count.values, strict=False)
        chosen = [row[1:] for row in rows if classes.get(row[0]) == classes.get(mean.step)][-40:]
        if len(chosen) < 10:
            return
        means, variances, counts = zip(*chosen, strict=True)
        within = sum(v * n / max(n - 1, 1) for v, n in zip(variances, counts, strict=True)) / len(variances)
        center = sum(means) / len(means)
        between = sum((value - center) ** 2 for value in means) / (len(means) - 1)
        within = max(within, 0.02)
        figure = between * (sum(counts) / len(counts)) / within
        share = between / (between + within)
        yield Score(
            min(figure / self.factor, share / self.share), figure, at_most="warning" if share > 0.5 else "error"
        )


class OneLabelRule(Rule, mistake=ONE_LABEL):
    """Every label of every sampled batch is of the same class.

    Threshold: a fact, without a number, for 8 samples in a row with at least 4 labels.
    The rule is silent if no parameter of the network has an axis as long as there are classes: the scores are then not what a layer has
    returned but similarities, as those of a contrastive loss to one positive and many negatives, of which the positive stands first.
    Cannot see: labels that are wrong in another way (the rule no_learning sees random ones); labels of the batches between samples.
    """

    version = 2
    needs = sources("label_mean", "label_variance", "label_count")
    uses = sources("output_classes")
    judged_on = frozenset(needs)
    patience = 8

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the labels are those of the first batch, and all the same."""
        mean, variance, count = (history.now(kind) for kind in (*self.needs,))
        if mean is not None and variance is not None and count is not None and count.last >= 4:
            is_one = variance.last == 0 and mean.last == mean.first[0] and not _are_similarities(history)
            yield Score(float(is_one), mean.last)


def _are_similarities(history: History) -> bool:
    """Return whether there are as many classes as no axis of a parameter is long; ``False`` if either is unknown."""
    classes = history.now("output_classes")
    parameters = (shape for entry in history.network.modules for _, shape in entry.parameters)
    lengths = {length for shape in parameters for length in shape or ()}
    return classes is not None and bool(lengths) and classes.last not in lengths


class SigmoidTwiceRule(Rule, mistake=SIGMOID_TWICE):
    r"""The outputs went through a sigmoid, but the loss applies the sigmoid again.

    The loss is then that of logits between 0 and 1, and a label of 0 costs at least :math:`\log 2`.
    Threshold: every output so far is between 0 and 1, and the loss is the binary cross-entropy of their sigmoid within 5%.
    In addition, the last module of the network is a sigmoid, or the outputs come within 0.05 of 1 in 20 samples without exceeding it.
    Cannot see: a loss with weights of classes or samples; a sigmoid in a function whose outputs stay below 0.95.
    """

    needs = sources("output_in_unit_interval", "output_binary_cross_entropy", "output_magnitude", "loss")
    judged_on = frozenset(("output_binary_cross_entropy",))

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the outputs are those of a sigmoid and the loss treats them as logits."""
        flag, entropy, largest, loss = (history.now(kind) for kind in (*self.needs,))
        if flag is None or entropy is None or largest is None or loss is None:
            return
        is_bounded = min(flag.kept().values()) == 1
        is_applied = abs(loss.last - entropy.last) < 0.05 * abs(entropy.last)
        modules = history.network.modules
        is_sigmoid = bool(modules) and modules[-1].class_name == "Sigmoid"
        is_at_limit = sum(value > 0.95 for value in largest.values) >= 20
        yield Score(float(is_bounded and is_applied and (is_sigmoid or is_at_limit)), largest.last)


class SoftmaxTwiceRule(Rule, mistake=SOFTMAX_TWICE):
    r"""The outputs are probabilities, but the loss applies the softmax again.

    The loss is then that of logits between 0 and 1, and cannot fall below :math:`\log(1 + (C - 1)/e)`.
    Threshold: every row is non-negative and sums to 1 within 0.001, and the loss is the cross-entropy of their softmax.
    Cannot see: a sigmoid applied twice (that is the rule sigmoid_twice); a loss with weights of classes.
    """

    needs = sources("output_is_probability", "output_cross_entropy", "loss")
    judged_on = frozenset(("output_cross_entropy",))

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the outputs are probabilities and the loss treats them as logits."""
        flag, mean, loss = (history.now(kind) for kind in (*self.needs,))
        if flag is None or mean is None or loss is None:
            return
        is_softmax = abs(loss.last - mean.last) < 0.05 * abs(mean.last)
        yield Score(float(flag.last == 1 and is_softmax), flag.last)


class NoBetterThanConstantRule(Rule):
    """The weights have moved, but a loss of numbers is no better than that of the best constant, and no better than before.

    The figure is the loss over that of the best constant prediction of each batch, see `ConstantPredictionSubscriber`; MSE, MAE, Huber,
    binary cross-entropy, cross-entropy with probabilities, and divergence.
    Threshold: 0.95, less than 2% better than 10 samples before, after updates that add up to 0.05 of the weights' size,
    for 3 samples in a row.
    A value is the median of 10 samples; the loss is of one form in all of them, and that of the constant has changed by less than half,
    because targets that change are made by a network.
    It is an info if something else than the movement of the weights has raised the loss by more than that of the constant, see
    `LossChangeBoundSubscriber`: targets that a network makes, or another term, compete.
    Cannot see: weighted losses and sums of several terms; labels that are mostly noise look the same.
    """

    name = "no_better_than_constant"
    severity_while_falling = "warning"
    version = 2
    needs = sources("loss_over_constant", "loss_form", "constant_loss", "weight_updates_weights_ratio")
    uses = sources("loss_change_bound")
    judged_on = frozenset(("loss_over_constant",))
    thresholds = ("share",)
    share: float = 0.95
    patience = 3
    explains = names("ignores_input plateau vanishing_gradient rank_collapse")
    meaning = "The loss is {figure:.0%} of that of the best constant prediction, and does not fall."
    advice = "check whether labels and inputs belong together, the scale of the labels, and the learning rate"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the loss of the best constant."""
        return (ConstantPredictionSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        share, form, constant = (history.now(kind) for kind in ("loss_over_constant", "loss_form", "constant_loss"))
        if share is None or form is None or constant is None:
            return
        moved = have_moved(history, history.memory[self.name])
        if share.count < 20 or not moved or len(set(form.tail(20))) > 1:
            return
        now, before = share.median(10), share.median(10, skip=10)
        usual, first = constant.median(10), middle(constant.first[:10])
        is_steady = 0.5 * first < usual < 2 * first
        yield Score(
            now / self.share if is_steady and now > 0.98 * before else 0.0,
            now,
            at_most="info" if raised_by_others(history) > usual else "error",
        )


class WrongSignRule(Rule):
    """The loss is exactly the negative of a distance between outputs and labels, or such a distance is maximised.

    Threshold: a fact, for 3 samples in a row: what ``backward()`` is called on is, within 1%, minus the loss of the module that was passed
    as ``loss=``, minus the cross-entropy of outputs and labels, or minus one of the losses that `ConstantPredictionSubscriber` recognises.
    With an optimizer that maximises the loss, it is the loss, the cross-entropy or one of these losses without the minus.
    A sample without such a loss ends the row, and so does one with another of them: a small loss is near one by chance.
    Cannot see: a sum of several terms; a gradient that is reversed on purpose, as for unlearning.
    """

    name = "wrong_sign"
    needs = sources("loss")
    version = 2
    uses = sources("output_cross_entropy", "label_entropy", "loss_over_constant", "loss_form", "optimizer_maximize")
    judged_on = frozenset(("output_cross_entropy", "loss_form"))
    severity = "error"
    explains = names(
        "diverges no_better_than_constant no_learning lr_too_high nonfinite ignores_input class_collapse gradient_spike gradient_jump "
        "loss_spike dead_units signal_scale update_ratio logit_growth"
    )
    meaning = "A distance between outputs and labels is maximised, and grows; the loss is {figure:.3g}."
    advice = "remove the minus in front of the loss, or maximize=True, or use the negative logarithm of the likelihood"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the loss has the wrong sign."""
        losses = history.curves("loss")
        whole, own = losses.get("objective"), losses.get(None)
        share, labels = history.now("loss_over_constant"), history.now("label_entropy")
        form = history.now("loss_form")
        sign = -1 if history.is_maximised else 1
        is_of_form = (
            share is not None and sign * share.last < 0 and form is not None and len(set(form.tail(self.patience))) == 1
        )
        if whole is None or own is None:
            whole, own = history.curve("loss"), history.now("output_cross_entropy")
        if whole is None:
            return
        is_distance = share is not None or (labels is not None and labels.last > 0)
        is_negated = (
            own is not None and own.step == whole.step and own.last > 0 and abs(whole.last / own.last + sign) < 0.01
        )
        yield Score(float(is_distance and (is_negated or is_of_form)), whole.last)
