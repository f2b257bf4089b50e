"""Checks of activations and gradients at the first step: their scale, and whether they are finite."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.mistakes import (
    DEAD_UNITS,
    EXPLODING_GRADIENT,
    IDENTICAL_UNITS,
    NONFINITE,
    SIGNAL_LOST,
    SIGNAL_SCALE,
    VANISHING_GRADIENT,
    ZERO_GRADIENT,
)
from ikkuna.diagnosis.preflight_checks.batch import by_sample, share_between_samples, widened
from ikkuna.diagnosis.preflight_checks.first_step import CallRecord
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, main_output
from ikkuna.diagnosis.preflight_checks.trial import Trial, gradients_with, perturbed
from ikkuna.printable import counted, listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import class_name, module_of, named_modules
from ikkuna.support.torch_internals import CONVOLUTIONS
from ikkuna.support.undisturbed import run_model

_LARGEST_RMS = 30.0  # healthy layers stay below 5
_LOST = 1e-7  # healthy networks stay above 2e-5
_SAME_INPUTS = 1e-6
_SUBSTITUTED = 1e-3  # of the energy; a straight-through estimator has 0.1 to 1
_NOTHING = 1e-10  # of the energy: what rounding in float32 leaves, with a margin
_DEAD = 0.9
_BY_CHANCE = 1e-4
_FEW_ROWS = 4
_VANISHED, _EXPLODED = 1e-5, 1e4  # healthy networks stay between 1e-3 and 130


def signal_scale(trial: Trial) -> Iterator[Finding]:
    """Find the first layer with weights whose output is far larger than the inputs of the network."""
    largest = max([1.0, *(rms for _, rms in _input_scales(trial))])
    scales = [(call.name, call.rms) for call in _weighted(trial) if call.finite]
    exploded = next(((name, rms) for name, rms in scales if rms > _LARGEST_RMS * largest), None)
    if exploded:
        is_normalised = _is_normalised(trial, exploded[0])
        name, rms = exploded
        detail, at_most = ("A normalisation behind it removes this scale.", "info") if is_normalised else ("", "error")
        way = scales[: scales.index(exploded) + 1]
        makers = [name for name, gain in _steps([("", largest), *way]) if gain >= 2]
        modules = () if _is_made_by_one([("", largest), *way]) else tuple(makers)
        detail = " ".join(filter(None, (_GROWS.format(listed(makers)) if modules else "", detail)))
        yield SIGNAL_SCALE.found(rms, name, detail=detail, at_most=at_most, evidence=tuple(scales), modules=modules)


_GROWS = "No layer makes it alone: it at least doubles in each of {}."


def _steps(values: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return what each layer multiplies a value by, from the second one on."""
    return [(name, after / before) for (_, before), (name, after) in pairwise(values) if before > 0]


def _is_made_by_one(values: list[tuple[str, float]]) -> bool:
    """Return whether a single layer makes more than half of the change of a value, on a logarithmic scale."""
    whole = values[-1][1] / values[0][1]
    changes = [abs(math.log(factor)) for _, factor in _steps(values) if factor > 0]
    return whole == 0 or 2 * max(changes) > abs(math.log(whole))


def _is_normalised(trial: Trial, name: str) -> bool:
    """Return whether a normalisation is called behind the last call of a module."""
    calls = trial.first_step.record.calls
    last = max(position for position, call in enumerate(calls) if call.name == name)
    return any("Norm" in class_name(call.module) for call in calls[last + 1 :])


def _input_scales(trial: Trial) -> list[tuple[int, float]]:
    tensors = [tensor for tensor in trial.batch.tensors if tensor.is_floating_point() and tensor.numel()]
    return [(i, float(widened(tensor).square().mean().sqrt())) for i, tensor in enumerate(tensors)]


def signal_lost(trial: Trial) -> Iterator[Finding]:
    """Find the first layer behind which the outputs no longer differ between samples, although the inputs do."""
    require_different_samples(trial)
    share = share_between_samples(trial.output, trial.batch.size)
    shares = [(call.name, call.between) for call in _weighted(trial) if math.isfinite(call.between)]
    if not share < _LOST or not shares:
        return
    lost = len(shares)
    while lost and shares[lost - 1][1] < _LOST:
        lost -= 1
    if 0 < lost < len(shares):  # a layer that has never seen the input is the matter of ignores_input
        name, value = shares[lost]
        at_most, detail = "error" if share < _NOTHING else "warning", "This layer is the first."
        modules: tuple[str, ...] = ()
        if not _is_made_by_one(shares[: lost + 1]):
            losing = [name for name, kept in _steps(shares) if kept < 0.5]
            names = [name for name, _ in shares]
            modules = tuple(names[names.index(losing[0]) - 1 : names.index(losing[-1]) + 1])
            detail = f"No layer loses it alone: it fades with each behind {modules[0]}, up to {modules[-1]}."
        if has_substitute_gradient(trial):
            at_most, detail = "info", f"{detail} {_SUBSTITUTE}"
        yield SIGNAL_LOST.found(value, name, detail=detail, at_most=at_most, evidence=tuple(shares), modules=modules)


_SUBSTITUTE = "The gradient of the outputs differs all the same, as that of a choice among codes does: training can separate them."


def has_substitute_gradient(trial: Trial) -> bool:
    """Return whether the outputs would differ between samples if they were as their gradient by autograd says.

    The gradient of a random combination of the outputs, times the inputs minus their mean, is what this combination should differ by.
    """
    size = trial.batch.size
    with trial.running(as_training=True, autograd=True):
        batch = trial.batch.map(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, labels=False)
        sources = [t for t in batch.tensors if t.requires_grad and t.ndim and len(t) == size]
        output = main_output(run_model(trial.model, batch.inputs), batch.loss_inside)
        if not sources or not output.requires_grad or size is None or len(output) % size:
            return False
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(output)
        gradients = torch.autograd.grad((weights * output).sum(), sources, allow_unused=True)
    pairs = [(s.detach(), g) for s, g in zip(sources, gradients, strict=True) if g is not None]
    differences = [((x - x.mean(0)) * g).flatten(1).sum(1) for x, g in pairs]
    energy = float(sum(difference.square().sum() for difference in differences))
    return energy > _SUBSTITUTED * float((weights * output.detach()).flatten(1).sum(1).square().sum())


def require_different_samples(trial: Trial) -> None:
    """Raise `CannotJudgeError` if the inputs of all samples are equal."""
    size = trial.batch.size
    shares = [share_between_samples(tensor, size) for tensor in trial.batch.tensors]
    if size is None or size < 2:
        raise CannotJudgeError("the batch has fewer than two samples")
    if not any(share > _SAME_INPUTS for share in shares):
        raise CannotJudgeError("the samples of the batch do not differ")


def _weighted(trial: Trial) -> list[CallRecord]:
    """Return the calls of layers with a weight matrix that is not 0."""
    calls = trial.first_step.record.calls
    if not calls:
        _ = trial.output
    return [call for call in calls if _has_matrix(call.module)]


def _has_matrix(module: nn.Module) -> bool:
    own = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    return any(bool(p.detach().any()) for p in own) and not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def gradient_scale(trial: Trial) -> Iterator[Finding]:
    """Find gradients that vanish or explode from the last layers to the first ones."""
    matrices = _matrices(trial)
    scales = [(name, g.rms) for name in matrices if (g := trial.gradients.get(name)) is not None and g.finite]
    if len(scales) < 3:
        raise CannotJudgeError("the model has fewer than three layers with gradients")
    third = len(scales) // 3
    early, late = (max(rms for _, rms in part) for part in (scales[:third], scales[-third:]))
    if not early or not late:
        return
    mistakes = {VANISHING_GRADIENT: early < _VANISHED * late, EXPLODING_GRADIENT: early > _EXPLODED * late}
    detail = f"Each weight of the first layers has {early:.1g}, and of the last layers {late:.1g}."
    for mistake in (mistake for mistake, is_made in mistakes.items() if is_made):
        yield mistake.found(early / late, module_of(scales[0][0]) or None, detail=detail, evidence=tuple(scales))


def _matrices(trial: Trial) -> list[str]:
    """Return the weight matrices in the order in which their modules were called."""
    called = trial.first_step.record.called
    order = {name: called[module] for module, name in trial.names.items() if module in called}
    owners = {name: module_of(name) or trial.root for name in trial.trainable}
    modules = {name: module for module, name in trial.names.items()}
    names = [name for name, p in trial.trainable.items() if _is_matrix(p) and owners[name] in order]
    layers = [name for name in names if not isinstance(modules[owners[name]], nn.Embedding | nn.EmbeddingBag)]
    return sorted(layers, key=lambda name: order[owners[name]])


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter combines features; positions and class tokens have a first axis of length 1."""
    return parameter.ndim > 1 and min(parameter.shape[:2]) > 1


def dead_units(trial: Trial) -> Iterator[Finding]:
    """Find the first rectifier with nearly all units at 0 for the whole batch."""
    _ = trial.output
    rectifiers = [r for r in trial.first_step.record.rectifiers if not math.isnan(r.dead)]
    dead = [r for r in rectifiers if r.dead >= _DEAD and _chance(r.units, round(r.dead * r.units)) < _BY_CHANCE]
    if dead:
        name, share = dead[0].name, dead[0].dead
        detail = f"So are those of {counted(len(dead) - 1, 'later rectifier')}." if len(dead) > 1 else ""
        yield DEAD_UNITS.found(share, name, detail=detail, evidence=tuple((r.name, r.dead) for r in rectifiers))


def _chance(units: int, dead: int) -> float:
    """Return the probability of as many dead units if each is dead with a probability of 1/2.

    This is that of units behind an average, such as those of a squeeze-and-excitation: its samples hardly differ.
    """
    return float(sum(math.comb(units, number) for number in range(dead, units + 1)) / 2**units)


def identical_units(trial: Trial) -> Iterator[Finding]:
    """Find layers whose units all have the same weights, so that they stay equal while they train."""
    trial.require_values()
    layers = (nn.Linear, CONVOLUTIONS, nn.RNNBase)
    names = [name for module, name in trial.names.items() if isinstance(module, layers) and _has_equal_units(module)]
    if names:
        yield IDENTICAL_UNITS.found(module=names[0], modules=tuple(names))


def _has_equal_units(module: nn.Module) -> bool:
    return any(_is_constant(weight) for weight in module.parameters(recurse=False) if weight.requires_grad)


def _is_constant(weight: nn.Parameter) -> bool:
    """Return whether a weight matrix has equal rows that are not 0; few or short rows can be equal on purpose."""
    rows = weight.detach()
    if rows.ndim < 2 or len(rows) < _FEW_ROWS or rows[0].numel() < _FEW_ROWS:
        return False
    return bool(rows.any()) and torch.equal(rows, rows[:1].expand_as(rows))


def zero_gradient(trial: Trial) -> Iterator[Finding]:
    """Find weights that are zero and stay so, because what reads them is zero as well.

    A single zero layer begins to move, and then those before it do.  So the parameters with a gradient get noise, and others that have a
    gradient then, until there are no further ones.
    """
    if any(gradient is not None and not gradient.finite for gradient in trial.gradients.values()):
        raise CannotJudgeError("a gradient is not finite")
    moving = {name for name, gradient in trial.gradients.items() if gradient is None or gradient.rms}
    called = {trial.names[module] for module in trial.first_step.record.called if module in trial.names}
    zero = [
        name
        for name, p in trial.trainable.items()
        if p.ndim > 1 and module_of(name) in called and name not in moving and not p.detach().any()
    ]
    while left := [name for name in zero if name not in moving]:
        changed = perturbed(trial, [p for name, p in trial.trainable.items() if name in moving])
        further = {
            name for name, g in gradients_with(trial, changed).items() if g is not None and bool(g.any())
        } - moving
        if not further:
            modules = tuple(dict.fromkeys(module_of(name) or trial.root for name in left))
            detail = "It is zero and stays so, because what reads it is zero as well, whatever other parameters become."
            advice = "of two layers one behind the other, initialise at least one at random"
            yield ZERO_GRADIENT.found(0.0, modules[0], detail=detail, advice=advice, modules=modules)
            return
        moving |= further


def nonfinite(trial: Trial) -> Iterator[Finding]:
    """Find NaN and infinite elements in the earliest place: parameters, buffers, inputs, outputs, loss, gradients.

    In outputs they are an info if the loss and all gradients are finite: the loss does not read them, as those of actions that are
    not allowed.
    """
    trial.require_values()
    found = _of_parameters(trial) or _of_batch(trial) or _of_first_step(trial)
    if found is not None:
        yield found


def _of_parameters(trial: Trial) -> Finding | None:
    bad = [name for name, parameter in trial.parameters.items() if not _finite(parameter)]
    for prefix, module in named_modules(trial.model):
        for name, buffer in module._buffers.items():
            if buffer is not None and _bad_buffer(name, buffer):
                bad.append(f"{prefix}.{name}" if prefix else name)
    if not bad:
        return None
    detail = f"It concerns {counted(len(bad), 'tensor')} of the model: {listed(bad)}."
    is_buffer = bad[0] not in trial.parameters
    made = "look for 0/0, log(0) and sqrt of negative numbers in what computes it"
    advice = made if is_buffer else "initialise the model again, or load another checkpoint"
    return NONFINITE.found(len(bad), module_of(bad[0]) or None, detail=detail, advice=advice)


def _of_batch(trial: Trial) -> Finding | None:
    for what, tensors in (("inputs", trial.batch.tensors), ("labels", [trial.batch.labels])):
        for number, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            masked = number > 0 and tensor.is_floating_point()  # additive masks contain -inf
            known = tensor.masked_fill(tensor == -math.inf, 0.0) if masked else tensor
            if not _finite(known):
                bad, rows = ~known.isfinite(), by_sample(~known.isfinite(), trial.batch.size)
                count = int(bad.sum())
                detail = f"The {what} contain {counted(count, 'NaN or infinite element')}"
                if rows is not None:
                    samples = rows.flatten(1).any(1) if rows.ndim > 1 else rows
                    detail += f" in {counted(int(samples.sum()), 'sample')}, the first of which is sample {int(samples.nonzero()[0])}"
                detail += "."
                return NONFINITE.found(count, detail=detail, advice=_CLEAN)
    return None


_CLEAN = (
    "clean the data: look for missing values, and for logarithms, roots and divisions of numbers that do not allow them"
)


def _of_first_step(trial: Trial) -> Finding | None:
    step = trial.first_step
    loss_finite = step.loss is None or _finite(step.loss)
    bad = [name for name, gradient in step.gradients.items() if gradient is not None and not gradient.finite]
    if (step.output is not None and not _finite(step.output)) or not loss_finite:
        source = next((call.name for call in step.record.calls if not call.finite), None)
        detail, advice = "This module is the first with such outputs.", ""
        if source is None:
            detail = "The loss is so although the output of the model is finite."
            advice = "give labels that are not ignored" if _all_ignored(trial) else ""
        is_harmless = step.loss is not None and loss_finite and bool(step.gradients) and not bad
        detail += " The loss and all gradients are finite." if is_harmless else ""
        return NONFINITE.found(module=source, detail=detail, advice=advice, at_most="info" if is_harmless else "error")
    if bad:
        detail = f"These are gradients, behind a finite loss: {listed(bad)}."
        advice = "look for sqrt(0), norm(0) or a division by 0 behind the last of these modules"
        return NONFINITE.found(len(bad), module_of(bad[-1]) or None, detail=detail, advice=advice)
    return None


def _all_ignored(trial: Trial) -> bool:
    try:
        return not len(trial.classification.counted.labels)
    except CannotJudgeError:
        return False


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _bad_buffer(name: str, buffer: Tensor) -> bool:
    if not buffer.is_floating_point():
        return False
    infinite = name.startswith("running_") and bool(buffer.isinf().any())  # masks in buffers contain -inf
    return infinite or bool(buffer.isnan().any())
