"""Identifies a model in a checkpoint by the name of its class, and the names and shapes of its parameters."""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ikkuna.modules import class_name, named_parameters, wrapped_modules

__all__ = ["difference", "signature"]

Signature = dict[str, Any]


def signature(model: nn.Module) -> Signature:
    """Return the name of the class of a model, and the names and shapes of its parameters without wrappers.

    Shapes are ``None`` if they are unknown: those of lazy modules, and those of FSDP1, which depend on the rank.

    Examples
    --------
    >>> signature(nn.Linear(3, 2))
    {'class': 'Linear', 'parameters': {'weight': [2, 3], 'bias': [2]}}
    """
    is_flat = any(
        type(inner).__name__ == "FullyShardedDataParallel"
        for module in model.modules()
        for inner in wrapped_modules(module)
    )
    shapes = {
        name: None if is_flat or is_lazy(parameter) else list(parameter.shape)
        for name, parameter in named_parameters(model)
    }
    return {"class": class_name(model), "parameters": shapes}


def difference(stored: Signature, present: Signature) -> str:
    """Return how a stored signature differs from that of the present model; empty if it does not.

    Examples
    --------
    >>> difference(signature(nn.Linear(3, 2)), signature(nn.Linear(4, 2)))
    'Linear (2 parameters) with weight of shape [2, 3], not Linear (2 parameters) with weight of shape [2, 4]'
    """
    texts = [f"{each['class']} ({len(each['parameters'])} parameters)" for each in (stored, present)]
    before, now = stored["parameters"], present["parameters"]
    for name in dict.fromkeys((*before, *now)):
        if name not in before or name not in now:
            own, other = ("with", "without") if name in before else ("without", "with")
            return f"{texts[0]} {own} {name}, not {texts[1]} {other} it"
        if None not in (before[name], now[name]) and list(before[name]) != list(now[name]):
            shapes = [f"with {name} of shape {list(shapes[name])}" for shapes in (before, now)]
            return f"{texts[0]} {shapes[0]}, not {texts[1]} {shapes[1]}"
    return "" if stored["class"] == present["class"] else f"{texts[0]}, not {texts[1]}"
