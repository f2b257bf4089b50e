"""Checks of the model and its optimizers that need no pass: training flags, owners of parameters, tied weights."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.mistakes import (
    EVALUATION_MODE,
    FROZEN_IN_OPTIMIZER,
    LEARNING_RATE_ZERO,
    NOT_IN_OPTIMIZER,
    PARAMETER_IN_TWO_GROUPS,
    RUNNING_STATISTICS_FIXED,
    STATISTICS_OF_LAST_BATCHES,
    UNREGISTERED_PARAMETERS,
    UNTIED_WEIGHTS,
)
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.printable import counted, listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import common_module, embedding_pairs, have_same_values
from ikkuna.support.torch_internals import DROPOUTS, RUNNING_NORMS, pytree


def evaluation_mode(trial: Trial) -> Iterator[Finding]:
    """Find modules that train in evaluation mode, if the mode changes what they compute.

    A module whose parameters are all frozen may stay in evaluation mode, with everything inside it.
    """
    concerned = {name: module for module, name in trial.names.items() if _depends_on_mode(module)}
    trained = _trained_modules(trial)
    still = [name for name, module in concerned.items() if not module.training and name in trained]
    if not still:
        return
    share = len(still) / len(concerned)
    detail = f"It concerns {counted(len(still), 'module')} of {len(concerned)}: {listed(still)}."
    yield EVALUATION_MODE.found(share, None if share == 1 else still[0], detail=detail, at_most="warning")


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, DROPOUTS):
        return bool(module.p)
    if isinstance(module, RUNNING_NORMS):
        return bool(module.track_running_stats)
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


def _trained_modules(trial: Trial) -> set[str]:
    """Return the modules with a trainable parameter, and those without parameters inside one of them."""
    trained: set[str] = set()

    def visit(module: nn.Module, inherited: bool, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        parameters = list(module.parameters())
        trains = any(p.requires_grad for p in parameters) if parameters else inherited
        if trains and module in trial.names:
            trained.add(trial.names[module])
        for child in module.children():
            visit(child, trains, seen)

    visit(trial.model, True, set())
    return trained


_LAST_BATCHES = 0.9


def running_statistics_fixed(trial: Trial) -> Iterator[Finding]:
    """Find normalisations in training mode whose running statistics have a momentum of exactly 0, or one of at least 0.9.

    A momentum of exactly 1 may be meant to measure the statistics of one batch.
    """
    trained = _trained_modules(trial)
    norms = ((module, name) for module, name in trial.names.items() if isinstance(module, RUNNING_NORMS))
    for norm, name in norms:
        if norm.momentum is None or not (norm.track_running_stats and norm.training and name in trained):
            continue
        if norm.momentum == 0:
            yield RUNNING_STATISTICS_FIXED.found(0.0, name)
        elif norm.momentum >= _LAST_BATCHES:
            at_most = "info" if norm.momentum == 1 else "warning"
            yield STATISTICS_OF_LAST_BATCHES.found(norm.momentum, name, at_most=at_most)


def unregistered_parameters(trial: Trial) -> Iterator[Finding]:
    """Find parameters in the graph of the output that are none of the model and of no optimizer.

    Those of an optimizer are trained on purpose, such as a learned prompt.
    """
    _ = trial.output
    owned = {id(p) for optimizer in trial.optimizers for group in optimizer.param_groups for p in group["params"]}
    foreign = {id(p) for p in trial.first_step.foreign} - owned
    if foreign:
        at_most = "error" if trial.optimizers else "info"
        if created := trial.first_step.created:
            detail, advice = (
                f"{created[0]} is created in its model's forward pass, after the optimizer.",
                "create modules in __init__",
            )
            yield UNREGISTERED_PARAMETERS.found(len(foreign), created[0], detail=detail, advice=advice, at_most=at_most)
        else:
            holder = _holder(trial, foreign)
            advice = "" if holder else "create modules in __init__ and assign them to attributes, not in forward()"
            yield UNREGISTERED_PARAMETERS.found(len(foreign), holder, advice=advice, at_most=at_most)


def _holder(trial: Trial, parameters: set[int]) -> str | None:
    """Return the name of the attribute that contains some of the parameters, if an attribute of a module does."""
    for module, name in trial.names.items():
        for attribute, value in vars(module).items():
            inside = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
            held = (p for each in inside if isinstance(each, nn.Module) for p in each.parameters())
            if not attribute.startswith("_") and any(id(p) in parameters for p in (*inside, *held)):
                return attribute if module is trial.model else f"{name}.{attribute}"
    return None


def not_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find trainable parameters that no optimizer owns, because they will never change."""
    owned = set(map(id, _owned(trial)))
    missing = [name for name, parameter in trial.trainable.items() if id(parameter) not in owned]
    foreign = owned - set(map(id, trial.parameters.values()))
    if not missing:
        return
    share = len(missing) / len(trial.trainable)
    detail, advice = f"It concerns {counted(len(missing), 'parameter')}: {listed(missing)}.", ""
    if share == 1 and foreign:
        detail = "The optimizer owns other tensors than the parameters of this model."
        advice = "create the optimizer after the model is complete, converted and on its device"
    yield NOT_IN_OPTIMIZER.found(share, common_module(missing), detail=detail, advice=advice)


def frozen_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find parameters of the optimizers that do not require a gradient."""
    owned = set(map(id, _owned(trial)))
    frozen = [name for name, p in trial.parameters.items() if not p.requires_grad and id(p) in owned]
    if frozen:
        detail = f"It concerns {counted(len(frozen), 'parameter')}: {listed(frozen)}."
        yield FROZEN_IN_OPTIMIZER.found(len(frozen), common_module(frozen), detail=detail)


def parameter_in_two_groups(trial: Trial) -> Iterator[Finding]:
    """Find parameters that are updated more than once a step."""
    counts = Counter(map(id, _owned(trial)))
    twice = [name for name, parameter in trial.parameters.items() if counts[id(parameter)] > 1]
    if twice:
        detail = f"It concerns {counted(len(twice), 'parameter')}: {listed(twice)}."
        yield PARAMETER_IN_TWO_GROUPS.found(len(twice), common_module(twice), detail=detail)


def learning_rate_zero(trial: Trial) -> Iterator[Finding]:
    """Find parameter groups with the learning rate 0, except at the start of a schedule."""
    _owned(trial)
    names = {id(parameter): name for name, parameter in trial.parameters.items()}
    for optimizer in trial.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            scheduled = float(group.get("initial_lr", 0.0)) > 0
            if float(group.get("lr", 1.0)) == 0 and not scheduled and any(p.requires_grad for p in group["params"]):
                members = [names[id(p)] for p in group["params"] if id(p) in names]
                detail = f"Group {number} contains {listed(members)}."
                yield LEARNING_RATE_ZERO.found(0.0, common_module(members), detail=detail)


def _owned(trial: Trial) -> list[nn.Parameter]:
    if not trial.optimizers:
        raise CannotJudgeError("no optimizer was given")
    return [p for optimizer in trial.optimizers for group in optimizer.param_groups for p in group["params"]]


def untied_weights(trial: Trial) -> Iterator[Finding]:
    """Find an embedding and an output layer that were one tensor and are two now.

    Either the model's configuration says that they are tied, or two tensors have the same values by construction.
    """
    trial.require_values()
    configured = _configured(trial)
    modules = ((name, module) for module, name in trial.names.items())
    for name, embedding, other, layer in embedding_pairs(modules):
        a, b = embedding._parameters["weight"], layer._parameters["weight"]
        if a is None or b is None or a is b:
            continue
        if (embedding, layer) == configured or have_same_values(a, b):
            yield UNTIED_WEIGHTS.found(module=other, detail=f"The embedding is {name}.")


def _configured(trial: Trial) -> tuple[nn.Module | None, nn.Module | None] | None:
    """Return the input and the output layer that the configuration of a model of transformers ties."""
    config = getattr(trial.model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    if not callable(text_config) or not getattr(text_config(decoder=True), "tie_word_embeddings", False):
        return None
    try:
        return trial.model.get_input_embeddings(), trial.model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
