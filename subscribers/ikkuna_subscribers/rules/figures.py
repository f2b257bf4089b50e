"""Figures that several rules compute from a history, and the subscribers that publish what rules need."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ikkuna.diagnosis import History, TimeSeries
from ikkuna.diagnosis.history import GRADIENTS, middle
from ikkuna.metrics.messages.kinds import FACT_KINDS

_STATISTICS = {
    "norm2": "NormSubscriber",
    "mean": "MeanSubscriber",
    "variance": "VarianceSubscriber",
    "sparsity": "SparsitySubscriber",
    "nonfinite": "NonFiniteSubscriber",
    "min": "MinMaxSubscriber",
    "max": "MinMaxSubscriber",
}
_OTHERS = {  # subscriber → the kinds that it publishes
    "LossSubscriber() after set_loss()": ("loss",),
    'RatioSubscriber(["weight_updates", "weights"])': ("weight_updates_weights_ratio",),
    "DeadUnitsSubscriber() for modules such as nn.ReLU; functions such as torch.relu are not seen": (
        "activations_dead",
    ),
    "ConstantPredictionSubscriber()": ("loss_form", "loss_over_constant", "constant_loss"),
    "InputRowsSubscriber()": (
        *("input_batch_age", "input_batch_repeats", "input_labels_repeats"),
        *("input_rows_contradicted", "input_rows_known", "input_rows_mean", "input_rows_deviation"),
    ),
    "LossChangeBoundSubscriber()": ("loss_change_bound",),
    "GlobalNormSubscriber()": (GRADIENTS,),
    "LearningRateSubscriber()": ("learning_rate",),
    "ModuleStateSubscriber()": ("evaluation_mode", "weight_requires_grad", "untied_weights"),
    "TrainAccuracySubscriber()": ("train_accuracy",),
    "TestAccuracySubscriber(data)": ("test_accuracy",),
    "NonFiniteSubscriber()": ("nonfinite_producer",),
    "DimensionSubscriber() for the layers with weights": ("activations_dimension",),
    "AttentionSubscriber(dataset)": ("attention_evenness",),
    "RouterSubscriber(top_k)": ("dead_experts", "window_load_max"),
    "RunningStatisticsSubscriber() for the batch norms": ("running_mean_distance", "running_variance_distance"),
    'OptimizerStateSubscriber("step", "mean")': ("weight_state_step_mean",),
    'OptimizerStateSubscriber("exp_avg_sq", "mean")': ("weight_state_exp_avg_sq_mean",),
    "rules while the model trains": (*FACT_KINDS, "weight_micro_gradients_count"),
}
_SOURCES = {kind: subscriber for subscriber, kinds in _OTHERS.items() for kind in kinds}


def new_scores(history: History, kind: str, memory: dict[str, Any]) -> Iterator[tuple[int, float, float]]:
    """Yield the steps, values and scores of a scored series that were not yielded before; unknown scores are left out.

    Parameters
    ----------
    history : History
        The series.
    kind : str
        The kind that is scored.
    memory : dict
        The memory of the rule.
    """
    fresh, before = list[tuple[int, float, float]](), memory.get("step", -1)
    for found in reversed(history.scored[kind].latest):
        if found[0] <= before:
            break
        fresh.append(found)
    for found in reversed(fresh):
        if found[2] > -math.inf:
            memory["step"] = found[0]
            yield found


def sources(*kinds: str) -> dict[str, str]:
    """Return the subscriber that publishes each of some kinds, as a call of its constructor.

    Examples
    --------
    >>> sources("weights_norm2", "output_dependence")
    {'weights_norm2': 'NormSubscriber("weights")', 'output_dependence': 'PredictionSubscriber()'}
    """
    return {kind: _source(kind) for kind in kinds}


def _source(kind: str) -> str:
    if kind in _SOURCES:
        return _SOURCES[kind]
    tensor, _, statistic = kind.rpartition("_")
    if kind.startswith("buffers_"):
        return "BufferReplicaSubscriber() on several ranks"
    if "_ranks_unequal" in kind:
        return "ReplicaSubscriber() on several ranks"
    if kind.startswith(("output_", "prediction_", "label_")):
        return "PredictionSubscriber()"
    return f'{_STATISTICS[statistic]}("{tensor}")'


WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "GRU", "LSTM", "RNN")
"""The classes of torch's layers with weight matrices that combine features."""

_CARRIED_OVER = 1e6


def gradient_growth(history: History) -> float:
    """Return the gradient that the optimizer gets over the one that a backward gave, the median over weights.

    With accumulation over k micro-batches it is at most k, after clipping below 1; NaN if it is unknown.
    If the backward gave zeros, the gradient is that of earlier steps, and the figure is 1e6.
    Weights that no optimizer owns are left out: ``optimizer.zero_grad()`` does not clear their gradients.
    """
    unowned = history.curves("unowned_parameters")
    fresh = {name: c for name, c in history.fresh("weight_micro_gradients_norm2") if name not in unowned}
    pairs = [(c.last, fresh[name].last) for name, c in history.fresh("weight_gradients_norm2") if name in fresh]
    return middle([used / given if given > 0 else _CARRIED_OVER for used, given in pairs if used > 0])


def gradient_scales(history: History) -> list[tuple[str, float]]:
    """Return the root mean square of the gradient of each weight matrix, in the order of the network; embeddings are left out."""
    network = history.network
    return [
        (name, curve.last / math.sqrt(network.size_of(name)))
        for name, curve in history.matrices("weight_gradients_norm2")
        if "Embedding" not in network.class_of(name)
    ]


def median_ratio(history: History) -> float:
    """Return the norm of an update over that of its weight, the median over the weight matrices that moved; NaN if none did."""
    return middle([c.last for _, c in history.matrices("weight_updates_weights_ratio") if c.last > 0])


def have_moved(history: History, memory: dict[str, Any]) -> bool:
    """Return whether the updates so far, which a rule remembers, add up to 0.05 of the weights' size.

    A sample stands for the steps since the one before, ten at most.
    """
    if (ratio := median_ratio(history)) == ratio:
        passed = min(history.step - memory.get("moved_at", -math.inf), SPACE)
        memory["moved"], memory["moved_at"] = memory.get("moved", 0.0) + ratio * passed, history.step
    return bool(memory.get("moved", 0.0) >= 0.05)


SPACE = 10
"""The least number of steps between two samples for which the thresholds of rules about slow changes were measured."""


def spaced(curve: TimeSeries, number: int) -> list[int]:
    """Return the positions of up to `number` of the latest values, the last one first, at least `SPACE` steps apart."""
    found, steps = list[int](), list(curve.steps)
    for i in range(len(steps) - 1, -1, -1):
        if len(found) == number:
            break
        if not found or steps[i] <= steps[found[-1]] - SPACE:
            found.append(i)
    return found


def guessing_loss(history: History) -> float:
    """Return the cross-entropy of a guess among all classes, log C; NaN if the outputs are no classification."""
    classes: TimeSeries | None = history.curve("output_classes")
    return math.log(classes.last) if classes is not None and classes.last > 1 else math.nan


def is_of_classes(history: History, name: str) -> bool:
    """Return whether a weight matrix has a row for each class of the outputs, as that of the last layer has."""
    classes, shape = history.curve("output_classes"), history.network.shape_of(name)
    return classes is not None and shape is not None and shape[0] == classes.last


def scale_of_loss(history: History) -> float:
    """Return the loss that a rise is compared with: that of a guess or that of the first steps, whichever is larger."""
    curve = history.curve("loss")
    if curve is None:
        return math.nan
    first, guess = abs(middle(curve.first[:5])), guessing_loss(history)
    return max(first, guess) if guess == guess else first


def raised_by_others(history: History) -> float:
    """Return by how much something else than the movement of the weights has raised the loss; negative if that is unknown.

    The movement has changed the loss by at most the sum of ``loss_change_bound``; the rest was made by a term, a network or data that
    compete with what the gradient lowers.
    """
    bounds, curve = history.curve("loss_change_bound"), history.curve("loss")
    if bounds is None or curve is None:
        return -math.inf
    return curve.median(16) - middle(curve.first[:5]) - math.fsum(bounds.values)


def noise_of_loss(curve: TimeSeries, level: float) -> float:
    """Return the median distance of two successive losses among the first 20, at most `level`.

    A rise that is not larger than this is chance, as in reinforcement learning, where the loss is mostly noise.
    The bound lets a loss that swings from the start be seen to diverge.
    """
    return min(middle([abs(after - before) for before, after in pairwise(curve.first)]), level)


def stays_below(curve: TimeSeries, limit: float, number: int) -> bool:
    """Return whether the last `number` values are below a limit, and the last one is not above their median.

    A language model first learns how frequent each token is.  Its outputs then hardly depend on its inputs for up to 200 steps,
    after which these values rise.
    """
    past = curve.tail(number)
    return len(past) == number and max(past) < limit and curve.last <= middle(past)
