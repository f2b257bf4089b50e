"""Checks by finite differences: of the loss along parameters, and of the output along inputs."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.mistakes import NO_ACTIVATION, REVERSED_GRADIENT, WRONG_GRADIENT
from ikkuna.diagnosis.preflight_checks.dependence import require_no_change
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.training_setup import ObjectiveModel
from ikkuna.diagnosis.preflight_checks.trial import Trial, directions
from ikkuna.store.finding import Finding
from ikkuna.support.failures import error_text
from ikkuna.support.modules import module_of, named_parameters
from ikkuna.support.torch_internals import nodes_behind
from ikkuna.support.undisturbed import run_model

_STEPS = (1e-5, 1e-6)  # relative to the root mean square of each parameter
_SHARE = 1e-3  # of the derivative; in double precision healthy models stay below 1e-6
_MOST_PARAMETERS, _MOST_MODULES = 20_000_000, 8


def wrong_gradient(trial: Trial) -> Iterator[Finding]:
    """Find a part whose gradient misses a path by which the loss depends on it.

    A copy of the model computes in double precision.  Along one random direction of the parameters the derivative of the loss by autograd
    is compared with finite differences.  Their error is how far those of two steps, and those ahead and back, are apart: the loss has a
    kink where a rectifier is exactly at 0.  If they differ, the modules are compared one by one.
    The comparison needs a model without operations whose gradient is a substitute on purpose, such as rounding.
    With a `torch.autograd.Function` of the user's, only a gradient that is exactly the negative of the derivative is a mistake.
    """
    if not trial.first_step.has_gradient or trial.loss_value.numel() != 1 or not bool(trial.loss_value.isfinite()):
        raise CannotJudgeError("the loss has no finite gradient")
    if sum(p.numel() for p in trial.trainable.values()) > _MOST_PARAMETERS:
        raise CannotJudgeError(f"the model has more than {_MOST_PARAMETERS:,} parameters")
    precise = trial.in_double_precision
    parameters = {name: p for name, p in precise.model.named_parameters() if p.requires_grad}
    gradients, has_own_derivatives = _gradients(precise, parameters)
    reached = {name for name in parameters if gradients[name] is not None}
    if not _differs(precise, parameters, gradients, reached):
        return
    owners: dict[str, set[str]] = {}
    shown = {id(parameter): name for name, parameter in named_parameters(precise.model)}  # without names of wrappers
    for name, parameter in parameters.items():
        owners.setdefault(module_of(shown.get(id(parameter), name)), set()).add(name)
    chosen = [*owners][:: -(-len(owners) // _MOST_MODULES)]
    wrong = [owner for owner in chosen if _differs(precise, parameters, gradients, owners[owner] & reached)]
    names = tuple(owner or trial.root for owner in wrong)
    # an objective may stop or reverse gradients on purpose
    at_most = "info" if isinstance(trial.model, ObjectiveModel) else "error"
    if has_own_derivatives:
        negative = {name: None if gradient is None else -gradient for name, gradient in gradients.items()}
        if not wrong or any(_differs(precise, parameters, negative, owners[owner] & reached) for owner in wrong):
            raise CannotJudgeError("an operation of the model has a derivative of its own")
        yield REVERSED_GRADIENT.found(len(wrong), _behind(trial, names[-1]), modules=names, at_most=at_most)
    elif wrong:
        require_no_change(trial, as_training=True)
        yield WRONG_GRADIENT.found(len(wrong), names[-1], modules=names, at_most=at_most)


def _behind(trial: Trial, name: str) -> str:
    """Return the module that is called after the last call of another one; the latter if there is none."""
    called = [call.name for call in trial.first_step.record.calls]
    last = max((position for position, each in enumerate(called) if each == name), default=len(called))
    return called[last + 1] if last + 1 < len(called) else name


def _gradients(precise: Trial, parameters: dict[str, nn.Parameter]) -> tuple[dict[str, Tensor | None], bool]:
    """Return the gradients by autograd, and whether an operation of the user's computes one of them."""
    with precise.running(as_training=True, autograd=True), _Substitutes():
        try:
            loss = precise.loss_of_result(run_model(precise.model, precise.batch.copy().inputs))
        except RuntimeError as error:
            raise CannotJudgeError(f"in double precision the model raises {error_text(error)}"[:200]) from error
        if loss.dtype != torch.float64:
            raise CannotJudgeError("the model does not compute in double precision")
        found = torch.autograd.grad(loss.reshape(()), [*parameters.values()], allow_unused=True)
    return dict(zip(parameters, found, strict=True)), _has_own_derivatives(loss)


def _has_own_derivatives(loss: Tensor) -> bool:
    """Return whether a subclass of `torch.autograd.Function` is in the graph."""
    own = torch.autograd.function.BackwardCFunction
    return any(issubclass(type(node), own) for node in nodes_behind([loss.grad_fn]))


def _differs(
    precise: Trial, parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor | None], names: set[str]
) -> bool:
    """Return whether autograd and finite differences disagree along one direction of some parameters by more than their error."""
    chosen = [parameters[name] for name in parameters if name in names]
    if not chosen:
        return False
    along = directions(precise, chosen)
    unmoved = {  # rows of padding have no gradient on purpose
        id(module._parameters["weight"]): module.padding_idx
        for module in precise.model.modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
    for name in along:
        if (row := unmoved.get(id(parameters[name]))) is not None:
            along[name][row] = 0
    by_autograd = float(
        sum((gradient * along[name]).sum() for name in along if (gradient := gradients[name]) is not None)
    )
    here = _loss_along(precise, along, 0.0)
    ahead, back = ([(_loss_along(precise, along, s * h) - here) / (s * h) for h in _STEPS] for s in (1, -1))
    slopes = [(a + b) / 2 for a, b in zip(ahead, back, strict=True)]
    error = abs(slopes[0] - slopes[1]) + abs(ahead[1] - back[1])
    difference = abs(by_autograd - slopes[0])
    return difference > 10 * error + 1e-12 and difference > _SHARE * max(abs(slopes[0]), abs(by_autograd))


def _loss_along(precise: Trial, along: dict[str, Tensor], step: float) -> float:
    """Return the loss of the copy with parameters moved along a direction, which are restored."""
    moved = [(p, p.detach().clone(), along[name]) for name, p in precise.model.named_parameters() if name in along]
    with torch.no_grad():
        try:
            for parameter, value, direction in moved:
                parameter.copy_(value + step * direction)
            with precise.running(as_training=True):
                return float(precise.loss_of_result(run_model(precise.model, precise.batch.copy().inputs)))
        finally:
            for parameter, value, _ in moved:
                parameter.copy_(value)


_ROUNDING = {
    function
    for name in ("round", "floor", "ceil", "trunc", "sign", "argmin", "bernoulli", "bernoulli_", "round_", "heaviside")
    for owner in (torch, Tensor)
    if (function := getattr(owner, name, None)) is not None
}


class _Substitutes(TorchFunctionMode):
    """Raises `CannotJudgeError` if an operation without a useful derivative is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ROUNDING:
            raise CannotJudgeError(f"the model calls {func.__name__}, the gradient of which is often replaced")
        return func(*args, **(kwargs or {}))


_EPSILONS = 100


def no_activation(trial: Trial) -> Iterator[Finding]:
    """Find two layers that are one, because the output is a linear function of the inputs.

    The second difference of the output along a line of inputs is rounding only; layers with few units in between are factors on purpose.
    The weights of a copy are moved before: a branch whose last weights begin at 0 is linear only at its start.
    An activation of torch that was called is linear by its arguments, and is named.
    """
    x, calls = trial.batch.tensors[0], trial.first_step.record.calls
    if not x.is_floating_point() or not x.numel() or trial.evaluation.draws:
        raise CannotJudgeError("the inputs are no floating-point numbers, or the output is random")
    layers = [call.module for call in calls if isinstance(call.module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    shapes = [tuple(next(iter(module.parameters(recurse=False))).shape[:2]) for module in layers]
    pairs = [(a, b) for a, b in pairwise(shapes) if a[0] == b[1] and a[0] >= min(a[1], b[0])]
    if not pairs:
        raise CannotJudgeError("no two layers with weights follow each other")
    precise = _moved(trial.in_double_precision)
    x = precise.batch.tensors[0]
    noise = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
        * 2
        * x.std().clamp(min=0.1)
    )

    def along(size: float) -> Tensor:
        return precise.evaluate(precise.batch.map(lambda t: t + size * noise if t is x else t, labels=False)).output

    here, ahead, back = precise.evaluated, along(1.0), along(-1.0)
    if here.dtype != torch.float64:
        raise CannotJudgeError("the model does not compute in double precision")
    rounding = _EPSILONS * torch.finfo(here.dtype).eps * float(max(t.abs().max() for t in (ahead, here, back)))
    first, second = float((ahead - back).abs().max()), float((ahead + back - 2 * here).abs().max())
    if first > 1000 * rounding and second <= rounding:
        linear = next((call for call in calls if type(call.module).__module__ == nn.ReLU.__module__), None)
        detail = "" if linear is None else f"{linear.name} is linear too."
        yield NO_ACTIVATION.found(second / first, module=None if linear is None else linear.name, detail=detail)


def _moved(trial: Trial) -> Trial:
    """Return a trial of a copy of the model with noise on every parameter."""
    model = copy.deepcopy(trial.model)
    noise = directions(trial, trial.model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in noise:
                parameter.add_(noise[name])
    return Trial(model, trial.batch, trial.loss)
