"""Checks of the loss alone: it is minimised over the outputs, without the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.diagnosis import mistakes
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, Classification, arranged_scores, class_axis
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import pytree

_STEPS, _MOST_ELEMENTS = 250, 1_000_000
_SCORE = 10.0
_STILL = 1e-3  # a gradient beside the greatest one of the same number, at the end of a descent
_ROUNDING = 1e-5  # relative; a loss in float32 sums many terms
_REACH = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, float("inf"))}


class _Map(NamedTuple):
    """A function from free numbers to possible outputs, and its inverse."""

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


_EPSILON = 1e-6
_IDENTITY = _Map(_same, _same)
_POSITIVE = _Map(torch.exp, lambda y: y.clamp(min=_EPSILON).log())
_MAPS = {  # by the last operation of the output
    "Sigmoid": _Map(torch.sigmoid, lambda y: y.clamp(_EPSILON, 1 - _EPSILON).logit()),
    "Tanh": _Map(torch.tanh, lambda y: y.clamp(-1 + _EPSILON, 1 - _EPSILON).atanh()),
    **dict.fromkeys(("Exp", "Softplus"), _POSITIVE),
}


class _FreeLoss:
    """The loss of the first step as a function of the outputs.

    Parameters
    ----------
    trial : Trial
        The first step, whose output and labels are used.

    Raises
    ------
    CannotJudgeError
        If there is no loss of output and labels, or if the output is large.
    """

    def __init__(self, trial: Trial) -> None:
        if trial.loss is None or trial.batch.loss_inside or not isinstance(trial.batch.labels, Tensor):
            raise CannotJudgeError("there is no loss of output and labels")
        if isinstance(trial.loss, nn.Module) and any(True for _ in trial.loss.parameters()):
            raise CannotJudgeError("the loss has parameters of its own")
        if trial.loss_value.numel() != 1 or not bool(trial.loss_value.isfinite()):
            raise CannotJudgeError("the loss is not a finite number")
        self.trial, self.labels = trial, trial.batch.labels
        self.main = trial.output
        leaves, self._structure = pytree.tree_flatten(trial.first_step.result)
        self._leaves: list[Any] = leaves
        self._free = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if sum(leaves[i].numel() for i in self._free) > _MOST_ELEMENTS:
            raise CannotJudgeError(f"the output has more than {_MOST_ELEMENTS:,} elements")
        self.place = next(place for place, i in enumerate(self._free) if leaves[i] is self.main)
        self.map = self._map_of_main()

    def _map_of_main(self) -> _Map:
        last = self.trial.first_step.produced_by[:1]
        if last and last[0] in ("Softmax", "LogSoftmax"):
            sums = self.main.exp() if last[0] == "LogSoftmax" else self.main
            axes = [axis for axis in range(sums.ndim) if bool(((sums.sum(axis) - 1).abs() < 1e-3).all())]
            if not axes:
                raise CannotJudgeError("the axis of the softmax is not known")
            if last[0] == "LogSoftmax":
                return _Map(lambda u: u.log_softmax(axes[-1]), _same)
            return _Map(lambda u: u.softmax(axes[-1]), lambda y: y.clamp(min=_EPSILON).log())
        return _MAPS.get(last[0], _IDENTITY) if last else _IDENTITY

    def start(self, mapping: _Map) -> list[Tensor]:
        """Return the free numbers of the first step's outputs."""
        values = [self._leaves[i].detach().float() for i in self._free]
        values[self.place] = mapping.inverse(values[self.place])
        return values

    def __call__(self, free: list[Tensor], mapping: _Map, labels: Tensor | None = None) -> Tensor:
        leaves = list(self._leaves)
        for place, (i, value) in enumerate(zip(self._free, free, strict=True)):
            chosen = mapping.forward(value) if place == self.place else value
            leaves[i] = chosen.to(leaves[i].dtype)
        result = pytree.tree_unflatten(leaves, self._structure)
        return self.trial.call_loss(result, (self.labels if labels is None else labels).clone()).reshape(())

    def gradient(self, free: list[Tensor], mapping: _Map) -> tuple[float, list[Tensor]]:
        """Return the loss and its gradient."""
        sources = [value.detach().clone().requires_grad_() for value in free]
        loss = self(sources, mapping)
        if not loss.requires_grad:
            raise CannotJudgeError("the loss has no gradient with respect to the output")
        found = torch.autograd.grad(loss, sources, allow_unused=True)
        return float(loss.detach()), [
            torch.zeros_like(x) if g is None else g.detach() for x, g in zip(sources, found, strict=True)
        ]

    def value(self, free: list[Tensor]) -> float:
        """Return the loss of free numbers."""
        with torch.no_grad():
            return float(self(free, self.map))

    def of_main(self, value: Tensor) -> float:
        """Return the loss with another main output, the others as in the first step."""
        free = self.start(_IDENTITY)
        free[self.place] = value
        with torch.no_grad():
            return float(self(free, _IDENTITY))

    def descend(self, mapping: _Map) -> tuple[list[Tensor], list[Tensor]]:
        """Return the free numbers at the first step, and after some steps of Adam without the model.

        There are as many steps as it takes until each gradient has been small for ten of them, beside the greatest it had.
        """
        begin, labels = self.start(mapping), self.labels
        if (
            not labels.is_floating_point()
        ):  # the steps do not reach the optimum from the scores of inputs that are not scaled
            begin[self.place] = begin[self.place].clamp(-_SCORE, _SCORE)
        free = [value.clone() for value in begin]
        scale = float(labels.abs().max()) if labels.is_floating_point() and labels.numel() else 10.0
        rate = 0.05 * max(1.0, scale)
        means, squares, greatest = ([torch.zeros_like(x) for x in free] for _ in range(3))
        still = 0
        for step in range(1, _STEPS + 1):
            _, gradients = self.gradient(free, mapping)
            for x, g, m, s, most in zip(free, gradients, means, squares, greatest, strict=True):
                m.lerp_(g, 0.1)
                s.lerp_(g * g, 0.001)
                x.sub_(rate * (m / (1 - 0.9**step)) / ((s / (1 - 0.999**step)).sqrt() + 1e-8))
                torch.maximum(most, g.abs(), out=most)
            is_still = all(bool((g.abs() <= _STILL * most).all()) for g, most in zip(gradients, greatest, strict=True))
            still = still + 1 if is_still else 0
            if still == 10:
                break
        return begin, free


def freed_outputs(trial: Trial) -> Iterator[Finding]:
    """Find what is wrong with the loss by itself: it is minimised over the outputs, with the labels of the batch."""
    if any(group.get("maximize") for optimizer in trial.optimizers for group in optimizer.param_groups):
        raise CannotJudgeError("an optimizer maximises the loss")
    with trial.running(as_training=True, autograd=True):
        loss = _FreeLoss(trial)
        begin, end = loss.descend(loss.map)
        if not all(bool(value.isfinite().all()) for value in end):
            raise CannotJudgeError("the loss of other outputs is not finite")
        best = _loss_of_labels(loss, end)
        limit = _limit(loss, begin, end)
        limit = None if limit is not None and best < limit else limit
        if not best < loss.value(end):
            yield from [*_wrong_optimum(loss, end, limit)] or _greatest_for_labels(loss, begin, end)
        if limit is not None:
            yield _unbounded(loss, limit)
        yield from _without_gradient(loss, begin)
        yield from _floor(loss)
        yield from _out_of_reach(loss)
        yield from _no_shares(loss, end)


def _limit(loss: _FreeLoss, begin: list[Tensor], end: list[Tensor]) -> float | None:
    """Return the loss far along the way of the descent if it falls there without end.

    From one to ten and to a hundred times the way, a loss without a bound falls by at least as much for each unit of the way.
    The unit is the way, or the largest output or label if that is more: near far outputs any loss falls in a straight line.
    A loss that is linear in the outputs, as that of a critic, does so by design, and one that labels of another shape multiply, as that of
    a policy.
    """
    first, g0 = loss.gradient(begin, loss.map)
    last, g1 = loss.gradient(end, loss.map)
    if all(torch.allclose(a, b, rtol=_ROUNDING, atol=0.0) for a, b in zip(g0, g1, strict=True)):
        return None
    labels = loss.labels
    with torch.no_grad():
        farthest = [begin[loss.place], *([labels] if labels.is_floating_point() else [])]
        way = float((end[loss.place] - begin[loss.place]).abs().max())
        unit = max(1.0, *(float(x.abs().max()) / way for x in farthest if x.numel() and way > 0))
        ten, hundred = (loss.value(_further(loss.place, begin, end, factor * unit)) for factor in (10.0, 100.0))
        if labels.is_floating_point() and labels.shape != loss.main.shape:
            none, one, two = (float(loss(begin, loss.map, labels * factor)) for factor in (0.0, 1.0, 2.0))
            if abs(two - 2 * one + none) <= _ROUNDING * max(map(abs, (none, one, two))):
                return None
    fall = last - ten
    return hundred if fall > 0.1 * abs(first - last) and ten - hundred > 5 * fall else None


def _further(place: int, begin: list[Tensor], end: list[Tensor], factor: float) -> list[Tensor]:
    """Return the end of the descent with the main output moved by a multiple of its way."""
    return [b + factor * (e - b) if i == place else e for i, (b, e) in enumerate(zip(begin, end, strict=True))]


def _unbounded(loss: _FreeLoss, limit: float) -> Finding:
    detail = f"It is {float(loss.trial.loss_value):.3g} at first and {limit:.3g} far away."
    return mistakes.UNBOUNDED_LOSS.found(limit, detail=detail)


def _wrong_optimum(loss: _FreeLoss, end: list[Tensor], limit: float | None) -> Iterator[Finding]:
    """Find outputs of the least loss that are not those of their labels.

    A label that is the number of classes shows that the labels are ranks.  Without a bound, outputs far away that correlate negatively
    with the labels have the wrong sign; with a bound they can be the logarithms of rates.
    """
    best, labels = loss.map.forward(end[loss.place]), loss.labels
    if (task := arranged_scores(best, labels)) is not None:
        if (
            len(best) < 2
            or not len(task.counted.labels)
            or loss.trial.mixes_outputs
            or bool((labels == task.classes).any())
        ):
            return
        wrong = _share_of_wrong(task, loss.trial.batch.size or 1)
        if best.ndim == 3 and best.shape[1] == best.shape[2]:  # either axis may be that of the classes
            other = arranged_scores(best.transpose(1, 2), labels)
            wrong = wrong if other is None else min(wrong, _share_of_wrong(other, loss.trial.batch.size or 1))
        if wrong > 0.5:
            detail = f"The largest score is not that of the label in {wrong:.0%} of the predictions."
            yield mistakes.WRONG_OPTIMUM.found(wrong, detail=detail)
    elif limit is not None and labels.is_floating_point() and best.shape == labels.shape and labels.numel() > 1:
        correlation = float(torch.corrcoef(torch.stack([best.flatten(), labels.flatten().float()]))[0, 1])
        if correlation < -0.5:
            detail = "The outputs of larger labels are smaller: the sign of the loss is wrong."
            yield mistakes.WRONG_OPTIMUM.found(correlation, detail=detail)


def _greatest_for_labels(loss: _FreeLoss, begin: list[Tensor], end: list[Tensor]) -> Iterator[Finding]:
    """Find a bounded loss that is greatest for the outputs of the labels: a score, such as that of Dice, and not 1 minus it.

    Small outputs may stand for a label of 1 on purpose.  So a sum over elements, a loss that is linear in the labels, as an expected cost,
    and one of the differences of outputs, as a correlation, are left out.
    """
    signs, labels, is_class = _label_signs(loss), loss.labels, True
    if signs is None:
        if labels.shape != loss.main.shape or labels.unique().tolist() != [0, 1]:
            return
        signs, is_class = 2 * labels.float() - 1, False

    def of(main: Tensor) -> float:
        return loss.value([main if i == loss.place else x for i, x in enumerate(end)])

    right, first = 50.0 * signs, begin[loss.place]
    is_even = torch.arange(right.numel(), device=right.device).view(right.shape) % 2 == 0
    try:
        top, least = of(right), of(end[loss.place])
        rounding = _ROUNDING * (top - least)
        if not top > least or not all(of(x) < top - rounding for x in (-right, first, 0 * right)):
            return
        parts = sum(of(torch.where(chosen, right, -right)) for chosen in (is_even, ~is_even))
        is_sum = not is_class and abs(parts - top - of(-right)) <= 1e-3 * (top - least)
        if is_sum or not abs(of(2 * right) - top) <= rounding:
            return
        none, one, two = (0.0, 1.0, 0.0) if is_class else (float(loss(end, loss.map, labels * k)) for k in (0, 1, 2))
        is_of_differences = not is_class and abs(of(first + 1) - of(first)) <= rounding
    except RuntimeError:  # a loss of probabilities raises outside of its range
        return
    if not is_of_differences and not abs(two - 2 * one + none) <= 1e-3 * abs(top - least):
        detail = f"The loss is greatest, {top:.3g}, for the outputs of the labels: a score is to be subtracted from 1."
        yield mistakes.WRONG_OPTIMUM.found(top, detail=detail, at_most="error" if is_class else "warning")


def _label_signs(loss: _FreeLoss) -> Tensor | None:
    """Return 1 at the score of each label and -1 at the others, in the shape of the outputs; ``None`` if a label is no class."""
    axis, labels = class_axis(loss.main, loss.labels), loss.labels
    if axis is None or not bool(((labels >= 0) & (labels < loss.main.shape[axis])).all()):
        return None
    shape = loss.main.shape[:axis] + loss.main.shape[axis + 1 :]
    right = torch.nn.functional.one_hot(labels.long().reshape(shape), loss.main.shape[axis]).movedim(-1, axis)
    return (2 * right - 1).float()


def _loss_of_labels(loss: _FreeLoss, end: list[Tensor]) -> float:
    """Return the loss of large scores for the labels; infinity without scores of classes.

    From very large outputs the descent does not arrive: then this loss is lower than that of its end, and of what lies behind it.
    """
    signs = _label_signs(loss)
    if signs is None:
        return math.inf
    return loss.value([50.0 * signs if i == loss.place else x for i, x in enumerate(end)])


_SHIFTS = range(-2, 3)  # a loss may compare each output with a label some positions away


def _share_of_wrong(task: Classification, size: int) -> float:
    """Return the share of the predictions whose largest score is not that of the label, at the best shift within a sample."""
    predicted, labels = task.scores.argmax(1), task.labels
    known = (labels >= 0) & (labels < task.classes)
    if len(labels) % size or len(labels) < 8 * size:
        return float((predicted != labels)[known].float().mean())
    rows = [each.view(size, -1) for each in (predicted, labels, known)]
    length = rows[0].shape[1]
    wrong = []
    for shift in _SHIFTS:
        given = rows[0][:, max(0, -shift) : length - max(0, shift)]
        wanted, counted = (each[:, max(0, shift) : length - max(0, -shift)] for each in rows[1:])
        wrong.append(float((given != wanted)[counted].float().mean()) if bool(counted.any()) else 1.0)
    return min(wrong)


def _without_gradient(loss: _FreeLoss, begin: list[Tensor]) -> Iterator[Finding]:
    """Find classes whose predictions have a gradient of exactly zero, at the first outputs and at equal scores.

    The labels behind the last other one of a sequence are padding, which is ignored on purpose.
    """
    zeros = [value.clone() for value in begin]
    zeros[loss.place].zero_()
    gradients = [loss.gradient(free, loss.map)[1][loss.place] for free in (begin, zeros)]
    tasks = [arranged_scores(gradient, loss.labels) for gradient in gradients]
    if tasks[0] is None or tasks[1] is None or not bool(gradients[0].any()):
        return
    silent, labels = ((tasks[0].scores == 0) & (tasks[1].scores == 0)).all(1), tasks[0].labels
    known = [k for k in labels.unique().tolist() if 0 <= k < tasks[0].classes]
    classes = [k for k in known if bool(silent[labels == k].all())]
    ignored = [k for k in classes if not _is_padding(loss, k) and _is_silent(loss, begin, k)]
    if ignored and len(classes) < len(known):
        share = sum(float((labels == k).float().mean()) for k in ignored)
        names = listed([*map(str, ignored)])
        yield mistakes.LABELS_WITHOUT_GRADIENT.found(share, detail=f"These are the labels of class {names}.")


def _is_silent(loss: _FreeLoss, begin: list[Tensor], label: int) -> bool:
    """Return whether the predictions of a class have no gradient either where they are the worst, which hard mining selects."""
    free, axis = [value.clone() for value in begin], class_axis(loss.main, loss.labels)
    assert axis is not None  # there are scores of classes
    free[loss.place].select(axis, label).sub_(2 * _SCORE)
    task = arranged_scores(loss.gradient(free, loss.map)[1][loss.place], loss.labels)
    return task is not None and bool((task.scores[task.labels == label] == 0).all())


def _is_padding(loss: _FreeLoss, label: int) -> bool:
    """Return whether a label comes only behind all others of its sequence, or is the padding of an embedding."""
    embeddings = (m for m in loss.trial.names if isinstance(m, nn.Embedding))
    if any(embedding.padding_idx == label for embedding in embeddings):
        return True
    size = loss.trial.batch.size or 1
    if loss.labels.numel() % size or loss.labels.numel() == size:
        return False
    rows = (loss.labels.reshape(size, -1) == label).int()
    return bool((rows.diff(dim=1) >= 0).all())


def _floor(loss: _FreeLoss) -> Iterator[Finding]:
    """Find a loss that perfect scores cannot make small, because it is bounded: something normalises the scores again.

    Scores of 50 and 100 for the label, or for all other classes, have the same loss then; that of a cross-entropy grows with wrong scores.
    """
    signs = _label_signs(loss)
    if loss.map is not _IDENTITY or signs is None or len(loss.main) < 2 or loss.trial.mixes_outputs:
        return
    good, better, bad, worse = (loss.of_main(size * signs) for size in (50.0, 100.0, -50.0, -100.0))
    span = worse - better
    is_bounded = abs(worse - bad) <= 1e-3 * abs(worse) and abs(better - good) <= 1e-3 * abs(better)
    if is_bounded and span > 0 and better > 0.1 * span:
        start = float(loss.trial.loss_value)
        detail = f"It is {start:.3g} at first and {better:.3g} for perfect scores."
        yield mistakes.LOSS_FLOOR.found(better, detail=detail)


def _out_of_reach(loss: _FreeLoss) -> Iterator[Finding]:
    """Find labels that the last activation of the model cannot return, although the least loss is there."""
    labels, last = loss.labels, loss.trial.first_step.produced_by[:1]
    if not last or last[0] not in _REACH or not labels.is_floating_point() or labels.shape != loss.main.shape:
        return
    low, high = _REACH[last[0]]
    outside = (labels < low - _ROUNDING) | (labels > high + _ROUNDING)
    if not bool(outside.any()):
        return
    try:
        best = loss.descend(_IDENTITY)[1][loss.place]
    except RuntimeError:  # a loss of probabilities raises outside of its range
        return
    missed = outside & ((best < low) | (best > high))
    if bool(missed.any()):
        share = float(missed.float().mean())
        ends = f"the labels go from {float(labels.min()):.3g} to {float(labels.max()):.3g}"
        detail = f"The last operation is {last[0].lower()}, and {ends}."
        yield mistakes.LABELS_OUT_OF_REACH.found(share, loss.trial.last_activation, detail=detail)


def _no_shares(loss: _FreeLoss, end: list[Tensor]) -> Iterator[Finding]:
    """Find labels whose sums are not 1 behind a softmax, if their own loss is below that of its best outputs."""
    labels, main, last = loss.labels, loss.main, loss.trial.first_step.produced_by[:1]
    if last != ("Softmax",) or not labels.is_floating_point() or labels.shape != main.shape:
        return
    axes = [axis for axis in range(main.ndim) if bool(((main.sum(axis) - 1).abs() < 1e-3).all())]
    sums = labels.sum(axes[-1]) if len(axes) == 1 else labels.new_ones(1)
    others = (sums - 1).abs() > 1e-3
    if not bool(others.any()) or not bool(((labels >= 0) & (labels <= 1)).all()):
        return
    if loss.of_main(labels) < loss.value(end):
        ends = f"{float(sums.min()):g} to {float(sums.max()):g}"
        share = float(others.float().mean())
        detail = f"The last operation is softmax, and the sums of the labels go from {ends}."
        advice = (
            "use a sigmoid in place of the softmax for labels that do not exclude each other and for a single score"
        )
        yield mistakes.LABELS_OUT_OF_REACH.found(share, loss.trial.last_activation, detail=detail, advice=advice)
