"""Check that the output in evaluation mode does not depend on random numbers."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.dependence import relative_change
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError, main_output
from ikkuna.diagnosis.preflight_checks.forward_record import ForwardRecord, recorded
from ikkuna.diagnosis.preflight_checks.names import listed
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.modules import class_name
from ikkuna.probe.loss import run_model

__all__ = ["random_output"]

_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.multi_head_attention_forward),
}


_SEED = 271_828  # a user hardly has it


def random_output(trial: Trial) -> Iterator[Finding]:
    """Find an output in evaluation mode that differs between two equal forward passes.

    The model runs a second time only if the first pass has used a random generator.
    """
    if not trial.evaluation.draws:
        return
    before = trial.evaluated
    after, dropouts = _run_again(trial)
    difference = relative_change(before, after, before) if before.shape == after.shape else 1.0
    if not difference:
        return
    message = (
        f"In evaluation mode the output changes from one forward pass to the next (relative change {difference:.1g})"
    )
    if dropouts:
        message += f": dropout is on in {listed(dropouts)}."
        advice = "pass training=self.training to functional.dropout, and dropout_p=0.0 to attention in evaluation mode"
        yield Finding("random_output", "warning", message, dropouts[0], value=difference, advice=advice)
    else:
        message += ", because the model uses random numbers."
        advice = "if the model does not sample on purpose, use random numbers only if self.training"
        yield Finding("random_output", "info", message, value=difference, advice=advice)


def _run_again(trial: Trial) -> tuple[Tensor, list[str]]:
    """Return the output with other random numbers, and the names of the modules that apply dropout."""
    with trial.running():
        trial.random_states().seeded(_SEED).restore()
        batch = trial.batch.copy()
        with recorded(trial.model, trial.names, batch.size) as record, _DropoutMode(record) as mode:
            try:
                result = run_model(trial.model, batch.inputs)
            except Exception as error:
                raise CannotJudgeError(f"with other random numbers the model raises {type(error).__name__}") from error
        root = class_name(trial.model).lower()
        return main_output(result, batch.loss_inside), list(dict.fromkeys(name or root for name in mode.modules))


class _DropoutMode(TorchFunctionMode):
    """Collects the modules that call a dropout function which is on."""

    def __init__(self, record: ForwardRecord) -> None:
        self.record = record
        self.modules: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_dropout(func, args, kwargs):
            self.modules.append(self.record.running[-1] if self.record.running else "")
        return func(*args, **kwargs)


def _is_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a function applies dropout with a positive rate."""
    if func in _DROPOUTS:
        values = inspect.signature(func).bind(*args, **kwargs)
        values.apply_defaults()
        rate = values.arguments.get("p", values.arguments.get("dropout_p"))
        return bool(rate) and bool(values.arguments["training"])
    if func is functional.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return False
