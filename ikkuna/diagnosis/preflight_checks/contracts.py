"""The requirements of each loss of ``torch.nn.functional`` on its arguments, and how its calls are recorded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.mistakes import (
    LABELS_NO_DISTRIBUTION,
    LOSS_CONTRACT,
    NO_LOG_SOFTMAX,
    SIGMOID_TWICE,
    SOFTMAX_TWICE,
    Mistake,
)
from ikkuna.diagnosis.preflight_checks.outputs import last_operations
from ikkuna.store.finding import SEVERITIES, Finding
from ikkuna.support.failures import log

_MOST_CALLS = 64
_MOST_SENTENCES = 3
_AT_BOUND = 0.1
_GAIN = 1e-3  # of the loss of equal scores, by which the best outputs are better


class LossCall(NamedTuple):
    """One call of a loss of torch.

    Parameters
    ----------
    function : callable
        The function of ``torch.nn.functional``.
    arguments : mapping of str to object
        All of its arguments by name; tensors are detached.
    produced_by : mapping of str to tuple of str
        For each tensor with a gradient the names of the last operations that have computed it, see `last_operations`.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    produced_by: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.function.__name__)

    def behind(self, operations: Mapping[int, tuple[str, ...]]) -> LossCall:
        """Return the call with the last operations of the tensors at these addresses."""
        known = {
            name: found or operations.get(self.arguments[name].data_ptr(), ())
            for name, found in self.produced_by.items()
        }
        return self._replace(produced_by=known)

    def last_operation(self, argument: str) -> str:
        """Return the name of the last operation of an argument; empty if it has none."""
        return next(iter(self.produced_by.get(argument, ())), "")


class Given(NamedTuple):
    """The violation of a requirement.

    Parameters
    ----------
    words : str
        The violation.
    advice : str
        What to try.
    at_most : {'info', 'warning', 'error'}
        The highest severity that it justifies.
    figure : float, optional
        The figure that shows it.
    """

    words: str
    advice: str = ""
    at_most: str = "error"
    figure: float | None = None


class Requirement(NamedTuple):
    """A requirement on an argument of a loss.

    Parameters
    ----------
    argument : str
        The name of the argument.
    wants : str
        What the loss wants, after "wants".
    judge : callable
        Returns, for the call and the argument, what violates the requirement; ``None`` if nothing does.
    mistake : Mistake
        Which mistake a violation is.
    alone : bool
        Whether only a loss that is the only one of the step has the requirement; another one can be there to regularise.
    """

    argument: str
    wants: str
    judge: Callable[[LossCall, Any], Given | None]
    mistake: Mistake = LOSS_CONTRACT
    alone: bool = False


@contextmanager
def loss_calls() -> Iterator[list[LossCall]]:
    """Record the calls of losses of torch in the body that do not raise, up to 64.

    Examples
    --------
    >>> with loss_calls() as calls:
    ...     _ = functional.mse_loss(torch.zeros(2), torch.ones(2))
    >>> calls[0].name, calls[0].arguments["reduction"]
    ('mse_loss', 'mean')
    """
    mode = _LossMode()
    with mode:
        yield mode.calls


class _LossMode(TorchFunctionMode):
    def __init__(self) -> None:
        self.calls: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CONTRACTS and len(self.calls) < _MOST_CALLS:
            self.calls.append(_call(func, args, kwargs or {}))
        return result


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> LossCall:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    learned = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    return LossCall(
        function,
        {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()},
        {name: last_operations(x.grad_fn) for name, x in learned.items()},
    )


def violations(call: LossCall) -> list[tuple[Requirement, Given]]:
    """Return the requirements that a call violates.

    Examples
    --------
    >>> with loss_calls() as calls:
    ...     _ = functional.soft_margin_loss(torch.zeros(3), torch.tensor([0.0, 1.0, 1.0]))
    >>> [(wanted, given)] = violations(calls[0])
    >>> wanted.wants, given.words
    ('1 or -1', '33% of its elements are others, such as 0')
    """
    found = []
    for requirement in CONTRACTS[call.function]:
        value = call.arguments.get(requirement.argument)
        if value is None or (isinstance(value, Tensor) and (not value.numel() or value.is_complex())):
            continue
        try:
            given = requirement.judge(call, value)
        except Exception:  # tensors without values, or of shapes that the loss itself refuses
            log.debug("the contract of %s was not judged", call.name, exc_info=True)
            continue
        if given is not None:
            found.append((requirement, given))
    return found


def findings_of(calls: list[LossCall], module_of: Callable[[Any], str | None] = lambda value: None) -> list[Finding]:
    """Return a finding for each mistake that the calls show; `module_of` names the module that has returned a tensor."""
    by_mistake: dict[str, list[tuple[LossCall, Requirement, Given]]] = {}
    for call in calls:
        for requirement, given in violations(call):
            if not requirement.alone or len(calls) == 1:
                by_mistake.setdefault(requirement.mistake.name, []).append((call, requirement, given))
    return [_finding(found, module_of) for found in by_mistake.values()]


def _finding(found: list[tuple[LossCall, Requirement, Given]], module_of: Callable[[Any], str | None]) -> Finding:
    found = sorted(found, key=lambda each: -SEVERITIES.index(each[2].at_most))
    call, requirement, given = found[0]
    sentences = dict.fromkeys(
        f"{each.name} wants {wanted.wants} as {wanted.argument}: {what.words}." for each, wanted, what in found
    )
    return requirement.mistake.found(
        given.figure,
        module_of(call.arguments[requirement.argument]),
        detail=" ".join(list(sentences)[:_MOST_SENTENCES]),
        at_most=given.at_most,
        advice=given.advice,
    )


# -- what arguments are ------------------------------------------------------------------------------------------------


def _slack(x: Tensor) -> float:
    """Return the error of a sum of probabilities in the dtype of a tensor."""
    return 1e-3 if not x.is_floating_point() or torch.finfo(x.dtype).bits >= 32 else 0.05


def _share(wrong: Tensor) -> float:
    return float(wrong.float().mean())


def _percent(wrong: Tensor) -> str:
    """Return the share of the true elements; it is never 0 % if there is one.

    Examples
    --------
    >>> _percent(torch.tensor([True, False, False])), _percent(torch.arange(1000) == 0)
    ('33%', 'less than 1%')
    """
    share = _share(wrong)
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _signs(call: LossCall, target: Tensor) -> Given | None:
    """Judge labels of two kinds; zeros between signs are ties, which have no gradient on purpose."""
    y = target.float()
    others = (y != 1) & (y != -1) & ~y.isnan()
    if not bool(others.any()):
        return None
    has_signs, are_bits = bool((y == -1).any()), bool((y[others] == 0).all())
    severity = "info" if has_signs and are_bits else "error" if are_bits else "warning"
    advice = "convert labels of 0 and 1 with 2 * labels - 1" if are_bits and not has_signs else ""
    example = float(y[others][0]) + 0.0  # -0 is shown as 0
    return Given(f"{_percent(others)} of its elements are others, such as {example:.3g}", advice, severity, example)


def _between(low: float, high: float, at_most: str = "error") -> Callable[[LossCall, Tensor], Given | None]:
    """Return a judge of a range; NaN has rules of its own."""

    def judge(call: LossCall, value: Any) -> Given | None:
        x = torch.as_tensor(value).float()
        outside = (x < low - _slack(x)) | (x > high + _slack(x))
        if not bool(outside.any()):
            return None
        ends = f"from {float(x.min()):.3g} to {float(x.max()):.3g}"
        better = ""
        if low == 0 and high == 1 and bool(((x == -1) | (x == 1)).all()):
            better = "convert labels of -1 and 1 with (labels + 1) / 2"
        elif low == 0 and high == 1 and bool((x >= 0).all()):
            better = f"divide the labels by their largest possible value, such as {float(x.max()):.6g}"
        return Given(f"it goes {ends}, and {_percent(outside)} of its elements are outside", better, at_most)

    return judge


def _class_axis(x: Tensor) -> int:
    return 1 if x.ndim > 1 else 0


def _sum_to_one(p: Tensor, axes: int | tuple[int, ...], slack: float) -> bool:
    """Return whether all sums are 1, or 0 as those of masked rows."""
    sums = p.sum(axes)
    return bool((((sums - 1).abs() <= slack) | (sums == 0)).all())


def _normalised_axes(p: Tensor, slack: float) -> list[int]:
    return [axis for axis in range(p.ndim) if _sum_to_one(p, axis, slack)]


def _is_distribution(p: Tensor, slack: float) -> bool:
    """Return whether numbers sum to 1 along one of their axes, or along all behind one, as those of an image."""
    behind = (tuple(range(first, p.ndim)) for first in range(max(p.ndim, 1)))
    return bool(_normalised_axes(p, slack)) or any(_sum_to_one(p, axes, slack) for axes in behind)


def _logarithms(
    axis_of: Callable[[Tensor], int] | None, of_scores: str = "apply log_softmax to the outputs"
) -> Callable[[LossCall, Tensor], Given | None]:
    """Return a judge of logarithms of probabilities along an axis of classes, ``None`` for any, with the advice for scores."""

    def judge(call: LossCall, value: Tensor) -> Given | None:
        x, slack = value.float(), _slack(value)
        above = x > slack
        if bool(above.any()):
            are_probabilities = bool((x >= 0).all()) and _is_distribution(x, slack)
            what = "it gets probabilities" if are_probabilities else f"{_percent(above)} of its elements are above 0"
            advice = "use log_softmax in place of softmax" if are_probabilities else of_scores
            if are_probabilities and "target" in call.produced_by and "input" not in call.produced_by:
                what, advice = (
                    f"{what} without a gradient",
                    "exchange input and target, and apply log_softmax to the outputs",
                )
            return Given(f"{what}, up to {float(x.max()):.3g}", advice)
        p = x.exp()
        if axis_of is None:
            return None if _is_distribution(p, slack) else _unnormalised(p.sum(-1 if p.ndim else ()), "warning")
        axis = axis_of(x)
        if _sum_to_one(p, axis, slack):
            return None
        if other := _normalised_axes(p, slack):
            words = f"its probabilities sum to 1 along axis {other[0]}, and its classes are along axis {axis % x.ndim}"
            return Given(words, f"apply log_softmax along the axis of classes: dim={axis}")
        return _unnormalised(p.sum(axis), "error")

    return judge


def _unnormalised(sums: Tensor, at_most: str) -> Given:
    ends = f"{float(sums.min()):.3g} to {float(sums.max()):.3g}"
    return Given(f"the sums of its exponentials go from {ends} and are not 1", "", at_most)


def _soft_labels(call: LossCall, target: Tensor) -> Given | None:
    """Judge probabilities of classes as labels; one class with any weight stands for a weighted sample."""
    if not target.is_floating_point():
        return None
    y, axis, slack = target.float(), _class_axis(target), _slack(target)
    sums = y.sum(axis)
    wrong = ((sums - 1).abs() > slack) | (y < -slack).any(axis)
    wrong = wrong & ((y != 0).sum(axis) > 1)
    if not bool(wrong.any()):
        return None
    ends = f"the sums go from {float(sums.min()):.3g} to {float(sums.max()):.3g}"
    negative = f", and the least label is {float(y.min()):.3g}" if bool((y < -slack).any()) else ""
    return Given(ends + negative, "", "warning", float(sums.flatten()[(sums - 1).abs().argmax()]))


def _preferred_class(call: LossCall, target: Tensor) -> Given | None:
    if not target.is_floating_point():
        return None
    y, axis = target.float(), _class_axis(target)
    guess = math.log(max(target.shape[axis], 2))
    gain = 1 + float((torch.xlogy(y, y).sum(axis) / y.sum(axis)).mean()) / guess
    if not -_GAIN < gain < _GAIN or target.shape[axis] < 2:
        return None
    advice = "lower the temperature of the teacher, or check the axis of its softmax"
    words = f"all have nearly the probability 1/{target.shape[axis]}, and the best loss is {max(gain, 0):.2%} below that of a guess"
    return Given(words, advice, "warning", gain)


def _smoothing(call: LossCall, amount: float) -> Given | None:
    scores = call.arguments["input"]
    classes = call.arguments["linear_weight"].shape[0] if "linear_weight" in call.arguments else None
    classes = scores.shape[_class_axis(scores)] if classes is None else classes
    kept = 1 - amount + amount / classes
    if kept >= 0.5:
        return None
    return Given(f"{amount:g} leaves the label a probability of {kept:.2g}", "use a value such as 0.1", "warning")


def _several_classes(call: LossCall, scores: Tensor) -> Given | None:
    if scores.shape[_class_axis(scores)] != 1:
        return None
    shape = tuple(scores.shape)
    return Given(f"its shape is {shape}, so that the loss is constant", "use BCEWithLogitsLoss for a single score")


def _no_probabilities(call: LossCall, scores: Tensor) -> Given | None:
    x = scores.float()
    if x.shape[axis := _class_axis(x)] < 2 or not bool((x >= 0).all()):
        return None
    is_twice = bool(((x.sum(axis) - 1).abs() <= _slack(scores)).all())
    return Given("it gets probabilities") if is_twice else None


def _not_behind(at_most: str, advice: str, *operations: str) -> Callable[[LossCall, Tensor], Given | None]:
    """Return a judge of the last operation of the inputs of a loss."""

    def judge(call: LossCall, value: Tensor) -> Given | None:
        last = call.last_operation("input")
        return Given(f"it is the result of {last.lower()}", advice, at_most) if last in operations else None

    return judge


def _learned(call: LossCall, value: Tensor) -> Given | None:
    if "input" in call.produced_by or "target" not in call.produced_by:
        return None
    return Given("it has no gradient, but target has one", "exchange the two arguments", "warning")


def _divergence_target(call: LossCall, target: Tensor) -> Given | None:
    y, slack = target.float(), _slack(target)
    if call.arguments["log_target"]:
        above = y > slack
        if bool(above.any()):
            return Given(f"{_percent(above)} of its elements are above 0", "pass log_target=False for probabilities")
        y = y.exp()
    elif bool((y < -slack).any()):
        are_logarithms = bool((y <= slack).all())
        words = f"{_percent(y < 0)} of its elements are negative"
        return Given(words, "pass log_target=True for logarithms" if are_logarithms else "apply a softmax to it")
    if _is_distribution(y, slack):
        return None
    sums = y.sum(-1 if y.ndim else ())
    return Given(f"the sums go from {float(sums.min()):.3g} to {float(sums.max()):.3g} and are not 1", "", "warning")


_BOUNDS = ("Clamp", "ClampMin", "Maximum", "Relu", "Threshold", "Hardtanh")


def _free_variances(call: LossCall, variance: Any) -> Given | None:
    """Judge variances at their lower bound, where neither the loss nor a clamp has a gradient."""
    if not isinstance(variance, Tensor) or "var" not in call.produced_by or variance.numel() < 2:
        return None
    v, epsilon = variance.float(), float(call.arguments["eps"])
    bound = max(float(v.min()), epsilon)
    at_bound = v <= bound * (1 + 1e-6)
    is_bound = call.last_operation("var") in _BOUNDS and _share(at_bound) >= _AT_BOUND
    if int(at_bound.sum()) < 2 or not (is_bound or bound <= epsilon * (1 + 1e-6)):
        return None
    words = f"{_percent(at_bound)} of its elements are at their lower bound of {bound:.1g}, where they have no gradient"
    advice = "pass the exponential of a logarithm, else a softplus in place of a clamp"
    return Given(words, advice, "warning", _share(at_bound))


def _rates(call: LossCall, rate: Tensor) -> Given | None:
    if call.arguments["log_input"]:
        last = call.last_operation("input")
        if last not in ("Exp", "Expm1", "Softplus"):
            return None
        advice = "pass log_input=False, or remove the last operation of the model"
        words = f"it is the result of {last.lower()}, and the loss applies an exponential again"
        return Given(words, advice, "error" if last == "Exp" else "warning")
    negative = rate.float() < 0
    if not bool(negative.any()):
        return None
    return Given(f"{_percent(negative)} of its elements are negative", "pass log_input=True, or apply a softplus")


def _class_numbers(call: LossCall, target: Tensor) -> Given | None:
    """Judge the numbers of classes of a row, which end at the first -1."""
    rows = target.reshape(1, -1) if target.ndim < 2 else target
    is_behind = ((rows < 0).cumsum(1) > 0) & (rows >= 0)
    numbers = torch.where((rows < 0).cumsum(1) > 0, -1, rows).sort(1).values
    twice = ((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)).any(1)
    if bool(twice.any()):
        are_bits = bool(((rows == 0) | (rows == 1)).all())
        words = f"{_percent(twice)} of its rows contain a number twice"
        advice = "use MultiLabelSoftMarginLoss for a column of 0 or 1 for each class" if are_bits else ""
        return Given(f"{words}, all of them 0 or 1" if are_bits else words, advice)
    if bool(is_behind.any()):
        rows_behind = is_behind.any(1)
        return Given(
            f"{_percent(rows_behind)} of its rows contain numbers behind the first -1, which are ignored", "", "warning"
        )
    return None


def _characters(call: LossCall, targets: Tensor) -> Given | None:
    blank, lengths = call.arguments["blank"], torch.as_tensor(call.arguments["target_lengths"]).flatten()
    rows = targets.reshape(len(lengths), -1) if targets.ndim > 1 else targets[None]
    counted = torch.arange(rows.shape[1], device=rows.device) < lengths.to(rows.device)[:, None]
    is_blank = (rows == blank) & (counted if targets.ndim > 1 else True)
    if not bool(is_blank.any()):
        return None
    return Given(f"{_percent(is_blank)} of its elements are the blank, {blank}", "number characters beside the blank")


def _enough_frames(call: LossCall, input_lengths: Any) -> Given | None:
    frames = torch.as_tensor(input_lengths).flatten().cpu()
    lengths = torch.as_tensor(call.arguments["target_lengths"]).flatten().cpu()
    targets = call.arguments["targets"].cpu()
    needed = lengths.clone()
    if targets.ndim > 1:  # a blank stands between two equal characters
        is_inside = torch.arange(1, targets.shape[1], device="cpu") < lengths[:, None]
        needed = needed + ((targets[:, 1:] == targets[:, :-1]) & is_inside).sum(1)
    short = frames < needed
    if not bool(short.any()):
        return None
    words = f"{_percent(short)} of the rows have fewer, so that their loss is infinite or, with zero_infinity, 0"
    return Given(
        words, "check how the lengths follow from strides, and their order", "error" if bool(short.all()) else "info"
    )


def _apart(other: str) -> Callable[[LossCall, Tensor], Given | None]:
    """Return a judge of two arguments whose rows differ, which must not be equal to each other."""

    def judge(call: LossCall, value: Tensor) -> Given | None:
        second = call.arguments[other]
        if not torch.equal(value, second) or len(value) < 2 or bool((value == value[:1]).all()):
            return None
        return Given("the two are equal in every element")

    return judge


# -- the losses --------------------------------------------------------------------------------------------------------

_LABELS_OF_SIGNS = Requirement("target", "1 or -1", _signs)
_PROBABILITIES = Requirement("target", "probabilities, from 0 to 1,", _between(0, 1, "warning"))
_SCORES = Requirement("input", "scores before a sigmoid", _not_behind("error", "", "Sigmoid"), SIGMOID_TWICE)
_LEARNED = Requirement("input", "the outputs of the model", _learned)
_WEIGHT = Requirement("weight", "numbers of at least 0", _between(0, torch.inf))
_ROW_WEIGHT = _WEIGHT._replace(judge=_between(0, torch.inf, "warning"))
_CLASSES = Requirement("input", "the scores of two classes or more", _several_classes)
_DISTRIBUTIONS = (
    Requirement("target", "probabilities of classes, with a sum of 1,", _soft_labels, LABELS_NO_DISTRIBUTION),
    Requirement("target", "labels that prefer a class", _preferred_class, alone=True),
    Requirement("label_smoothing", "a small number", _smoothing),
)
_LOG_PROBABILITIES = "logarithms of probabilities"
_TRIPLET = (
    Requirement("anchor", "other rows than positive", _apart("positive")),
    Requirement("anchor", "other rows than negative", _apart("negative")),
    Requirement("positive", "other rows than negative", _apart("negative")),
)

CONTRACTS: Mapping[Callable[..., Any], tuple[Requirement, ...]] = {
    functional.binary_cross_entropy: (_LEARNED, _ROW_WEIGHT),
    functional.binary_cross_entropy_with_logits: (
        _PROBABILITIES,
        _SCORES,
        _LEARNED,
        _ROW_WEIGHT,
        Requirement("pos_weight", "numbers of at least 0", _between(0, torch.inf)),
    ),
    functional.cosine_embedding_loss: (
        _LABELS_OF_SIGNS,
        Requirement("input1", "other rows than input2", _apart("input2")),
    ),
    functional.cross_entropy: (
        _CLASSES,
        Requirement("input", "scores before a softmax", _no_probabilities, SOFTMAX_TWICE),
        *_DISTRIBUTIONS,
        _LEARNED,
        _WEIGHT,
    ),
    functional.ctc_loss: (
        Requirement("log_probs", _LOG_PROBABILITIES, _logarithms(lambda x: -1)),
        Requirement("targets", "characters other than the blank", _characters),
        Requirement("input_lengths", "a frame for each character", _enough_frames),
    ),
    functional.gaussian_nll_loss: (Requirement("var", "variances", _free_variances),),
    functional.hinge_embedding_loss: (_LABELS_OF_SIGNS,),
    functional.huber_loss: (),
    functional.kl_div: (
        Requirement("input", _LOG_PROBABILITIES, _logarithms(None)),
        Requirement("target", "probabilities, or with log_target=True their logarithms,", _divergence_target),
    ),
    functional.l1_loss: (),
    functional.linear_cross_entropy: (*_DISTRIBUTIONS, _WEIGHT),
    functional.margin_ranking_loss: (
        _LABELS_OF_SIGNS,
        Requirement("input1", "other scores than input2", _apart("input2")),
    ),
    functional.mse_loss: (),
    functional.multi_margin_loss: (_CLASSES, _WEIGHT),
    functional.multilabel_margin_loss: (Requirement("target", "numbers of classes that end with -1", _class_numbers),),
    functional.multilabel_soft_margin_loss: (_PROBABILITIES, _SCORES, _WEIGHT),
    functional.nll_loss: (
        _CLASSES,
        Requirement("input", _LOG_PROBABILITIES, _logarithms(_class_axis, ""), NO_LOG_SOFTMAX),
        _WEIGHT,
    ),
    functional.poisson_nll_loss: (
        Requirement("target", "counts", _between(0, torch.inf)),
        Requirement("input", "logarithms of rates, or with log_input=False rates,", _rates),
    ),
    functional.smooth_l1_loss: (),
    functional.soft_margin_loss: (
        _LABELS_OF_SIGNS,
        Requirement(
            "input", "scores of both signs", _not_behind("warning", "remove the last operation", "Sigmoid", "Softmax")
        ),
    ),
    functional.triplet_margin_loss: _TRIPLET,
    functional.triplet_margin_with_distance_loss: _TRIPLET,
}
"""The requirements of each loss, from its documentation; those whose violation raises are left out."""
