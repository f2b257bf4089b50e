"""Runs the step of a dump again, from the state before it."""

import os
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from ikkuna.diagnosis import Dump, Rule, get_rules, read_dump
from ikkuna.errors import ConfigTypeError, DumpError
from ikkuna.export.replay.replay_run import ReplayRun, Step
from ikkuna.export.replay.restore import check_fits, restore_state
from ikkuna.export.replay.result import Replay

__all__ = ["replay"]


def replay(
    dump: str | os.PathLike[str] | Dump,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    step: Step | None = None,
    rules: Iterable[str | Rule] | None = None,
) -> Replay:
    """Run the step of a dump again, with the same state, batch and random numbers, and compare what is measured.

    The dump must hold the state of the training, see ``state_every`` of `ikkuna.diagnosis.RecorderOptions`.
    The steps from the state before the dump's step up to that step are run one after another.

    Parameters
    ----------
    dump : path or Dump
        The dump.
    model : nn.Module
        A model of the same structure; its parameters and buffers are overwritten.
    loss : nn.Module, optional
        The loss module; without it the model must return its loss, or an object with the attribute ``loss``.
    optimizer : Optimizer or iterable of them
        Optimizers of the same parameters; their states are overwritten.
    step : callable, optional
        ``step(model_calls, loss_calls)`` runs a step, for loops that do more than a forward, a backward and an optimizer's step
        for each micro-batch, such as clipping.  Each call is a pair of positional and named arguments.
    rules : iterable of str or Rule, optional
        The rules; by default those of the training, with their thresholds.

    Returns
    -------
    Replay
        Whether the findings and values are the same.

    Raises
    ------
    DumpError
        If the dump is damaged, lacks the state or the batches, or does not fit the model or the optimizer.
    ConfigTypeError
        If an argument has the wrong type.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = dump if isinstance(dump, Dump) else read_dump(dump)
    if not (found.has("state.pt") and found.has("batches.pt")):
        left_out = found.facts["left_out"]
        why = left_out.get("state.pt") or left_out.get("batches.pt") or "RecorderOptions(state_every=10) records them"
        raise DumpError(f"the dump '{found.path}' has no state and batches to replay: {why}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    state, batches = found.tensors("state.pt"), found.tensors("batches.pt")
    steps = [batch for batch in batches if state["step"] <= batch["step"] <= found.step]
    if [batch["step"] for batch in steps] != [*range(state["step"], found.step + 1)]:
        raise DumpError(f"the dump lacks batches of the steps {state['step']} to {found.step}")
    check_fits(found, model, state, optimizers)
    restore_state(model, state, optimizers)
    run = ReplayRun(found, model, loss, optimizers, step)
    return run.compare(steps, _rules(found, rules))


def _rules(dump: Dump, given: Iterable[str | Rule] | None) -> tuple[Rule, ...]:
    """Return the rules of the training, with their thresholds."""
    if given is not None:
        return get_rules(given)
    rules = []
    for facts in dump.facts["rules"]:
        try:
            [rule] = get_rules([facts["name"]])
        except ImportError as error:
            raise DumpError(f"the rule {facts['name']!r} is not installed; pass it in rules=") from error
        for name in ("patience", *rule.thresholds):
            setattr(rule, name, facts.get(name, getattr(rule, name)))
        rules.append(rule)
    return tuple(rules)
