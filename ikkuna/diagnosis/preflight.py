"""Finds mistakes before the first training step."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ikkuna.diagnosis.findings import FindingList, Findings
from ikkuna.diagnosis.mistakes import EXPLAINS
from ikkuna.diagnosis.preflight_checks import dependence, differences, labels, runs, sequences, signal
from ikkuna.diagnosis.preflight_checks import loss as losses
from ikkuna.diagnosis.preflight_checks import model as models
from ikkuna.diagnosis.preflight_checks.batch import split_batch
from ikkuna.diagnosis.preflight_checks.freed_outputs import freed_outputs
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.trial import Check, Trial
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.store.finding import Finding

_OF_OUTPUTS: tuple[Check, ...] = (
    *(dependence.ignores_input, dependence.batch_leak, dependence.random_output, dependence.inplace_changes_output),
)
"""The checks that concern no loss: an objective may mix the samples itself before it calls the model."""

CHECKS: tuple[Check, ...] = (
    *(models.not_in_optimizer, models.frozen_in_optimizer, models.parameter_in_two_groups, models.learning_rate_zero),
    *(
        models.evaluation_mode,
        models.running_statistics_fixed,
        models.untied_weights,
        signal.identical_units,
        signal.zero_gradient,
        losses.input_scale,
        signal.nonfinite,
    ),
    *(models.unregistered_parameters, runs.first_step_runs, runs.label_range, runs.label_dtype, runs.label_shape),
    *(labels.labels_of_other_samples, labels.label_in_inputs, labels.duplicate_rows, labels.rows_without_gradient),
    *(
        losses.loss_at_init,
        losses.frozen_output_layer,
        losses.loss_scale,
        losses.loss_contract,
        losses.softmax_twice,
        freed_outputs,
        runs.no_gradient,
        differences.wrong_gradient,
    ),
    *(signal.signal_scale, signal.signal_lost, signal.gradient_scale, signal.dead_units, differences.no_activation),
    *_OF_OUTPUTS,
    *(
        sequences.time_leak,
        sequences.label_offset,
        sequences.one_index,
        sequences.padding_inside,
        sequences.padding_changes_output,
    ),
    runs.first_objective,
)


_log = logging.getLogger(__name__)


def preflight(
    model: nn.Module,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    causal: bool | None = None,
    objective: Callable[[nn.Module, Any], Any] | None = None,
) -> Findings:
    """Check a model, a batch, a loss and an optimizer before training, and return what is wrong.

    The checks run the model a few times and leave it as it was: parameters, buffers, gradients, modes, attributes, hooks
    and random states are the same afterwards, also if a check or the model raises.  The optimizers make no step; copies of the
    model and the optimizers may make one.  While the checks run, a copy of the parameters and their gradients exist.
    Changes inside a list or dictionary of the user, and changes outside the model, are not restored.

    Parameters
    ----------
    model : nn.Module
        The model, in the state in which training begins.
    batch : object
        One batch of the training data: a tensor, ``(inputs, labels)``, ``(input, input, …, labels)``, or a dictionary
        of named inputs.  Tensors are copied to the device of the model.  Without it, only checks that need no pass run.
    loss : callable, optional
        Called with the output and the labels.  Without it, a model with named inputs must return its loss.
    optimizer : torch.optim.Optimizer or iterable of torch.optim.Optimizer, optional
        Every optimizer of the model.
    causal : bool, optional
        Whether an output may depend only on inputs of the same and earlier positions (second axis).  By default the
        model is causal if the labels are the next inputs.
    objective : callable, optional
        In place of a loss, a function of the model and the batch that returns what ``backward()`` is called on, for a loop that
        computes its loss itself.  It is called several times, so it must call the model that it is given, and no optimizer.

    Returns
    -------
    Findings
        The findings, the most severe first; ``print()`` shows a table.  Its attribute ``skipped`` names the checks that
        could not judge, with the reasons.

    Raises
    ------
    ConfigTypeError
        If an argument has a wrong type, for example a data loader in place of a batch.
    ConfigError
        If there are a loss and an objective.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))
    >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = torch.optim.Adam(model[2].parameters())
    >>> [finding.rule for finding in preflight(model, batch, nn.CrossEntropyLoss(), optimizer)]
    ['not_in_optimizer', 'softmax_twice']
    >>> def distil(model, batch):
    ...     goals = torch.full((8, 3), 1 / 3)
    ...     return nn.functional.kl_div(model(batch[0]), goals, reduction="batchmean")
    >>> [finding.rule for finding in preflight(model, batch, objective=distil)]
    ['loss_contract']
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise ConfigTypeError(f"loss must be a function of output and labels, got {type(loss).__name__}")
    if objective is not None and not callable(objective):
        raise ConfigTypeError(f"objective must be a function of model and batch, got {type(objective).__name__}")
    if objective is not None and loss is not None:
        raise ConfigError("preflight() needs a loss of output and labels or an objective of model and batch, got both")
    named = batch if objective is None or batch is None else {"batch": batch}
    split = None if batch is None else split_batch(named, loss is not None)
    trial = Trial(model, split, loss, _optimizers(optimizer), causal, objective)
    found = FindingList(EXPLAINS)
    judged: list[str] = []
    skipped: dict[str, str] = {}
    with trial.restored():
        for check in CHECKS:
            try:
                for finding in _run(check, trial.of_model if check in _OF_OUTPUTS else trial):
                    # what a check before the graph has found, it has found in a module that is named more exactly
                    if check is not runs.first_objective or finding.rule not in found.causes:
                        found.add(finding)
                judged.append(check.__name__)
            except CannotJudgeError as reason:
                skipped[check.__name__] = str(reason)
    return Findings(found, judged, skipped)


def _run(check: Check, trial: Trial) -> list[Finding]:
    try:
        return list(check(trial))
    except CannotJudgeError:
        raise
    except Exception as error:
        _log.debug("the check %s failed", check.__name__, exc_info=True)
        text = str(error).strip().splitlines() or [""]
        raise CannotJudgeError(f"the check raised {type(error).__name__}: {text[0]}"[:200]) from error


def _optimizers(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for each in several:
        if not hasattr(each, "param_groups"):
            raise ConfigTypeError(f"optimizer must be a torch.optim.Optimizer, got {type(each).__name__}")
    return tuple(several)
