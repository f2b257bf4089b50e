"""Checks of the model and its optimizers that need no pass: training flags, owners of parameters, tied weights."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.preflight_checks.training_setup import CannotJudgeError, common_module, counted, listed
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.diagnosis.tied_weights import embedding_pairs, have_same_values
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import DROPOUTS, RUNNING_NORMS

__all__ = [
    "eval_mode",
    "frozen_in_optimizer",
    "learning_rate_zero",
    "not_in_optimizer",
    "parameter_in_two_groups",
    "untied_weights",
]


def eval_mode(trial: Trial) -> Iterator[Finding]:
    """Find modules that train in evaluation mode, if the mode changes what they compute.

    A module whose parameters are all frozen may stay in evaluation mode, with everything inside it.
    """
    concerned = {name: module for module, name in trial.names.items() if _depends_on_mode(module)}
    trained = _trained_modules(trial)
    still = [name for name, module in concerned.items() if not module.training and name in trained]
    if not still:
        return
    if len(still) == len(concerned):
        message = f"The model is in evaluation mode: {counted(len(still), 'module')} such as {still[0]} will not train as usual."
        advice, module = "call model.train() before training", None
    else:
        message = f"{counted(len(still), 'module')} in evaluation mode inside a model that trains: {listed(still)}."
        advice, module = "call model.train(), or freeze the parameters of these modules as well", still[0]
    yield Finding("eval_mode", "warning", message, module, value=len(still) / len(concerned), advice=advice)


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


def not_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find trainable parameters that no optimizer owns, because they will never change."""
    owned = set(map(id, _owned(trial)))
    missing = [name for name, parameter in trial.trainable.items() if id(parameter) not in owned]
    foreign = owned - set(map(id, trial.parameters.values()))
    if not missing:
        return
    share = len(missing) / len(trial.trainable)
    if share == 1 and foreign:
        message = "The optimizer owns other tensors than the parameters of this model."
        advice = "create the optimizer after the model is complete, converted and on its device"
    else:
        message = f"{counted(len(missing), 'trainable parameter')} in no optimizer: {listed(missing)}."
        advice = "pass these parameters to an optimizer, or freeze them with requires_grad_(False)"
    yield Finding("not_in_optimizer", "error", message, common_module(missing), value=share, advice=advice)


def frozen_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find parameters of the optimizers that do not require a gradient."""
    owned = set(map(id, _owned(trial)))
    frozen = [name for name, p in trial.parameters.items() if not p.requires_grad and id(p) in owned]
    if frozen:
        message = (
            f"An optimizer owns {counted(len(frozen), 'frozen parameter')}, which will not change: {listed(frozen)}."
        )
        advice = "if they should train, call requires_grad_(True)"
        yield Finding("frozen_in_optimizer", "info", message, common_module(frozen), value=len(frozen), advice=advice)


def parameter_in_two_groups(trial: Trial) -> Iterator[Finding]:
    """Find parameters that are updated more than once a step."""
    counts = Counter(map(id, _owned(trial)))
    twice = [name for name, parameter in trial.parameters.items() if counts[id(parameter)] > 1]
    if twice:
        message = f"{counted(len(twice), 'parameter')} in several parameter groups or optimizers: {listed(twice)}."
        advice = "put each parameter into one group, so that it is updated once a step"
        yield Finding(
            "parameter_in_two_groups", "warning", message, common_module(twice), value=len(twice), advice=advice
        )


def learning_rate_zero(trial: Trial) -> Iterator[Finding]:
    """Find parameter groups with the learning rate 0, except at the start of a schedule."""
    _owned(trial)
    names = {id(parameter): name for name, parameter in trial.parameters.items()}
    for optimizer in trial.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            scheduled = float(group.get("initial_lr", 0.0)) > 0
            if float(group.get("lr", 1.0)) == 0 and not scheduled and any(p.requires_grad for p in group["params"]):
                members = [names[id(p)] for p in group["params"] if id(p) in names]
                message = f"The learning rate of parameter group {number} is 0: {listed(members)}."
                advice = "set a learning rate, or freeze the parameters"
                yield Finding("learning_rate_zero", "error", message, common_module(members), value=0.0, advice=advice)


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
            message = f"The weights of {name} and {other} are two tensors, but they should be tied."
            advice = f"assign {other}.weight = {name}.weight again (in transformers: model.tie_weights())"
            yield Finding("untied_weights", "error", message, other, advice=advice)


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
