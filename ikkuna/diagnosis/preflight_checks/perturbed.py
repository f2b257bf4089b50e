"""Runs of a model with other parameters, which show what depends on these."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError, inner_loss, main_output
from ikkuna.diagnosis.preflight_checks.training_setup import train_norms
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.probe.loss import run_model

__all__ = ["perturbed_loss", "perturbed_output"]


def perturbed_output(trial: Trial, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the output in evaluation mode, except batch norms, with noise on `parameters`; the model keeps its own.

    Raises
    ------
    CannotJudgeError
        If the model raises, or if its output contains no tensor.
    """
    with trial.running():
        train_norms(trial.model)
        return main_output(_run(trial, parameters), trial.batch.loss_inside)


def perturbed_loss(trial: Trial, parameters: Iterable[nn.Parameter]) -> float:
    """Return the loss of the first step with noise on `parameters`; the model keeps its own.

    Raises
    ------
    CannotJudgeError
        If the model or the loss raises, or if there is no loss.
    """
    with trial.running(as_training=True):
        result = _run(trial, parameters)
        if trial.batch.loss_inside:
            loss = inner_loss(result)
        else:
            loss = _guarded(lambda: trial.call_loss(result, trial.batch.copy().labels))
    if loss is None:
        raise CannotJudgeError("the model returned no loss")
    return float(loss.sum())


def _run(trial: Trial, parameters: Iterable[nn.Parameter]) -> Any:
    chosen = set(map(id, parameters))
    generator = torch.Generator().manual_seed(0)
    changed = {name: _noisy(p, generator) for name, p in trial.model.named_parameters() if id(p) in chosen}
    caller = _Caller(trial.model, changed)
    return _guarded(lambda: run_model(caller, trial.batch.copy().inputs))  # type: ignore[arg-type]


def _noisy(parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    value = parameter.detach()
    if not value.is_floating_point() or not value.numel():
        return value
    noise = torch.randn(value.shape, generator=generator, device="cpu").to(value)
    return value + noise * value.square().mean().sqrt().clamp(min=0.1)


def _guarded(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise CannotJudgeError(f"with changed parameters the model raises {type(error).__name__}") from error


class _Caller:
    """A model with other parameters."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        self.model, self.changed = model, parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.changed, args, kwargs)
