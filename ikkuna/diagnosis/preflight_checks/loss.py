"""Checks of inputs, labels, the loss and the layer before it."""

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ikkuna.diagnosis.mistakes import (
    ACTIVATION_BEFORE_LOSS,
    DIVIDED_TWICE,
    FROZEN_OUTPUT_LAYER,
    INPUT_SCALE,
    LOSS_AT_INIT,
    LOSS_SCALE,
    MIXED_REDUCTION,
    NO_LOG_SOFTMAX,
    SOFTMAX_TWICE,
    TARGET_SCALE,
)
from ikkuna.diagnosis.preflight_checks.batch import widened
from ikkuna.diagnosis.preflight_checks.contracts import findings_of
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, Classification
from ikkuna.diagnosis.preflight_checks.trial import Trial, loss_with
from ikkuna.numerics.prediction import initial_cross_entropy, initial_logit_deviation, is_of_constructor
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.failures import error_text
from ikkuna.support.modules import module_of
from ikkuna.support.torch_internals import pytree
from ikkuna.support.undisturbed import run_model


def input_scale(trial: Trial) -> Iterator[Finding]:
    """Find floating-point inputs, and labels, of a large mean or standard deviation; the rule `input_scale` judges them."""
    for mistake, tensors in ((INPUT_SCALE, trial.batch.tensors), (TARGET_SCALE, [trial.batch.labels])):
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                continue
            variance, mean = torch.var_mean(widened(tensor), correction=0)
            values = {"input_data_mean": float(mean), "input_data_variance": float(variance)}
            if tensor.numel() > 1 and (bad := trial.bad_scores("input_scale", values)):
                yield mistake.found(bad[0].figure, at_most="info")
                break


_EXCESS = 1.5  # of the loss of a guess
_GAP = 1.0  # nats; with two classes the random outputs of a healthy network reach 1.5 times the loss of a guess
_RELATIVE = 1e-3
_MOST_PARAMETERS = 20_000_000  # of a model that is copied
_ROUNDING = 1e-5  # of a sum of many terms in single precision


def loss_at_init(trial: Trial) -> Iterator[Finding]:
    """Find a cross-entropy before the first update that is far above that of a guess, the logarithm of the classes.

    The excess must also be twice its standard error, because the scores of few samples vary.
    It is a warning if the inputs are not scaled, or if the weights of the last layer are larger than any usual initialisation makes them.
    A usual one may explain the excess, and a network that was trained on other labels, or has scaled cosines, begins certain and wrong.
    """
    losses, guess = _cross_entropies(trial)
    entropy = float(losses.mean()) if losses.numel() else math.nan
    error = float(losses.std()) / math.sqrt(losses.numel()) if losses.numel() > 1 else math.inf
    if math.isfinite(entropy) and entropy > _EXCESS * guess and entropy - guess > max(_GAP, 2 * error):
        last, is_scaled = _last_weights(trial), not any(input_scale(trial))
        explained = 0.0 if last is None else _explained_loss(trial, last)
        if is_large := last is not None and explained <= guess and _falls_if_halved(trial, last):
            reason = "the weights of the last layer are larger than any usual initialisation makes them"
        elif entropy <= explained:
            reason = "the last layer begins with large weights"
        elif is_scaled:
            reason = "the model is certain and wrong, as one that was trained on other labels"
        else:
            reason = "the model is certain and wrong"
        detail = f"It is {entropy:.3g}, and that of a guess {guess:.3g}: {reason}."
        is_named = last is not None and (is_large or entropy <= explained)
        module = _layer_of(trial, last) if last is not None and is_named else None
        large = _large_layers(trial) if is_large else []
        yield LOSS_AT_INIT.found(
            entropy / guess,
            detail=f"{detail} So are those of {listed([n for n in large if n != module])}."
            if len(large) > 1
            else detail,
            module=module,
            modules=tuple(large) if len(large) > 1 else (),
            at_most="info" if is_scaled and not is_large else "warning",
        )


def frozen_output_layer(trial: Trial) -> Iterator[Finding]:
    """Find a classifier's frozen output layer with the weights of its constructor, while other layers train.

    A part that an optimizer of its own trains, such as the discriminator of a GAN, may be frozen at this moment alone.
    """
    last = _last_weights(trial)
    if last is None or last.requires_grad or not trial.trainable or not is_of_constructor(last):
        return
    for optimizer in trial.optimizers:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p is last for p in owned) and not any(p.requires_grad for p in owned):
            return
    yield FROZEN_OUTPUT_LAYER.found(module=_layer_of(trial, last))


def _layer_of(trial: Trial, weight: nn.Parameter) -> str:
    """Return the name of the module that has a parameter."""
    return next(module_of(name) for name, parameter in trial.model.named_parameters() if parameter is weight)


def _large_layers(trial: Trial) -> list[str]:
    """Return the called layers with weights that are larger than any usual initialisation makes them."""
    found = {
        call.name: None
        for call in trial.first_step.record.calls
        for weight in call.module.parameters(recurse=False)
        if weight.ndim > 1
        and weight.is_floating_point()
        and not isinstance(call.module, nn.Embedding | nn.EmbeddingBag)
        and bool(weight.any())
        and not initial_logit_deviation(weight.shape, _rms(weight))
    }
    return [*found]


def _rms(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())


def _last_weights(trial: Trial) -> nn.Parameter | None:
    """Return the weights behind the outputs of a classifier, by their shape; ``None`` if there are none."""
    is_binary = isinstance(trial.loss, nn.BCEWithLogitsLoss)
    classes = trial.output.shape[-1] if is_binary else trial.classification.classes
    weights = (p for call in reversed(trial.first_step.record.calls) for p in call.module.parameters(recurse=False))
    return next((weight for weight in weights if weight.ndim > 1 and len(weight) == classes), None)


def _falls_if_halved(trial: Trial, last: nn.Parameter) -> bool:
    """Return whether half of the last weights would make a smaller loss; cosines do not depend on their scale."""
    names = [name for name, parameter in trial.model.named_parameters() if parameter is last]
    before, halved = loss_with(trial, {}), loss_with(trial, {name: last.detach() / 2 for name in names})
    return halved < before - 1e-3 * abs(before)


def _explained_loss(trial: Trial, last: Tensor) -> float:
    """Return the cross-entropy that the last weights explain; that of a guess if they are too large."""
    deviation = initial_logit_deviation(last.shape, _rms(last))
    if isinstance(
        trial.loss, nn.BCEWithLogitsLoss
    ):  # the cross-entropy of two classes whose scores differ by the logit
        return initial_cross_entropy(2, deviation / math.sqrt(2))
    return initial_cross_entropy(len(last), deviation)


def _cross_entropies(trial: Trial) -> tuple[Tensor, float]:
    """Return the cross-entropy of each prediction of the first step, and that of a guess."""
    value, output, labels = float(trial.loss_value.mean()), trial.output, trial.batch.labels
    if isinstance(trial.loss, nn.BCEWithLogitsLoss) and isinstance(labels, Tensor) and labels.shape == output.shape:
        scores, wanted = output.float(), labels.float()
        return functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none"), math.log(2)
    task = trial.classification
    if trial.batch.loss_inside:
        candidates = [task.counted]
        if len(task.labels) % (size := trial.batch.size or 1) == 0 and len(task.labels) > size:
            candidates.append(task.shifted(size).counted)
        chosen = next((each for each in candidates if _equal(value, each.cross_entropy)), None)
        if chosen is None:
            raise CannotJudgeError("the loss that the model computes is not the cross-entropy of its outputs")
        return chosen.cross_entropies, math.log(task.classes)
    if not _is_cross_entropy(trial, task.counted):
        raise CannotJudgeError("the loss is not a cross-entropy")
    return task.counted.cross_entropies, math.log(task.classes)


def loss_contract(trial: Trial) -> Iterator[Finding]:
    """Find arguments of losses of torch that are not what their documentation asks for, see `CONTRACTS`."""
    if not trial.loss_calls:
        _ = trial.loss_value
        raise CannotJudgeError("no loss of torch.nn.functional was called")

    def module_of(value: object) -> str | None:
        output = trial.first_step.output
        is_output = isinstance(value, Tensor) and output is not None and value.data_ptr() == output.data_ptr()
        return trial.last_activation if is_output else None

    yield from findings_of(trial.loss_calls, module_of)


def softmax_twice(trial: Trial) -> Iterator[Finding]:
    """Find a softmax or another activation before a cross-entropy, and a likelihood without one, also in losses of the user."""
    if trial.loss is None:
        raise CannotJudgeError("the model computes its loss itself" if trial.batch.loss_inside else "no loss was given")
    last = trial.first_step.produced_by[:1]
    _ = trial.loss_value
    task = trial.classification
    known = task.counted
    if _is_cross_entropy(trial, known):
        if task.are_probabilities:
            yield SOFTMAX_TWICE.found(module=trial.last_activation)
        elif task.are_log_probabilities and last == ("LogSoftmax",):
            detail = "The model returns their logarithms, of which the softmax is the same: the loss is right."
            yield SOFTMAX_TWICE.found(detail=detail, at_most="info")
        elif last and last[0] in ("Relu", "Sigmoid", "Tanh"):
            detail = f"It is {last[0].lower()}."
            yield ACTIVATION_BEFORE_LOSS.found(module=trial.last_activation, detail=detail)
    elif _is_nll(trial, known) and not task.are_log_probabilities:
        kind = "probabilities" if task.are_probabilities else "scores without a softmax"
        yield NO_LOG_SOFTMAX.found(detail=f"The model returns {kind}.")


def _is_cross_entropy(trial: Trial, task: Classification) -> bool:
    """Return whether the loss applies a softmax: its value fits, and a constant added to all scores changes nothing."""
    if isinstance(trial.loss, nn.CrossEntropyLoss) or trial.loss is functional.cross_entropy:
        return True
    value = float(trial.loss_value.sum())
    fits = any(_equal(value, task.cross_entropy * factor) for factor in (1, len(task.labels)))
    return fits and _equal(_shifted_loss(trial), value)


def _is_nll(trial: Trial, task: Classification) -> bool:
    if isinstance(trial.loss, nn.NLLLoss) or trial.loss is functional.nll_loss:
        return True
    value = float(trial.loss_value.sum())
    fits = any(_equal(value, task.negative_score * factor) for factor in (1, len(task.labels)))
    return fits and not _equal(_shifted_loss(trial), value)


def _shifted_loss(trial: Trial) -> float:
    try:
        with trial.running(as_training=True):
            return float(trial.loss_of(trial.output + 1.0, trial.batch.copy().labels).sum())
    except Exception as error:
        raise CannotJudgeError(f"for other outputs the loss raises {type(error).__name__}") from error


def loss_scale(trial: Trial) -> Iterator[Finding]:
    """Find a loss that is a sum over the batch, in part or as a whole, or divided by its size, with copies of the samples."""
    loss = trial.loss_value
    if loss.numel() != 1 or not bool(loss.isfinite().all()) or float(loss) == 0:
        raise CannotJudgeError("the loss is not a finite number")
    size = trial.batch.size
    once, twice = (_loss_of_copies(trial, number) for number in (1, 2))
    growth = twice - once
    if abs(growth - once) < 0.02 * abs(once):
        standard = type(trial.loss).__module__.startswith("torch.") or _is_standard(trial)
        detail = "The loss is a sum over the batch, so that gradients grow with the number of samples."
        at_most = "error" if standard else "info"
        if _fits_the_rate(trial):
            at_most, detail = "info", f"{detail} The first step of the optimizer is not too long for it."
        yield LOSS_SCALE.found(size or math.nan, detail=detail, at_most=at_most)
    elif abs(growth) > _RELATIVE * abs(once):
        thrice = _loss_of_copies(trial, 3)
        # a part that is a sum and a part that is a mean grow together by the same amount with each copy
        if abs(thrice - twice - growth) < _ROUNDING * max(map(abs, (once, twice, thrice))):
            yield MIXED_REDUCTION.found(growth / once, detail=f"It is {growth / once:.0%} of the loss.")
        elif all(abs(number * value - once) < _RELATIVE * abs(once) for number, value in ((2, twice), (3, thrice))):
            yield DIVIDED_TWICE.found(size or math.nan)


def _fits_the_rate(trial: Trial) -> bool:
    """Return whether the first step lowers the loss as its gradient says."""
    try:
        return not first_update(trial).overshoots
    except CannotJudgeError:
        return False


def _loss_of_copies(trial: Trial, number: int) -> float:
    """Return the loss of a batch in which each sample counts `number` times."""

    def copies(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * number) if tensor.ndim and len(tensor) % size == 0 else tensor

    batch, size, labels = trial.batch, trial.batch.size or 0, trial.batch.labels
    if trial.batch.loss_inside:
        if any(tensor.ndim and len(tensor) != size for tensor in batch.tensors):
            raise CannotJudgeError("the inputs have no common axis of samples")
        loss = trial.evaluate(batch.map(copies)).loss
        if loss is None:
            raise CannotJudgeError("the model returned no loss in evaluation mode")
        return float(loss.detach())
    output = trial.output
    if not isinstance(labels, Tensor) or not size or output.ndim < 1 or len(output) % size or len(labels) % size:
        raise CannotJudgeError("output and labels have no common axis of samples")
    result = pytree.tree_map_only(Tensor, copies, trial.first_step.result)
    try:
        with trial.running(as_training=True):
            return float(trial.call_loss(result, copies(labels)))
    except Exception as error:
        raise CannotJudgeError(f"for a batch of another size the loss raises {type(error).__name__}") from error


def _is_standard(trial: Trial) -> bool:
    """Return whether the value is the sum of a usual loss."""
    output, labels = trial.output, trial.batch.labels
    value = float(trial.loss_value)
    try:
        task = trial.classification.counted
        sums = (task.cross_entropy * len(task.labels), task.negative_score * len(task.labels))
        return any(_equal(value, each) for each in sums)
    except CannotJudgeError:
        if not isinstance(labels, Tensor) or output.shape != labels.shape:
            return False
    difference = output.float() - labels.float()
    return _equal(value, float(difference.square().sum())) or _equal(value, float(difference.abs().sum()))


def _equal(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= _RELATIVE * max(abs(a), abs(b), 1e-6)


class FirstUpdate(NamedTuple):
    """The change of the loss of one batch by the first step of the optimizers.

    Parameters
    ----------
    predicted : float
        The product of the gradient before the step and the step.
    change : float
        What the loss of the same batch, with the same random numbers, has changed by.
    """

    predicted: float
    change: float

    @property
    def overshoots(self) -> bool:
        """Whether the step goes beyond the minimum along its direction, or upwards.

        Along a line a quadratic function has fallen by half of the prediction at its minimum.
        """
        return not self.change <= self.predicted / 2 <= 0


def first_update(trial: Trial) -> FirstUpdate:
    """Return what the first step of the optimizers does to the loss of the batch; copies of the model and of them make it.

    Raises
    ------
    CannotJudgeError
        If there is no optimizer, if the loss has no gradient, if something cannot be copied, or if a step needs a closure.
    """
    if not trial.optimizers:
        raise CannotJudgeError("no optimizer was given")
    if not trial.first_step.has_gradient or trial.loss_value.numel() != 1:
        raise CannotJudgeError("the loss has no gradient")
    if sum(parameter.numel() for parameter in trial.trainable.values()) > _MOST_PARAMETERS:
        raise CannotJudgeError(f"the model has more than {_MOST_PARAMETERS:,} parameters")
    try:
        model, loss, optimizers = copy.deepcopy((trial.model, trial.loss, trial.optimizers))
        moved = Trial(model, trial.batch, loss, optimizers)
        parameters = [*moved.trainable.values()]
        before = [parameter.detach().clone() for parameter in parameters]
        value, gradients = _loss_and_gradients(moved, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.random.fork_rng(devices=()):
            for optimizer in optimizers:
                optimizer.step()
        after, _ = _loss_and_gradients(moved, [])
    except Exception as error:
        raise CannotJudgeError(f"a copy cannot make the first step: {error_text(error)}"[:200]) from error
    steps = [(p.detach() - old, g) for p, old, g in zip(parameters, before, gradients, strict=True) if g is not None]
    return FirstUpdate(sum(float((step.double() * g.double()).sum()) for step, g in steps), after - value)


def _loss_and_gradients(trial: Trial, parameters: list[nn.Parameter]) -> tuple[float, tuple[Tensor | None, ...]]:
    """Return the loss of the batch, each time with the same random numbers, and its gradients."""
    with trial.running(as_training=True, autograd=True):
        loss = trial.loss_of_result(run_model(trial.model, trial.batch.copy().inputs))
        gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True) if parameters else ()
    return float(loss.detach()), gradients
