"""Which modules a user means: by position, name, part of a name, kind or the module itself."""

import difflib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ikkuna.modules import class_name, named_children, named_modules, unwrap

__all__ = ["LayerId", "find_layer", "find_layers", "leaves"]

LayerId = int | str | nn.Module
_log = logging.getLogger(__name__)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children, by name; parametrisations do not count as children."""
    return {name: module for name, module in named_modules(model) if next(named_children(module), None) is None}


def find_layers(model: nn.Module, layers: LayerId | Sequence[LayerId]) -> list[tuple[str, nn.Module]]:
    """Return ``(name, module)`` for each of `layers`, in the order asked for; ``'*'`` means every leaf.

    Raises
    ------
    KeyError
        If one is not found (see :func:`find_layer`).
    """
    if isinstance(layers, str) and layers == "*":
        return list(leaves(model).items())
    if isinstance(layers, int | str | nn.Module) or not isinstance(layers, Iterable):
        return [find_layer(model, layers)]
    return [find_layer(model, layer) for layer in layers]


def find_layer(model: nn.Module, layer: LayerId) -> tuple[str, nn.Module]:
    """Return the name and the module that `layer` means.

    A number is the position among the leaves, from 0, or from the end if negative.  A string is a module's full name;
    or else the end of one, a part of one, or a part of a class name (whatever its case).
    The first that fits is taken, with a warning if several do.

    Raises
    ------
    KeyError
        If nothing fits; the message lists candidates.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 4))
    >>> find_layer(model, "lstm")[0], find_layer(model, 1)[0]
    ('2', '1')
    """
    if isinstance(layer, nn.Module):
        return _name_of(model, layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise KeyError(f"a layer is a number, a name or a module, got {type(layer).__name__}")
    if isinstance(layer, int):
        return _at(model, layer)
    modules = dict(named_modules(model))
    if layer in modules and layer:
        return layer, modules[layer]
    fitting = _fitting(modules, layer)
    if not fitting:
        raise KeyError(_unknown(model, layer, modules))
    if len(fitting) > 1:
        _log.warning("several layers fit %r (%s); the first is taken", layer, ", ".join(fitting[:5]))
    return fitting[0], modules[fitting[0]]


def _fitting(modules: dict[str, nn.Module], text: str) -> list[str]:
    names = [name for name in modules if name]
    tests: tuple[Any, ...] = (
        lambda name: name.endswith(f".{text}"),
        lambda name: text in name,
        lambda name: text.lower() in class_name(modules[name]).lower(),
    )
    for test in tests:
        if fitting := [name for name in names if test(name)]:
            return fitting
    root = class_name(modules[""]).lower()
    return [""] if text and text.lower() in root else []


def _at(model: nn.Module, position: int) -> tuple[str, nn.Module]:
    there = list(leaves(model).items())
    if not -len(there) <= position < len(there):
        known = ", ".join(f"{i}: {name or class_name(module)}" for i, (name, module) in enumerate(there[:20]))
        raise KeyError(f"no layer {position}; the model has {len(there)}: {known}")
    return there[position]


def _name_of(model: nn.Module, layer: nn.Module) -> tuple[str, nn.Module]:
    for name, module in named_modules(model):
        if module is unwrap(layer):
            return name, module
    raise KeyError(f"the given layer, a {class_name(layer)}, is not part of the model")


def _unknown(model: nn.Module, text: str, modules: dict[str, nn.Module]) -> str:
    known = [f"{name} ({class_name(module)})" for name, module in leaves(model).items()]
    close = difflib.get_close_matches(text, [name for name in modules if name], n=3, cutoff=0.5)
    hint = f"close: {', '.join(close)}; " if close else ""
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"no layer {text!r} in {class_name(model)}; {hint}there are: {', '.join(known[:20])}{more}"
