"""Rules about activations and the modes of modules."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.history import middle
from ikkuna.diagnosis.mistakes import DEAD_UNITS, EVALUATION_MODE, NONFINITE, SIGNAL_LOST, SIGNAL_SCALE, names
from ikkuna_subscribers.activations import DeadUnitsSubscriber, ModuleStateSubscriber, RunningStatisticsSubscriber
from ikkuna_subscribers.representation import DimensionSubscriber
from ikkuna_subscribers.rules.figures import WEIGHTED, sources, stays_below

_RECTIFIERS = ("ReLU", "ReLU6")


class DeadUnitsRule(Rule, mistake=DEAD_UNITS):
    """Nearly all units of a rectified layer are inactive for every sample of a window.

    Threshold: 90% of the units, for 3 samples in a row; healthy runs stay below 31%, half of the units is common in fine-tuned networks.
    Cannot see: rectifiers that are functions and not modules (the rule zero_gradient sees those that are wholly dead);
    other activation functions.
    """

    needs = sources("activations_dead")
    thresholds = ("share",)
    share: float = 0.9

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the rectified layers."""
        names = network.named(*_RECTIFIERS)
        if not names:
            return ()
        return (DeadUnitsSubscriber(modules=list(names), window=3, inactivity=0, tau=None, subsample=2 * every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each rectified layer."""
        for name, curve in history.fresh("activations_dead"):
            if history.network.class_of(name) in (*_RECTIFIERS, ""):
                yield Score(curve.last / self.share, curve.last, name)


class SaturatedRule(Rule):
    """The outputs of a tanh or a sigmoid are nearly all at its limits.

    The figure is the mean square of the tanh's outputs, or of 2h - 1 for a sigmoid: 1 if every output is at a limit.
    Threshold: 0.75, for 3 samples in a row; healthy layers stay below 0.6.
    Cannot see: activation functions inside recurrent layers, or that are no modules; a sigmoid at the output, which is left out.
    """

    name = "saturated"
    severity_while_falling = "info"
    needs = sources("activations_variance", "activations_mean")
    thresholds = ("share",)
    share: float = 0.75
    explains = names("vanishing_gradient ignores_input no_learning class_collapse rank_collapse plateau")
    meaning = "The outputs of this layer are at the limits of its activation function (mean square {figure:.2f} of 1)."
    advice = "use a smaller initialisation or learning rate, or a normalisation in front of it"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each bounded layer but the last one."""
        means, network = history.curves("activations_mean"), history.network
        if not network.named("Tanh", "Sigmoid"):
            return
        last = max((network.position(name) for name in means), default=0)
        for name, curve in history.fresh("activations_variance"):
            class_name = network.class_of(name)
            if class_name not in ("Tanh", "Sigmoid") or name not in means or network.position(name) >= last:
                continue
            mean, variance = means[name].last, curve.last
            figure = variance + mean**2 if class_name == "Tanh" else 4 * variance + (2 * mean - 1) ** 2
            yield Score(figure / self.share, figure, name)


_FEW_UNITS = 16
_LASTING = 15


class RankCollapseRule(Rule):
    """The outputs of a hidden layer differ in a single direction, although there are several classes.

    Rows are the outputs for samples and positions.
    The figure is the participation ratio of the covariance of the layer's units, the median of the last 5 samples.
    Threshold: 1.001, for 5 samples in a row: half a thousandth of the variance is left for all other directions; healthy runs
    of classifiers stay above 1.1, and a language model that learns only how frequent each token is, for up to 200 steps, falls to 1.004.
    Therefore figures below 1.02 count only after 15 samples that do not rise.
    It was chosen after about 30 of the runs below had been seen; with other seeds and architectures it named 19 of 20 planted layers,
    each in its module, and none in 36 healthy runs.
    Cannot see: the outputs of the network (that is the rule ignores_input); layers with fewer than 16 units;
    losses that are no classification; fewer than four classes, because a network that tells two classes apart needs one direction;
    attention, whose rank falls between positions and not between samples.
    """

    name = "rank_collapse"
    severity_while_falling = "info"
    needs = sources("activations_dimension", "output_classes")
    judged_on = frozenset(("activations_dimension",))
    thresholds = ("limit", "lasting_limit")
    limit: float = 1.001
    lasting_limit: float = 1.02
    patience = 5
    explains = names("no_learning plateau class_collapse vanishing_gradient overfit")
    meaning = "The outputs of this layer differ in {figure:.3g} directions only."
    advice = "look for a bottleneck, a product or a mean that keeps one number of each sample; check normalisation and initialisation"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the layers with weights, without those with few units."""
        names = [
            name for name in network.named(*WEIGHTED) if (network.shape_of(name) or (_FEW_UNITS,))[0] >= _FEW_UNITS
        ]
        return (DimensionSubscriber(modules=names, subsample=2 * every),) if names else ()

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each hidden layer."""
        classes = history.curve("output_classes")
        if classes is None or not 4 <= classes.last < math.inf:
            return
        outputs = round(classes.last)
        for name, curve in history.fresh("activations_dimension"):
            if (history.network.shape_of(name) or (0,))[0] == outputs:
                continue
            figure = curve.median(5)
            if figure == figure:
                is_lasting = stays_below(curve, self.lasting_limit, _LASTING)
                yield Score((self.lasting_limit if is_lasting else self.limit) / figure, figure, name)


class SignalLostRule(Rule, mistake=SIGNAL_LOST):
    """Before the first update the outputs do not differ between samples: the signal is lost in the layers.

    Threshold: 1e-6 of the energy of the outputs; healthy networks have 0.005 or more, seven layers of sigmoids 1e-10.
    Cannot see: a last layer that begins at zero, which is a usual choice and is left out; a resumed run.
    """

    needs = sources("output_dependence")
    uses = sources("weights_norm2")
    thresholds = ("share",)
    share: float = 1e-6
    patience = 1

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score at the first step."""
        curve = history.now("output_dependence")
        if curve is None or curve.step != 0:
            return
        norms = [series.last for _, series in history.matrices("weights_norm2")]
        begins_at_zero = bool(norms) and norms[-1] == 0
        yield Score(0.0 if begins_at_zero else self.share / max(curve.last, 1e-12), max(curve.last, 0.0))


class SignalScaleRule(Rule, mistake=SIGNAL_SCALE):
    """Before the first update the outputs of a layer with weights have a standard deviation far above 1.

    Threshold: 30; healthy networks stay below 10 (largest of 140 runs), and a residual stream grows with the root of its depth.
    The rule is silent if a module behind the layer is a normalisation, which removes the scale.
    Cannot see: a signal that becomes too small, which a normalisation or a zero initialisation does on purpose; a resumed run.
    """

    needs = sources("activations_variance")
    thresholds = ("limit",)
    limit: float = 30.0
    patience = 1

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each layer at the first step."""
        if history.step != 0:
            return
        network = history.network
        last_norm = max((i for i, entry in enumerate(network.modules) if "Norm" in entry.class_name), default=-1)
        for name, curve in history.fresh("activations_variance"):
            if network.class_of(name) in WEIGHTED and curve.last >= 0:
                scale = math.sqrt(curve.last)
                is_normalised = network.position(name) < last_norm
                yield Score(0.0 if is_normalised else scale / self.limit, scale, name)


class RunningStatisticsRule(Rule):
    """The running mean or variance of a batch norm stays far from that of the batches, so evaluation differs from training.

    The figure is the distance of the mean in running standard deviations, or the distance of the logarithms of the variances.
    Threshold: 1.0, the median of 5 samples from step 100 on, for 3 samples in a row; with the usual momentum of 0.1 the running
    statistics have forgotten their initial values by step 50, and healthy layers stay below 0.3.
    Cannot see: statistics that are replaced between the last step and the evaluation; layers in evaluation mode.
    """

    name = "running_statistics"
    severity_while_falling = "warning"  # the training loss does not depend on these statistics
    needs = sources("running_mean_distance", "running_variance_distance")
    thresholds = ("distance",)
    distance: float = 1.0
    explains = names("overfit")
    meaning = "The running statistics of this batch norm are far from those of the batches ({figure:.2g}), so evaluation uses others."
    advice = "check the momentum, and whether other data pass through the network in training mode"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the batch-norm layers."""
        names = [entry.name for entry in network.modules if "BatchNorm" in entry.class_name]
        return (RunningStatisticsSubscriber(modules=names, subsample=every),) if names else ()

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each batch norm."""
        variances = history.curves("running_variance_distance")
        for name, curve in history.fresh("running_mean_distance"):
            if history.step - (history.begin or 0) < 100 or curve.count < 5:
                continue
            figure = max(curve.median(5), middle(variances[name].tail(5)) if name in variances else 0.0)
            yield Score(figure / self.distance, figure, name)


class EvaluationModeRule(Rule, mistake=EVALUATION_MODE):
    """Every module is in evaluation mode in training steps, and the network has dropout, or a batch norm that is not frozen.

    Threshold: a fact, without a number, for 3 samples in a row.
    Cannot see: a single layer in the wrong mode, because frozen batch norms are usual in fine-tuning.
    """

    needs = sources("evaluation_mode")
    uses = sources("weight_requires_grad")

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the flags of modules."""
        return (ModuleStateSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield the share of modules in evaluation mode if it is 1, for each module that the mode changes."""
        curve = history.now("evaluation_mode")
        if curve is None:
            return
        frozen = {name for name, flag in history.curves("weight_requires_grad").items() if flag.last == 0}
        changed = [
            entry.name
            for entry in history.network.modules
            if "Dropout" in entry.class_name or ("BatchNorm" in entry.class_name and entry.name not in frozen)
        ]
        yield from (Score(float(curve.last >= 1 and bool(changed)), curve.last, name) for name in changed or (None,))


_OUTSIDE = (
    "look in the loss for the logarithm or the root of a number that may be 0 or less, a division by 0, and overflow"
)
_CLEAN = "search the data for missing values; a dump of the flight recorder names the row"
_DERIVATIVE = "look for a function whose derivative is infinite: the root or the norm of 0, a power below 1, or overflow in half precision"


_GROWN = 10.0
_SMALLER = (
    "lower the learning rate; look for a loss that is a sum in place of a mean, and for the factor of a gradient scaler that is left "
    "in the gradients"
)


def _is_replaced(history: History) -> bool:
    """Return whether inputs or outputs of modules are not finite, but the loss, all weights and all their gradients are."""

    def values(*kinds: str) -> list[float]:
        return [curve.last for kind in kinds for _, curve in history.fresh(kind)]

    is_seen = not all(map(math.isfinite, values("activations_variance", "input_data_mean")))
    are_known = bool(values("loss") and values("weight_gradients_norm2"))
    return is_seen and are_known and all(map(math.isfinite, values("loss", "weights_norm2", "weight_gradients_norm2")))


class NonFiniteRule(Rule, mistake=NONFINITE):
    """The loss, an activation, a gradient or a weight is NaN or infinite.

    If the inputs of the network are not finite, they are named.  Otherwise the module is the first one whose activation is not finite
    although its weights are; if only gradients are not finite, the last one.
    If `NonFiniteSubscriber` publishes the producer, that is used.
    If only the loss is known, a tenfold growth before it shows that the steps were too large, and a loss below twice the first that the
    batch, or a function outside of its domain, is the cause.
    Threshold: a fact, without a number.  Inputs and outputs of modules are spared if the loss, all weights and all their gradients of the
    step are finite, as behind the softmax of a row that is masked as a whole: what is not finite is then left out or replaced.
    A weight that is not finite before the backward of a step whose loss is not is named in every step, sampled or not, on the host.
    Cannot see: another producer if the first NaN appears in a step that is not sampled; steps that a gradient scaler skips.
    """

    version = 2
    needs = sources("weights_norm2")
    uses = sources("loss", "activations_variance", "weight_gradients_norm2", "nonfinite_producer", "input_data_mean")
    judged_on = frozenset(("weights_norm2", "activations_variance", "weight_gradients_norm2", "nonfinite_producer"))
    patience = 1

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for the module that comes first, or for the network if only the loss is not finite."""
        if history.memory[self.name].get("found"):
            return
        places = [self._producer]  # what another subscriber has found
        if not history.is_finite:
            places = [self._inputs, self._producer, self._module, self._loss, self._gradient]
        if _is_replaced(history):
            places = []
        found = next(filter(None, (place(history) for place in places)), None)
        history.memory[self.name]["found"] = found is not None
        yield found or Score(0.0, 0.0)

    @staticmethod
    def _inputs(history: History) -> Score | None:
        """Return a score if a weight is finite that receives inputs that are not."""
        bad = [curve for _, curve in history.fresh("input_data_mean") if not math.isfinite(curve.last)]
        if not bad or not all(math.isfinite(curve.last) for _, curve in history.fresh("weights_norm2")):
            return None
        text, advice = "They came in with the inputs of this step, while all weights are finite.", _CLEAN
        return Score(1.0, bad[0].last, None, "input_data_mean", detail=text, advice=advice)

    @staticmethod
    def _producer(history: History) -> Score | None:
        text = (
            "It is first seen at this module, in its forward or its backward: everything that was seen before it in the step is finite. "
            "Code between two modules, or the loss, can have produced it."
        )
        names = (name for name, _ in history.fresh("nonfinite_producer"))
        return next((Score(1.0, 1.0, name, "nonfinite_producer", detail=text) for name in names), None)

    @staticmethod
    def _loss(history: History) -> Score | None:
        """Return a score if the loss is not finite, with what the losses before it say of the cause."""
        loss = history.now("loss")
        if loss is None or math.isfinite(loss.last):
            return None
        text, advice, before = (
            "It is the loss; no weight was found that is.",
            "",
            [x for x in loss.values if math.isfinite(x)],
        )
        if before and before[0] > 0 and before[-1] == max(before) > _GROWN * before[0]:
            text = f"It is the loss, which had grown from {before[0]:.3g} to {before[-1]:.3g} before: the steps were too large."
            advice = _SMALLER
        elif before and 0 < before[-1] < 2 * before[0]:
            text = f"It is the loss, which was {before[-1]:.3g} before: it has not grown, so this batch or a function of it is the cause."
            advice = _CLEAN
            seen = [c for kind in ("input_data_mean", "activations_variance") for _, c in history.fresh(kind)]
            if history.fresh("activations_variance") and all(math.isfinite(curve.last) for curve in seen):
                text += " All activations of this step are finite, so the loss function has made it."
                advice = _OUTSIDE
        return Score(1.0, loss.last, None, "loss", detail=text, advice=advice)

    @staticmethod
    def _module(history: History) -> Score | None:
        """Return the first module that makes NaN of finite weights, or the first broken weight."""
        weights = {name: curve.last for name, curve in history.fresh("weights_norm2")}
        broken = [name for name, value in weights.items() if not math.isfinite(value)]
        for name, curve in history.fresh("activations_variance"):
            was_replaced = any(map(math.isnan, curve.tail(1, skip=1)))
            if curve.last != curve.last and not broken and not was_replaced:
                text = "It is the output of this module, while all weights are finite."
                return Score(1.0, curve.last, name, "activations_variance", detail=text)
        if broken:
            text = "It is the weight of this module, which an earlier step has changed."
            return Score(1.0, weights[broken[0]], broken[0], "weights_norm2", detail=text)
        return None

    @staticmethod
    def _gradient(history: History) -> Score | None:
        """Return the last weight whose gradient is not finite."""
        gradients = [(name, curve.last) for name, curve in history.fresh("weight_gradients_norm2")]
        bad = [(name, value) for name, value in gradients if not math.isfinite(value)]
        if not bad:
            return None
        is_known = bool(history.fresh("activations_variance")) or history.now("loss") is not None
        seen = "weights and outputs are finite" if is_known else "weights are finite and outputs were not measured"
        text, advice = f"It is the gradient of this weight, while {seen}.", _DERIVATIVE if is_known else _CLEAN
        return Score(1.0, bad[-1][1], bad[-1][0], "weight_gradients_norm2", detail=text, advice=advice)
