"""Check of the training flags of modules."""

from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.names import counted, listed
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.torch_internals import DROPOUTS, RUNNING_NORMS

__all__ = ["eval_mode"]


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
