"""Rules that compare the loss with the distance between outputs and labels, and with that of the best constant prediction."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.history import middle
from ikkuna_subscribers.predictions import ConstantPredictionSubscriber
from ikkuna_subscribers.rules.figures import sources


class NoBetterThanConstantRule(Rule):
    """The weights have moved, but a loss of numbers is no better than that of the best constant, and no better than before.

    The figure is the loss over that of the best constant prediction of each batch, see `ConstantPredictionSubscriber`; MSE, MAE, Huber,
    binary cross-entropy, cross-entropy with probabilities, and divergence.
    Threshold: 0.95, less than 2% better than 10 samples before, after updates that add up to 0.05 of the weights' size,
    for 3 samples in a row.
    A value is the median of 10 samples; the loss is of one form in all of them, and that of the constant has changed by less than half,
    because targets that change are made by a network.
    Cannot see: weighted losses and sums of several terms; labels that are mostly noise look the same.
    """

    name = "no_better_than_constant"
    severity_while_falling = "warning"
    needs = sources("loss_over_constant", "loss_form", "constant_loss", "weight_updates_weights_ratio")
    judged_on = frozenset(("loss_over_constant",))
    thresholds = ("share",)
    share: float = 0.95
    patience = 3
    explains = frozenset(("ignores_input", "plateau", "vanishing_gradient", "rank_collapse"))
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
        memory = history.memory[self.name]
        ratios = [curve.last for _, curve in history.matrices("weight_updates_weights_ratio") if curve.last > 0]
        if ratios:
            memory["moved"] = memory.get("moved", 0.0) + middle(ratios)
        if share.count < 20 or memory.get("moved", 0.0) < 0.005 or len(set(form.tail(20))) > 1:
            return
        now, before = share.median(10), share.median(10, skip=10)
        usual, first = constant.median(10), middle(constant.first[:10])
        is_steady = 0.5 * first < usual < 2 * first
        yield Score(now / self.share if is_steady and now > 0.98 * before else 0.0, now)


class WrongSignRule(Rule):
    """The loss is exactly the negative of a distance between outputs and labels: it is maximised.

    Threshold: a fact, for 3 samples in a row: what ``backward()`` is called on is, within 1%, minus the loss of the module that was passed
    as ``loss=``, minus the cross-entropy of outputs and labels, or minus one of the losses that `ConstantPredictionSubscriber` recognises.
    Cannot see: a sum of several terms; a gradient that is reversed on purpose, as for unlearning.
    """

    name = "wrong_sign"
    needs = sources("loss")
    uses = sources("output_cross_entropy", "label_entropy", "loss_over_constant")
    judged_on = frozenset(("output_cross_entropy", "loss_over_constant"))
    severity = "error"
    explains = frozenset(
        (
            *("diverges", "no_better_than_constant", "no_learning", "lr_too_high", "nonfinite", "ignores_input"),
            *(
                "class_collapse",
                "gradient_spike",
                "gradient_jump",
                "loss_spike",
                "dead_units",
                "signal_scale",
                "update_ratio",
                "logit_growth",
            ),
        )
    )
    meaning = "The loss is {figure:.3g}, exactly the negative of a distance between outputs and labels, which grows."
    advice = "remove the minus, or use the negative logarithm of the likelihood"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the loss has the wrong sign."""
        losses = history.curves("loss")
        whole, own = losses.get("objective"), losses.get(None)
        share, labels = history.now("loss_over_constant"), history.now("label_entropy")
        if whole is None or own is None:
            whole, own = history.curve("loss"), history.now("output_cross_entropy")
        if whole is None:
            return
        is_distance = share is not None or (labels is not None and labels.last > 0)
        is_negated = (
            own is not None and own.step == whole.step and own.last > 0 and abs(whole.last / own.last + 1) < 0.01
        )
        yield Score(float(is_distance and (is_negated or (share is not None and share.last < 0))), whole.last)
